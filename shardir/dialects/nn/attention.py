"""Attention, and its gradient.

    %o = nn.attention %q, %k, %v causal : (tensor<2x8x16x4xf32>, ...) -> tensor<2x8x16x4xf32>

q is [.., heads, m, d], k [.., heads, n, d], v [.., heads, n, e]; m counts the queries, n the keys.
Where k and v have fewer heads, equal groups of consecutive heads of q share one. A query that may
attend to no key gets zeros, as in torch.

    %o, %lse = nn.attention %q, %k, %v causal logsumexp
        : (tensor<2x8x16x4xf32>, ...) -> (tensor<2x8x16x4xf32>, tensor<2x8x16xf32>)

With `logsumexp` the second result, [.., heads, m], is log(sum(exp(scores))) of each query, 0 for a
query without keys; it is f32 for f16 and bf16 operands. The gradient reads both results and needs
no row maxima and sums (Dao et al., FlashAttention-2, 2023, algorithm 2), so a differentiated
attention has it.

Where the keys are split, attention is decomposed: devices communicate the maximum and the sum of
each row, and the products.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from xdsl.dialects.builtin import TensorType, UnitAttr, i1
from xdsl.ir import SSAValue
from xdsl.irdl import operand_def, opt_operand_def, opt_prop_def, opt_result_def, result_def

from shardir.algebra.factors import Factors
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, Types
from shardir.dialects.nn.elementary import ExpOp, LogOp
from shardir.dialects.nn.scores import OPTIONS, Attending
from shardir.dialects.nn.selection import StopGradientOp
from shardir.dialects.nn.types import statistic_of, statistic_type, unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder


@op_definition
class AttentionGradOp(Attending):
    """The cotangents of an attention's q, k and v, from its result, the result's cotangent, and the
    log-sum-exp of each row"""

    name = "nn.attention_grad"
    q = operand_def(TensorType)
    k = operand_def(TensorType)
    v = operand_def(TensorType)
    dy = operand_def(TensorType)
    out = operand_def(TensorType)
    lse = operand_def(TensorType)
    mask = opt_operand_def(TensorType)
    dq = result_def(TensorType)
    dk = result_def(TensorType)
    dv = result_def(TensorType)
    GIVEN: ClassVar[int] = 6
    OF_ONE_ELEMENT: ClassVar[int] = 5
    PRODUCTS: ClassVar[tuple[int, int]] = (3, 2)
    assembly_format = f"$q `,` $k `,` $v `,` $dy `,` $out `,` $lse {OPTIONS} {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        out = tensor(*cls.check(operands))
        expected = (out, out, statistic_type(out, 1))
        for name, t, want in zip(("dy", "out", "lse"), operands[3:6], expected, strict=True):
            if t.get_shape() != want.get_shape() or t.element_type != want.element_type:
                raise ShardirError(coded("T1", f"expected {name} of type {want}, got {t}"))
        return list(operands[:3])

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        result_names = ("q", "k", "v")
        operand_names = (*result_names, "out", "out", "lse")
        return cls.factors_of(operands, results, operand_names, result_names, ("n", "d", "e"))

    def evaluate(self, device: Device, *arrays: Array) -> tuple[Array, ...]:
        q, k, _, dy, out, lse = arrays[:6]
        scores, wide_k, wide_v = self.scores(device, arrays)
        p = np.exp(scores - lse[..., None]).astype(q.dtype)
        dp = dy @ wide_v.swapaxes(-1, -2)
        ds = p * (dp - (dy * out).sum(axis=-1, keepdims=True)) * q.dtype.type(self.factor())
        dk, dv = ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dy
        if wide_k is not k:
            heads = (*k.shape[:-2], q.shape[-3] // k.shape[-3])
            dk, dv = (x.reshape(*heads, *x.shape[-2:]).sum(axis=-3) for x in (dk, dv))
        return ds @ wide_k, dk, dv

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        return self.cotangents(b, self.mask, self.out, self.lse, self.dy)[:3]


@op_definition
class AttentionOp(Attending):
    """softmax(q k^T scale + mask) v, of the last two dimensions. The default scale is 1 / sqrt(d).
    With `causal` query i attends to keys 0 to i. A mask of i1 selects the keys. With `logsumexp`
    there is a second result: log(sum(exp(..))) of the scores of each query"""

    name = "nn.attention"
    q = operand_def(TensorType)
    k = operand_def(TensorType)
    v = operand_def(TensorType)
    mask = opt_operand_def(TensorType)
    logsumexp = opt_prop_def(UnitAttr)
    out = result_def(TensorType)
    lse = opt_result_def(TensorType)
    GIVEN: ClassVar[int] = 3
    OF_ONE_ELEMENT: ClassVar[int] = 3
    PRODUCTS: ClassVar[tuple[int, int]] = (1, 1)
    assembly_format = f"$q `,` $k `,` $v {OPTIONS} (`logsumexp` $logsumexp^)? {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        out = tensor(*cls.check(operands))
        return [out, statistic_type(out, 1)] if "logsumexp" in props else [out]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        result_names = ("out", "lse")[: len(results)]
        repeated = ("e",) if len(result_names) > 1 else ()
        return cls.factors_of(
            operands, results, ("q", "k", "v"), result_names, ("n", "d"), repeated
        )

    def evaluate(self, device: Device, *arrays: Array) -> Array | tuple[Array, ...]:
        scores, _, v = self.scores(device, arrays)
        element = arrays[0].dtype
        top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        top = np.where(np.isneginf(top), 0, top)
        exps = np.exp(scores - top)
        total = exps.sum(axis=-1, keepdims=True)
        total = np.where(total == 0, 1, total)
        out = (exps / total).astype(element) @ v
        if self.logsumexp is None:
            return out
        return out, (top + np.log(total))[..., 0].astype(element)

    def saving(self) -> tuple[Props, dict[str, TensorType]] | None:
        if self.logsumexp is not None:
            return None
        return {"logsumexp": UnitAttr()}, {"logsumexp": statistic_of(self.out, 1)}

    def gradient(self, b: "OpBuilder", *cotangents: SSAValue | None) -> Sequence[SSAValue | None]:
        out, lse, mask, (dy, dlse) = self.out, self.lse, self.mask, cotangents
        assert lse is not None
        masks = [] if mask is None else [mask]
        if dlse is None and dy is not None:
            props = {n: a for n, a in self.properties.items() if n in ("causal", "scale")}
            operands = (self.q, self.k, self.v, dy, out, lse, *masks)
            d_qkv, d_scores = b.results(AttentionGradOp, *operands, props=props), None
        else:
            dy = b.zeros(unsharded_type(out), like=out) if dy is None else dy
            *d_qkv, d_scores = self.cotangents(b, mask, out, lse, dy, dlse)
        if mask is None or unsharded_type(mask).element_type == i1:
            return (*d_qkv, *(None for _ in masks))
        if d_scores is None:
            d_scores = self.score_cotangent(b, self.probabilities(b, mask, lse), out, dy, None)
        q, k = (unsharded_type(v).get_shape() for v in (self.q, self.k))
        d_mask = b.sum_to(b.reshape(d_scores, (*q[:-1], k[-2])), mask)
        return (*d_qkv, b.convert(d_mask, unsharded_type(mask).element_type))

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        v = unsharded_type(self.v)
        scores = self.built_scores(b, self.mask)
        last = len(unsharded_type(scores).get_shape()) - 1
        top = b.value(StopGradientOp, b.reduce(scores, "max", [last], keep=True))
        if self.mask is not None:
            nothing = b.scalar(float("-inf"), scores)
            top = b.select(b.compare("eq", top, nothing), b.scalar(0.0, top), top)
        exps = b.value(ExpOp, b.sub(scores, top))
        total = b.reduce(exps, "sum", [last], keep=True)
        if self.mask is not None:
            none = b.compare("eq", total, b.scalar(0.0, total))
            total = b.select(none, b.scalar(1.0, total), total)
        p = b.convert(b.div(exps, total), v.element_type)
        out = b.einsum(self.equation("Qmn,Kne->Qme"), p, self.v)
        rows = unsharded_type(self.q).get_shape()[:-1]
        results = [b.reshape(out, (*rows, v.get_shape()[-1]))]
        if self.logsumexp is not None:
            results.append(b.reshape(b.add(top, b.value(LogOp, total)), rows))
        return results
