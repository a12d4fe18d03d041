"""Rotary and sinusoidal position embeddings.

    %p = nn.iota dim 0 -> tensor<16xi32>
    %r = nn.rotary <halves> %q, %p base 1.0e4 : (tensor<2x8x16x4xf32>, tensor<16xi32>) -> ...

Positions are an operand. If they are counted by `nn.iota` and the sequence is split, each device
counts from the first position of its shard.

Pair i of the d / 2 pairs of the last dimension rotates by the frequency base^(-2 i / d). A pair is
elements 2 i and 2 i + 1 with `interleaved`, i and i + d / 2 with `halves`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import FloatAttr, TensorType, UnitAttr, f64
from xdsl.ir import SSAValue
from xdsl.irdl import (
    irdl_attr_definition,
    operand_def,
    opt_prop_def,
    prop_def,
    result_def,
)

from shardir.algebra.factors import Factors
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.elementwise import broadcast_shape
from shardir.dialects.nn.indexing import check_indices
from shardir.dialects.nn.properties import float_of
from shardir.dialects.nn.types import float_element
from shardir.dialects.text import WordAttr

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder


@irdl_attr_definition
class PairingAttr(WordAttr):
    """`<halves>` or `<interleaved>`."""

    name = "nn.pairing"

    @classmethod
    def words(cls) -> tuple[str, ...]:
        return ("halves", "interleaved")


def needs_pairs(d: int, props: Props) -> None:
    """Raises ShardirError unless the size `d` of the last dimension is even, and the base above
    0."""
    if d % 2:
        raise ShardirError(
            coded("T6", f"expected a last dimension of pairs, got size {d}", use="use an even size")
        )
    base = props["base"]
    assert isinstance(base, FloatAttr)
    if not base.value.data > 0:
        raise ShardirError(coded("T10", f"expected a base above 0, got {base.value.data}"))


def angles(positions: Array, pairs: Array, d: int, base: float, dtype: Any) -> Array:
    """Positions times frequencies, [.., pairs], for given pairs of d elements; computed in `dtype`:
    single precision, as models are trained, or double for f64."""
    frequencies = (base ** (-2.0 * pairs / d)).astype(dtype)
    return positions[..., None].astype(dtype) * frequencies


@op_definition
class RotaryOp(TensorOp):
    """Each pair of the last dimension rotated by its frequency times the position; by the negative
    angle with `reverse`. Positions broadcast to the leading dimensions"""

    name = "nn.rotary"
    pairing = prop_def(PairingAttr)
    x = operand_def(TensorType)
    positions = operand_def(TensorType)
    base = prop_def(FloatAttr.constr(type=f64))
    reverse = opt_prop_def(UnitAttr)
    out = result_def(TensorType)
    assembly_format = f"$pairing $x `,` $positions `base` $base (`reverse` $reverse^)? {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        x, positions = operands
        float_element(cls.name, operands[:1])
        check_indices(positions)
        if not x.get_shape():
            raise ShardirError(
                coded("T6", "expected a last dimension of pairs, got a scalar", use="add one")
            )
        needs_pairs(x.get_shape()[-1], props)
        lead = x.get_shape()[:-1]
        if broadcast_shape([positions.get_shape(), lead]) != lead:
            raise ShardirError(
                coded(
                    "T6",
                    "expected positions that broadcast to the leading dimensions of x, "
                    f"{list(lead)}, got {list(positions.get_shape())}",
                )
            )
        return [tensor(x.element_type, x.get_shape())]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        x, positions = (t.get_shape() for t in operands)
        names = factor_names(len(x))
        lead = len(x) - 1 - len(positions)
        position_factors = [
            f if n == m else ""
            for f, n, m in zip(names[lead:-1], positions, x[lead:-1], strict=True)
        ]
        return Factors.of(
            [names, position_factors], [names], [x, positions, x], replicate=names[-1:]
        )

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        x, positions = arrays
        d = x.shape[-1]
        turn = angles(positions, np.arange(d // 2), d, float_of(self, "base"), x.dtype)
        cos, sin = np.cos(turn), np.sin(turn if self.reverse is None else -turn)
        interleaved = self.pairing.data == "interleaved"
        pairs = (*x.shape[:-1], d // 2, 2) if interleaved else (*x.shape[:-1], 2, d // 2)
        axis = -1 if interleaved else -2
        a, b = np.moveaxis(x.reshape(pairs), axis, 0)
        return np.stack([a * cos - b * sin, b * cos + a * sin], axis=axis).reshape(x.shape)

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        """The transpose of a rotation rotates by the negative angle."""
        props: dict[str, Any] = {"pairing": self.pairing, "base": self.base}
        if self.reverse is None:
            props["reverse"] = UnitAttr()
        return b.value(RotaryOp, dy, self.positions, props=props), None


@op_definition
class SinusoidOp(TensorOp):
    """The sine and cosine of each position times each frequency, as pairs of a new last dimension
    (Vaswani et al., 2017)"""

    name = "nn.sinusoid"
    pairing = prop_def(PairingAttr)
    positions = operand_def(TensorType)
    base = prop_def(FloatAttr.constr(type=f64))
    out = result_def(TensorType)
    INFERRED: ClassVar[bool] = False
    GLOBAL_TYPES: ClassVar[bool] = True
    assembly_format = f"$pairing $positions `base` $base {STRATEGY}"

    @classmethod
    def check_results(cls, operands: Types, results: Types, props: Props) -> None:
        check_indices(operands[0])
        float_element(cls.name, results)
        shape = results[0].get_shape()
        if not shape or shape[:-1] != operands[0].get_shape():
            raise ShardirError(
                coded(
                    "T1",
                    "expected a result with the dimensions of the positions, "
                    f"{list(operands[0].get_shape())}, and one more, got {list(shape)}",
                )
            )
        needs_pairs(shape[-1], props)

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        names = factor_names(len(operands[0].get_shape()))
        return Factors.of([names], [[*names, "d"]], [t.get_shape() for t in (*operands, *results)])

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        last = len(device.global_shape(self.out)) - 1
        d, first = device.global_shape(self.out)[last], device.start(self.out, last)
        column = np.arange(first, first + device.shape(self.out)[last])
        interleaved = self.pairing.data == "interleaved"
        pair, second = np.divmod(column, 2) if interleaved else divmod(column, d // 2)[::-1]
        dtype = np.float64 if self.out.type.element_type == f64 else np.float32
        turn = angles(arrays[0], pair, d, float_of(self, "base"), dtype)
        return np.where(second, np.cos(turn), np.sin(turn))

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (None,)
