"""Contractions of two tensors: each op has an einsum equation.

    %c = nn.einsum "bik,bkj->bij" %a, %b : (tensor<8x4x5xf32>, tensor<8x5x6xf32>)
                                         -> tensor<8x4x6xf32>
    %c = nn.matmul %a, %b : (tensor<4x5xf32>, tensor<5x6xf32>) -> tensor<4x6xf32>

Each letter is a factor. Letters of both operands that the result lacks are summed over.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from xdsl.dialects.builtin import StringAttr, TensorType
from xdsl.ir import SSAValue
from xdsl.irdl import operand_def, prop_def, result_def

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Shape
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types
from shardir.dialects.nn.types import arithmetic_element, unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder

EQUATION = re.compile(r"([a-zA-Z]*),([a-zA-Z]*)->([a-zA-Z]*)")


@lru_cache(maxsize=4096)
def split_equation(equation: str) -> tuple[str, str, str]:
    """The letters of the operands and of the result.

    Raises:
        ShardirError: the text is not an equation of two operands, a term repeats a letter, or a
            letter is in one term only.
    """
    m = EQUATION.fullmatch(equation.replace(" ", ""))
    if m is None:
        message = f"expected an equation of two operands, got {equation!r}"
        raise ShardirError(coded("T7", message))
    x, y, z = m.groups()
    for part in (x, y, z):
        if len(set(part)) != len(part):
            message = f"expected distinct letters, got {part!r} in {equation!r}"
            raise ShardirError(coded("T7", message))
    for c in x + y + z:
        if (c in x) + (c in y) + (c in z) < 2:
            message = f"expected each letter in two terms of {equation!r}, got {c!r} in one"
            raise ShardirError(coded("T7", message, use="use nn.reduce or nn.broadcast"))
    return x, y, z


class Contraction(TensorOp, ABC):
    """Products of elements of two tensors, summed over the letters that the result lacks."""

    lhs = operand_def(TensorType)
    rhs = operand_def(TensorType)
    out = result_def(TensorType)
    MULTILINEAR: ClassVar[bool] = True
    PRECISION: ClassVar[str] = "narrow"

    @classmethod
    @abstractmethod
    def equation_of(cls, operands: Types, props: Props) -> str:
        """The einsum equation."""

    @property
    def letters(self) -> tuple[str, str, str]:
        types = unsharded_type(self.lhs), unsharded_type(self.rhs)
        return split_equation(self.equation_of(types, self.properties))

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        x, y, z = split_equation(cls.equation_of(operands, props))
        sizes: dict[str, int] = {}
        for i, (letters, t) in enumerate(zip((x, y), operands, strict=True)):
            shape = t.get_shape()
            if len(shape) != len(letters):
                message = (
                    f"expected operand {i} with the dimensions {letters!r}, "
                    f"got {len(shape)} dimensions"
                )
                raise ShardirError(coded("T7", message, use="use one letter for each dimension"))
            for c, n in zip(letters, shape, strict=True):
                if sizes.setdefault(c, n) != n:
                    message = (
                        f"expected size {sizes[c]} of dimension {letters.index(c)} of operand {i}, "
                        f"got {n}"
                    )
                    raise ShardirError(coded("T7", message, use="use equal sizes"))
        return [tensor(arithmetic_element(cls.name, operands), tuple(sizes[c] for c in z))]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        x, y, z = split_equation(cls.equation_of(operands, props))
        rows, contracted = ([f for f in x if (f in z) == free] for free in (True, False))
        return Factors.of(
            [list(x), list(y)], [list(z)], [t.get_shape() for t in (*operands, *results)],
            dealt=[*dict.fromkeys((*rows, *contracted, *y))],
        )  # fmt: skip

    @classmethod
    def flops(cls, sizes: Mapping[str, int], shapes: Sequence[Shape]) -> int:
        return 2 * prod(sizes.values())

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        x, y, z = self.letters
        return np.asarray(np.einsum(f"{x},{y}->{z}", *arrays, optimize=True))

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        x, y, z = self.letters
        return b.einsum(f"{z},{y}->{x}", dy, self.rhs), b.einsum(f"{x},{z}->{y}", self.lhs, dy)


@op_definition
class EinsumOp(Contraction):
    """The contraction of `equation`."""

    name = "nn.einsum"
    equation = prop_def(StringAttr)
    assembly_format = f"$equation $lhs `,` $rhs {STRATEGY}"

    @classmethod
    def equation_of(cls, operands: Types, props: Props) -> str:
        equation = props["equation"]
        assert isinstance(equation, StringAttr)
        return equation.data


@op_definition
class MatmulOp(Contraction):
    """Matrix product of the last two dimensions; leading dimensions are a batch. The whole batch
    shares a right operand with two dimensions."""

    name = "nn.matmul"
    assembly_format = f"$lhs `,` $rhs {STRATEGY}"

    @classmethod
    def equation_of(cls, operands: Types, props: Props) -> str:
        m, n = (len(t.get_shape()) for t in operands)
        if m < 2 or (n not in (2, m)):
            message = (
                f"expected (..., i, k) and (k, j) or (..., k, j) in nn.matmul, "
                f"got {m} and {n} dimensions"
            )
            raise ShardirError(coded("T7", message, use="use nn.reshape or nn.einsum"))
        batch = "abcdefgh"[: m - 2]
        right = batch if n == m else ""
        return f"{batch}ik,{right}kj->{batch}ij"
