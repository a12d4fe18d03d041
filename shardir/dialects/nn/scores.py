"""The scores of attention, q k^T scale + mask, and the rest that attention and its gradient share:
types, factors, and both computations, in numpy and by other ops."""

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod, sqrt
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import (
    FloatAttr,
    UnitAttr,
    f64,
    i1,
    i32,
)
from xdsl.ir import SSAValue
from xdsl.irdl import opt_prop_def

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Shape
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.nn.base import Array, Device, TensorOp, Types, factor_names
from shardir.dialects.nn.creation import indices
from shardir.dialects.nn.elementary import ExpOp
from shardir.dialects.nn.elementwise import broadcast_shape
from shardir.dialects.nn.properties import float_of
from shardir.dialects.nn.types import float_element, unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder

OPTIONS = "(`mask` $mask^)? (`causal` $causal^)? (`scale` $scale^)?"


class Attending(TensorOp, ABC):
    """The base of attention and its gradient. The operands begin with q, k and v; a mask is the
    last operand."""

    causal = opt_prop_def(UnitAttr)
    scale = opt_prop_def(FloatAttr.constr(type=f64))
    PRECISION: ClassVar[str] = "narrow"
    STATISTICS: ClassVar[tuple[str, ...]] = ("lse",)
    GIVEN: ClassVar[int]
    """The number of operands without the mask."""
    OF_ONE_ELEMENT: ClassVar[int]
    """The number of leading operands that share an element type."""

    # ---- types and factors ----

    @classmethod
    def check(cls, operands: Types) -> tuple[Any, Shape]:
        """Check the operands; return the element type and shape of the result."""
        q, k, v = (t.get_shape() for t in operands[:3])
        element = float_element(cls.name, operands[: cls.OF_ONE_ELEMENT])
        if not len(q) == len(k) == len(v) > 1:
            message = (
                f"expected q, k and v of one rank, 2 or more, "
                f"got {list(q)}, {list(k)} and {list(v)}"
            )
            raise ShardirError(coded("T6", message, use="use nn.reshape"))
        fits = k[:-1] == v[:-1] and q[-1] == k[-1] and q[:-3] == k[:-3]
        heads, kv_heads = (q[-3], k[-3]) if len(q) > 2 else (1, 1)
        if not fits or (heads != kv_heads and (not kv_heads or heads % kv_heads)):
            message = (
                "expected q [.., heads, m, d], k [.., heads, n, d] and v [.., heads, n, e], got "
                f"{list(q)}, {list(k)} and {list(v)}"
            )
            raise ShardirError(coded("T6", message, use=""))
        if len(operands) > cls.GIVEN:
            mask, scores = operands[-1], (*q[:-1], k[-2])
            if mask.element_type not in (i1, element):
                message = f"expected a mask of i1 or {element}, got {mask.element_type}"
                raise ShardirError(coded("T5", message))
            if broadcast_shape([mask.get_shape(), scores]) != scores:
                message = (
                    f"expected a mask that broadcasts to the scores {list(scores)}, "
                    f"got {list(mask.get_shape())}"
                )
                raise ShardirError(coded("T6", message))
        return element, (*q[:-1], v[-1])

    @classmethod
    def dims(cls, operands: Types) -> tuple[dict[str, list[str]], int]:
        """The factors of q, k, v, both results and the mask, and the number of heads of q for each
        head of k."""
        q, k = (t.get_shape() for t in operands[:2])
        q_lead = factor_names(len(q) - 2, "b")
        k_lead = list(q_lead)
        group = 1
        if len(q) > 2 and q[-3] != k[-3]:
            group = q[-3] // k[-3]
            q_lead[-1], k_lead[-1] = "h g", "h"
        dims = {"q": [*q_lead, "m", "d"], "k": [*k_lead, "n", "d"], "v": [*k_lead, "n", "e"],
                 "out": [*q_lead, "m", "e"], "lse": [*q_lead, "m"]}  # fmt: skip
        if len(operands) > cls.GIVEN:
            shape, full, names = operands[-1].get_shape(), (*q[:-1], k[-2]), [*q_lead, "m", "n"]
            first = len(names) - len(shape)
            dims["mask"] = [
                f if n == m else ""
                for f, n, m in zip(names[first:], shape, full[first:], strict=True)
            ]
        return dims, group

    @classmethod
    def factors_of(
        cls, operands: Types, results: Types, operand_names: Sequence[str],
        result_names: Sequence[str], replicate: Sequence[str], repeated: Sequence[str] = (),
    ) -> Factors:  # fmt: skip
        dims, group = cls.dims(operands)
        operand_names = [*operand_names, "mask"] if "mask" in dims else operand_names
        factors = Factors.of(
            [dims[n] for n in operand_names], [dims[n] for n in result_names],
            [t.get_shape() for t in (*operands, *results)], replicate=replicate, repeated=repeated,
        )  # fmt: skip
        # The group's size is set here: only q and the result have it, merged with the heads.
        return replace(
            factors, sizes=tuple((f, group if f == "g" else n) for f, n in factors.sizes)
        )

    PRODUCTS: ClassVar[tuple[int, int]]
    """The numbers of matrix products with factors m, n and d, and with factors m, n and e."""

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

    def scores(self, device: Device, arrays: Sequence[Array]) -> tuple[Array, Array, Array]:
        """The scores, and k and v repeated to the heads of q."""
        q, k, v = arrays[:3]
        if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
            k, v = (np.repeat(x, q.shape[-3] // k.shape[-3], axis=-3) for x in (k, v))
        scores = q @ k.swapaxes(-1, -2) * q.dtype.type(self.factor())
        if self.causal is not None:
            starts = [device.start(x, len(k.shape) - 2) for x in self.operands[:2]]
            rows, columns = (
                a + np.arange(n) for a, n in zip(starts, scores.shape[-2:], strict=True)
            )
            scores = np.where(columns <= rows[:, None], scores, -np.inf)
        if len(arrays) > self.GIVEN:
            mask = arrays[-1]
            scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
        return scores, k, v

    # ---- by other ops ----

    def spread(self, b: "OpBuilder", x: SSAValue) -> SSAValue:
        """Split the heads of a tensor like q into groups: [.., kv heads, group, ...]."""
        (q, k), t = (
            (unsharded_type(v).get_shape() for v in self.operands[:2]),
            unsharded_type(x).get_shape(),
        )
        if len(q) < 3 or q[-3] == k[-3] or len(t) < 3:
            return x
        groups = (k[-3], q[-3] // k[-3]) if t[-3] == q[-3] else (1, 1)
        return b.reshape(x, (*t[:-3], *groups, *t[-2:]))

    def equation(self, text: str) -> str:
        """Expand Q and K in an equation to the leading dimensions of q and k."""
        q, k = (unsharded_type(v).get_shape() for v in self.operands[:2])
        lead = "abchijkl"[: len(q) - 2]
        grouped = len(q) > 2 and q[-3] != k[-3]
        return text.replace("Q", f"{lead}g" if grouped else lead).replace("K", lead)

    def built_scores(self, b: "OpBuilder", mask: SSAValue | None) -> SSAValue:
        """The scores by other ops, [Q, m, n], in f32 if the operands are narrower. The scale is
        applied before the product, which would overflow in f16 otherwise."""
        q, k = self.operands[:2]
        scaled = b.scale(self.spread(b, q), self.factor())
        scores = b.widen(b.einsum(self.equation("Qmd,Knd->Qmn"), scaled, k))
        last = len(unsharded_type(scores).get_shape()) - 1
        if mask is not None or self.causal is not None:
            nothing = b.scalar(float("-inf"), scores)
        if self.causal is not None:
            rows, columns = (self.count(b, scores, last - 1 + i, i) for i in (0, 1))
            # pyrefly: ignore[unbound-name] - bound above
            scores = b.select(b.compare("le", columns, rows), scores, nothing)
        if mask is not None:
            wide = self.spread(b, b.widen(mask))
            boolean = unsharded_type(mask).element_type == i1
            # pyrefly: ignore[unbound-name] - bound above
            scores = b.select(wide, scores, nothing) if boolean else b.add(scores, wide)
        return scores

    @staticmethod
    def count(b: "OpBuilder", scores: SSAValue, dim: int, at: int) -> SSAValue:
        """The indices of the rows (`at` = 0) or columns of the scores, [m, 1] or [1, n]."""
        axes = b.layout(scores).dims[dim] if b.mesh is not None else ()
        return indices(b, unsharded_type(scores).get_shape()[dim], at, 2, axes, i32)

    def probabilities(self, b: "OpBuilder", mask: SSAValue | None, lse: SSAValue) -> SSAValue:
        """The softmax of the scores, [Q, m, n], from the log-sum-exp of each row."""
        rows = b.reshape(lse, (*unsharded_type(lse).get_shape(), 1))
        return b.value(ExpOp, b.sub(self.built_scores(b, mask), self.spread(b, rows)))

    def score_cotangent(
        self, b: "OpBuilder", p: SSAValue, out: SSAValue, dy: SSAValue, dlse: SSAValue | None
    ) -> SSAValue:
        """The cotangent of the scores, from the probabilities, the result, and the cotangents of
        both results. In each row, sum(p dp) is computed as sum(out dy)."""
        v = self.operands[2]
        dp = b.widen(b.einsum(self.equation("Qme,Kne->Qmn"), self.spread(b, dy), v))
        last = len(unsharded_type(out).get_shape()) - 1
        total = b.reduce(b.mul(b.widen(dy), b.widen(out)), "sum", [last], keep=True)
        if dlse is not None:
            total = b.sub(total, b.reshape(dlse, (*unsharded_type(dlse).get_shape(), 1)))
        return b.mul(p, b.sub(dp, self.spread(b, total)))

    def cotangents(
        self, b: "OpBuilder", mask: SSAValue | None, out: SSAValue, lse: SSAValue, dy: SSAValue,
        dlse: SSAValue | None = None,
    ) -> tuple[SSAValue, ...]:  # fmt: skip
        """The cotangents of q, k, v and of the scores, [Q, m, n], by other ops."""
        q, k = self.operands[:2]
        element, shape = unsharded_type(q).element_type, unsharded_type(q).get_shape()
        p = self.probabilities(b, mask, lse)
        d_scores = self.score_cotangent(b, p, out, dy, dlse)
        ds, p = b.convert(b.scale(d_scores, self.factor()), element), b.convert(p, element)
        dq = b.einsum(self.equation("Qmn,Knd->Qmd"), ds, k)
        dk = b.einsum(self.equation("Qmn,Qmd->Knd"), ds, self.spread(b, q))
        dv = b.einsum(self.equation("Qmn,Qme->Kne"), p, self.spread(b, dy))
        return b.reshape(dq, shape), dk, dv, d_scores
