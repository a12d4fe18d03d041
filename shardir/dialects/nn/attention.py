"""Attention, and its gradient.

    %o = nn.attention %q, %k, %v causal : (tensor<2x8x16x4xf32>, ...) -> tensor<2x8x16x4xf32>

q is [.., heads, m, d], k [.., heads, n, d], v [.., heads, n, e]; m counts the queries, n the keys.
Where k and v have fewer heads, each serves as many heads of q as there are for one. A query that
may attend to no key gets zeros, as in torch.

Where the keys are split, attention is decomposed: the maximum and the sum of each
row, and the products, are what is communicated.
"""

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod, sqrt
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import FloatAttr, TensorType, UnitAttr, f64, i1, i32
from xdsl.ir import SSAValue
from xdsl.irdl import (
    operand_def,
    opt_operand_def,
    opt_prop_def,
    result_def,
)

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Shape
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.creation import indices
from shardir.dialects.nn.elementary import ExpOp
from shardir.dialects.nn.elementwise import broadcast_shape
from shardir.dialects.nn.properties import float_of
from shardir.dialects.nn.selection import StopGradientOp
from shardir.dialects.nn.types import float_element, unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder

_OPTIONS = "(`mask` $mask^)? (`causal` $causal^)? (`scale` $scale^)?"


class _Attention(TensorOp, ABC):
    """The common part of attention and its gradient. Their operands begin with q, k and v; a mask
    is the last one."""

    causal = opt_prop_def(UnitAttr)
    scale = opt_prop_def(FloatAttr.constr(type=f64))
    PRECISION: ClassVar[str] = "narrow"
    GIVEN: ClassVar[int]
    """How many operands there are, without a mask."""

    # ---- types and factors ----

    @classmethod
    def check(cls, operands: Types) -> tuple[Any, Shape]:
        """The element type, and the shape of the result."""
        q, k, v = (t.get_shape() for t in operands[:3])
        element = float_element(cls.name, operands[: cls.GIVEN])
        if not len(q) == len(k) == len(v) > 1:
            found = (
                f"expected q, k and v of one rank, 2 or more, "
                f"got {list(q)}, {list(k)} and {list(v)}"
            )
            raise ShardirError(coded("T6", found, use="use nn.reshape"))
        fits = k[:-1] == v[:-1] and q[-1] == k[-1] and q[:-3] == k[:-3]
        heads, ours = (q[-3], k[-3]) if len(q) > 2 else (1, 1)
        if not fits or (heads != ours and (not ours or heads % ours)):
            found = (
                "expected q [.., heads, m, d], k [.., heads, n, d] and v [.., heads, n, e], got "
                f"{list(q)}, {list(k)} and {list(v)}"
            )
            raise ShardirError(coded("T6", found, use=""))
        if len(operands) > cls.GIVEN:
            mask, scores = operands[-1], (*q[:-1], k[-2])
            if mask.element_type not in (i1, element):
                found = f"expected a mask of i1 or {element}, got {mask.element_type}"
                raise ShardirError(coded("T5", found))
            if broadcast_shape([mask.get_shape(), scores]) != scores:
                found = (
                    f"expected a mask that broadcasts to the scores {list(scores)}, "
                    f"got {list(mask.get_shape())}"
                )
                raise ShardirError(coded("T6", found))
        return element, (*q[:-1], v[-1])

    @classmethod
    def dims(cls, operands: Types) -> tuple[dict[str, list[str]], int]:
        """The factors of q, k, v, the result and the mask, and how many heads of q share one."""
        q, k = (t.get_shape() for t in operands[:2])
        ours = factor_names(len(q) - 2, "b")
        theirs = list(ours)
        group = 1
        if len(q) > 2 and q[-3] != k[-3]:
            group = q[-3] // k[-3]
            ours[-1], theirs[-1] = "h g", "h"
        found = {"q": [*ours, "m", "d"], "k": [*theirs, "n", "d"], "v": [*theirs, "n", "e"],
                 "out": [*ours, "m", "e"]}  # fmt: skip
        if len(operands) > cls.GIVEN:
            shape, full, names = operands[-1].get_shape(), (*q[:-1], k[-2]), [*ours, "m", "n"]
            at = len(names) - len(shape)
            found["mask"] = [
                f if n == m else "" for f, n, m in zip(names[at:], shape, full[at:], strict=True)
            ]
        return found, group

    @classmethod
    def factors_of(
        cls, operands: Types, results: Types, given: Sequence[str], made: Sequence[str],
        replicate: Sequence[str],
    ) -> Factors:  # fmt: skip
        dims, group = cls.dims(operands)
        given = [*given, "mask"] if "mask" in dims else given
        factors = Factors.of(
            [dims[n] for n in given], [dims[n] for n in made],
            [t.get_shape() for t in (*operands, *results)], replicate=replicate,
        )  # fmt: skip
        # Nothing but q and the result has a dimension for the group, and there the heads are too.
        return replace(
            factors, sizes=tuple((f, group if f == "g" else n) for f, n in factors.sizes)
        )

    PRODUCTS: ClassVar[tuple[int, int]]
    """How many products of matrices have the factors m, n and d, and how many m, n and e."""

    @classmethod
    def flops(cls, sizes: Mapping[str, int], shapes: Sequence[Shape]) -> int:
        scores = prod(n for f, n in sizes.items() if f not in ("d", "e"))
        return 2 * scores * sum(n * sizes[f] for n, f in zip(cls.PRODUCTS, "de", strict=True))

    # ---- numpy ----

    def factor(self) -> float:
        """The factor of the products of q and k."""
        if self.scale is not None:
            return float_of(self, "scale")
        return 1 / sqrt(unsharded_type(self.operands[0]).get_shape()[-1])

    def forward(self, device: Device, arrays: Sequence[Array]) -> tuple[Array, Array, Array]:
        """The probabilities, and k and v with the heads of q."""
        q, k, v = arrays[:3]
        if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
            k, v = (np.repeat(x, q.shape[-3] // k.shape[-3], axis=-3) for x in (k, v))
        scores = q @ k.swapaxes(-1, -2) * q.dtype.type(self.factor())
        if self.causal is not None:
            at = [device.start(x, len(k.shape) - 2) for x in self.operands[:2]]
            rows, columns = (a + np.arange(n) for a, n in zip(at, scores.shape[-2:], strict=True))
            scores = np.where(columns <= rows[:, None], scores, -np.inf)
        if len(arrays) > self.GIVEN:
            mask = arrays[-1]
            scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
        top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        exps = np.exp(scores - np.where(np.isneginf(top), 0, top))
        total = exps.sum(axis=-1, keepdims=True)
        return (exps / np.where(total == 0, 1, total)).astype(q.dtype), k, v

    # ---- by other ops ----

    def spread(self, b: "OpBuilder", x: SSAValue) -> SSAValue:
        """A tensor with the heads of q, these in groups: [.., kv heads, group, ...]."""
        (q, k), t = (
            (unsharded_type(v).get_shape() for v in self.operands[:2]),
            unsharded_type(x).get_shape(),
        )
        if len(q) < 3 or q[-3] == k[-3] or len(t) < 3:
            return x
        groups = (k[-3], q[-3] // k[-3]) if t[-3] == q[-3] else (1, 1)
        return b.reshape(x, (*t[:-3], *groups, *t[-2:]))

    def equation(self, text: str) -> str:
        """An equation of Q, the leading dimensions of q, and K, those of k."""
        q, k = (unsharded_type(v).get_shape() for v in self.operands[:2])
        lead = "abchijkl"[: len(q) - 2]
        grouped = len(q) > 2 and q[-3] != k[-3]
        return text.replace("Q", f"{lead}g" if grouped else lead).replace("K", lead)

    def probabilities(self, b: "OpBuilder", mask: SSAValue | None) -> SSAValue:
        """The softmax of the scores, [Q, m, n], f32 where the operands are narrower. The scale is
        applied before the product, which overflows in f16 otherwise."""
        q, k = self.operands[:2]
        scaled = b.scale(self.spread(b, q), self.factor())
        scores = b.widened(b.einsum(self.equation("Qmd,Knd->Qmn"), scaled, k))
        last = len(unsharded_type(scores).get_shape()) - 1
        if mask is not None or self.causal is not None:
            nothing = b.scalar(float("-inf"), scores)
        if self.causal is not None:
            rows, columns = (self.count(b, scores, last - 1 + i, i) for i in (0, 1))
            # pyrefly: ignore[unbound-name] - bound above
            scores = b.select(b.compare("le", columns, rows), scores, nothing)
        if mask is not None:
            wide = self.spread(b, b.widened(mask))
            boolean = unsharded_type(mask).element_type == i1
            scores = b.select(wide, scores, nothing) if boolean else b.add(scores, wide)
        top = b.value(StopGradientOp, b.reduce(scores, "max", [last], keep=True))
        if mask is not None:
            top = b.select(b.compare("eq", top, nothing), b.scalar(0.0, top), top)
        exps = b.value(ExpOp, b.sub(scores, top))
        total = b.reduce(exps, "sum", [last], keep=True)
        if mask is not None:
            none = b.compare("eq", total, b.scalar(0.0, total))
            total = b.select(none, b.scalar(1.0, total), total)
        return b.div(exps, total)

    @staticmethod
    def count(b: "OpBuilder", scores: SSAValue, dim: int, at: int) -> SSAValue:
        """The numbers of the rows (at 0) or columns of the scores, [m, 1] or [1, n]."""
        axes = b.layout(scores).dims[dim] if b.mesh is not None else ()
        return indices(b, unsharded_type(scores).get_shape()[dim], at, 2, axes, i32)

    def score_cotangent(self, b: "OpBuilder", p: SSAValue, dy: SSAValue) -> SSAValue:
        """The cotangent of the scores, from the probabilities and that of the result."""
        dp = b.einsum(self.equation("Qme,Kne->Qmn"), self.spread(b, dy), self.operands[2])
        dp = b.widened(dp)
        last = len(unsharded_type(p).get_shape()) - 1
        total = b.reduce(b.mul(p, dp), "sum", [last], keep=True)
        return b.mul(p, b.sub(dp, total))


@op_definition
class AttentionGradOp(_Attention):
    """The cotangents of q, k and v of an attention, whose probabilities are recomputed"""

    name = "nn.attention_grad"
    q = operand_def(TensorType)
    k = operand_def(TensorType)
    v = operand_def(TensorType)
    dy = operand_def(TensorType)
    mask = opt_operand_def(TensorType)
    dq = result_def(TensorType)
    dk = result_def(TensorType)
    dv = result_def(TensorType)
    GIVEN: ClassVar[int] = 4
    PRODUCTS: ClassVar[tuple[int, int]] = (3, 2)
    assembly_format = f"$q `,` $k `,` $v `,` $dy {_OPTIONS} {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        _, shape = cls.check(operands)
        if operands[3].get_shape() != shape:
            found = f"expected dy of shape {list(shape)}, got {operands[3]}"
            raise ShardirError(coded("T1", found))
        return list(operands[:3])

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        made = ("q", "k", "v")
        return cls.factors_of(operands, results, (*made, "out"), made, ("n", "d", "e"))

    def evaluate(self, device: Device, *arrays: Array) -> tuple[Array, ...]:
        q, k, _, dy = arrays[:4]
        p, wide_k, wide_v = self.forward(device, arrays)
        dp = dy @ wide_v.swapaxes(-1, -2)
        ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * q.dtype.type(self.factor())
        dk, dv = ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dy
        if dk.shape != k.shape:
            heads = (*k.shape[:-2], q.shape[-3] // k.shape[-3])
            dk, dv = (x.reshape(*heads, *x.shape[-2:]).sum(axis=-3) for x in (dk, dv))
        return ds @ wide_k, dk, dv

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        element = unsharded_type(self.q).element_type
        p = self.probabilities(b, self.mask)
        ds = b.convert(b.scale(self.score_cotangent(b, p, self.dy), self.factor()), element)
        p = b.convert(p, element)
        dq = b.einsum(self.equation("Qmn,Knd->Qmd"), ds, self.k)
        dk = b.einsum(self.equation("Qmn,Qmd->Knd"), ds, self.spread(b, self.q))
        dv = b.einsum(self.equation("Qmn,Qme->Kne"), p, self.spread(b, self.dy))
        return b.reshape(dq, unsharded_type(self.q).get_shape()), dk, dv


@op_definition
class AttentionOp(_Attention):
    """softmax(q k^T scale + mask) v, of the last two dimensions. Without a scale it is 1 / sqrt(d).
    With `causal` query i attends to keys 0 to i. A mask of i1 selects the keys"""

    name = "nn.attention"
    q = operand_def(TensorType)
    k = operand_def(TensorType)
    v = operand_def(TensorType)
    mask = opt_operand_def(TensorType)
    out = result_def(TensorType)
    GIVEN: ClassVar[int] = 3
    PRODUCTS: ClassVar[tuple[int, int]] = (1, 1)
    assembly_format = f"$q `,` $k `,` $v {_OPTIONS} {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        return [tensor(*cls.check(operands))]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        return cls.factors_of(operands, results, ("q", "k", "v"), ("out",), ("n", "d"))

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        p, _, v = self.forward(device, arrays)
        return p @ v

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        masks = [self.mask] if self.mask is not None else []
        props = {n: a for n, a in self.properties.items() if n in ("causal", "scale")}
        given = b.results(AttentionGradOp, self.q, self.k, self.v, dy, *masks, props=props)
        if self.mask is None or unsharded_type(self.mask).element_type == i1:
            return (*given, *(None for _ in masks))
        ds = self.score_cotangent(b, self.probabilities(b, self.mask), dy)
        q, k = (unsharded_type(v).get_shape() for v in (self.q, self.k))
        d_mask = b.sum_to(b.reshape(ds, (*q[:-1], k[-2])), self.mask)
        return (*given, b.convert(d_mask, unsharded_type(self.mask).element_type))

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        p = b.convert(self.probabilities(b, self.mask), unsharded_type(self.v).element_type)
        out = b.einsum(self.equation("Qmn,Kne->Qme"), p, self.v)
        return (
            b.reshape(
                out,
                (*unsharded_type(self.q).get_shape()[:-1], unsharded_type(self.v).get_shape()[-1]),
            ),
        )
