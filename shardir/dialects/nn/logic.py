"""Elementwise logic: comparisons, tests of floats, and bitwise operations."""

from abc import ABC
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import IntegerType, i1
from xdsl.irdl import irdl_attr_definition, prop_def

from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, Types
from shardir.dialects.nn.elementwise import Binary, NumpyFunction, PiecewiseConstant, Unary
from shardir.dialects.nn.types import float_element, integer_element, same_element
from shardir.dialects.text import WordAttr

COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@irdl_attr_definition
class ComparisonAttr(WordAttr):
    """`<eq>`, `<ne>`, `<lt>`, `<le>`, `<gt>` or `<ge>`."""

    name = "nn.comparison"

    @classmethod
    def words(cls) -> tuple[str, ...]:
        return tuple(COMPARISONS)


@op_definition
class CompareOp(PiecewiseConstant, Binary):
    """i1 elements: whether the comparison of x with y holds."""

    name = "nn.compare"
    how = prop_def(ComparisonAttr)
    assembly_format = f"$how $lhs `,` $rhs {STRATEGY}"

    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        same_element(operands)
        return i1

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return COMPARISONS[self.how.data](arrays[0], arrays[1])


class FloatTest(PiecewiseConstant, Unary, ABC):
    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        float_element(cls.name, operands)
        return i1


@op_definition
class IsnanOp(FloatTest):
    """i1 elements: whether x is NaN"""

    name = "nn.isnan"
    NUMPY: ClassVar[NumpyFunction] = np.isnan


@op_definition
class IsinfOp(FloatTest):
    """i1 elements: whether x is infinite"""

    name = "nn.isinf"
    NUMPY: ClassVar[NumpyFunction] = np.isinf


@op_definition
class IsfiniteOp(FloatTest):
    """i1 elements: whether x is neither infinite nor NaN"""

    name = "nn.isfinite"
    NUMPY: ClassVar[NumpyFunction] = np.isfinite


class Bitwise(PiecewiseConstant, ABC):
    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        element = same_element(operands)
        if not isinstance(element, IntegerType):
            message = f"expected i1 or integers in {cls.name}, got {element}"
            raise ShardirError(coded("T5", message, use="use nn.compare, which returns i1"))
        return element


@op_definition
class AndOp(Bitwise, Binary):
    """x and y: logical for i1, bitwise for integers"""

    name = "nn.and"
    NUMPY: ClassVar[NumpyFunction] = np.bitwise_and


@op_definition
class OrOp(Bitwise, Binary):
    """x or y: logical for i1, bitwise for integers"""

    name = "nn.or"
    NUMPY: ClassVar[NumpyFunction] = np.bitwise_or


@op_definition
class XorOp(Bitwise, Binary):
    """x xor y: logical for i1, bitwise for integers"""

    name = "nn.xor"
    NUMPY: ClassVar[NumpyFunction] = np.bitwise_xor


class Shift(PiecewiseConstant, Binary, ABC):
    """A shift of the bits of integers, by 0 to one less than they have."""

    @classmethod
    def element(cls, operands: Types, props: Props) -> Any:
        return integer_element(cls.name, operands)


@op_definition
class ShiftLeftOp(Shift):
    """The bits of x shifted to the left by y, with zeros at the right"""

    name = "nn.shift_left"
    NUMPY: ClassVar[NumpyFunction] = np.left_shift


@op_definition
class ShiftRightOp(Shift):
    """The bits of x shifted to the right by y, with copies of the sign at the left"""

    name = "nn.shift_right"
    NUMPY: ClassVar[NumpyFunction] = np.right_shift


@op_definition
class NotOp(Bitwise, Unary):
    """not x: logical for i1, bitwise for integers"""

    name = "nn.not"
    NUMPY: ClassVar[NumpyFunction] = np.invert
