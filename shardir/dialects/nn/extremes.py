"""The index of the maximum or minimum along a dimension."""

from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from xdsl.dialects.builtin import AnyFloat, IntegerAttr, TensorType, UnitAttr, i64
from xdsl.ir import SSAValue
from xdsl.irdl import (
    operand_def,
    opt_prop_def,
    prop_def,
    result_def,
)

from shardir.algebra.factors import Factors
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.elementwise import NumpyFunction
from shardir.dialects.nn.logic import IsnanOp, OrOp
from shardir.dialects.nn.properties import axis_of
from shardir.dialects.nn.types import arithmetic_element, check_not_empty, unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder


# ---- the index of the maximum or minimum ----


class _ArgExtreme(TensorOp, ABC):
    x = operand_def(TensorType)
    axis = prop_def(IntegerAttr.constr(type=i64))
    keep = opt_prop_def(UnitAttr)
    out = result_def(TensorType)
    assembly_format = f"$x `axis` $axis (`keep` $keep^)? {STRATEGY}"

    KIND: ClassVar[str]
    NUMPY: ClassVar[NumpyFunction]

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        shape = operands[0].get_shape()
        arithmetic_element(cls.name, operands)
        axis = axis_of(props, "axis", len(shape))
        check_not_empty(shape[axis], f"a {cls.KIND} along dimension {axis}")
        kept = (1,) if "keep" in props else ()
        return [tensor(i64, (*shape[:axis], *kept, *shape[axis + 1 :]))]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        shape = operands[0].get_shape()
        axis, names = axis_of(props, "axis", len(shape)), factor_names(len(shape))
        kept = [""] if "keep" in props else []
        out = [*names[:axis], *kept, *names[axis + 1 :]]
        shapes = [t.get_shape() for t in (*operands, *results)]
        return Factors.of([names], [out], shapes, replicate=[names[axis]])

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        axis = axis_of(self.properties, "axis", arrays[0].ndim)
        return type(self).NUMPY(arrays[0], axis=axis, keepdims=self.keep is not None)

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (None,)

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        """Reduce to the extreme, then to its smallest index. NaN counts as maximum and minimum."""
        t = unsharded_type(self.x)
        axis = axis_of(self.properties, "axis", len(t.get_shape()))
        is_extreme = b.compare("eq", self.x, b.reduce(self.x, self.KIND, [axis], keep=True))
        if isinstance(t.element_type, AnyFloat):
            is_extreme = b.value(OrOp, is_extreme, b.value(IsnanOp, self.x))
        index = b.iota(axis, like=self.x)
        index = b.select(is_extreme, index, b.scalar(t.get_shape()[axis], index))
        return (b.reduce(index, "min", [axis], self.keep is not None),)


@op_definition
class ArgmaxOp(_ArgExtreme):
    """The i64 index along `axis` of the first maximum."""

    name = "nn.argmax"
    KIND: ClassVar[str] = "max"
    NUMPY: ClassVar[NumpyFunction] = np.argmax


@op_definition
class ArgminOp(_ArgExtreme):
    """The i64 index along `axis` of the first minimum."""

    name = "nn.argmin"
    KIND: ClassVar[str] = "min"
    NUMPY: ClassVar[NumpyFunction] = np.argmin
