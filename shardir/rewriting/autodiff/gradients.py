"""Gradients for the optimizer: without the loss scale, clipped; and their norm.

Two sums over all gradients are partial over the axes that split a gradient: the sum of squares, and
the sum of x - x (0 if all elements are finite). Replicated elements count once. Both sums are
reduced together.
"""

from dataclasses import dataclass

from xdsl.dialects.builtin import f32, f64
from xdsl.ir import Attribute, SSAValue

from shardir.dialects import nn
from shardir.dialects.nn.base import Props
from shardir.dialects.nn.properties import float_attr
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import StepOp, sum_of_squares
from shardir.rewriting.rewriter import Rewriter

CLIP_EPS = 1e-6
"""The constant that torch.nn.utils.clip_grad_norm_ adds to the norm before it divides by it."""

Gradients = dict[int, SSAValue]


@dataclass(frozen=True)
class Prepared:
    """Gradients for the optimizer.

    Attributes:
        finite: whether all gradients are finite, an i1 scalar, if losses are scaled.
        norm: the global norm without the loss scale, before clipping, in f64, if it is requested.
    """

    gradients: Gradients
    finite: SSAValue | None
    norm: SSAValue | None


def prepare_gradients(
    b: Rewriter, request: StepOp, inverse_scale: SSAValue | None, gradients: Gradients,
    with_norm: bool,
) -> Prepared:  # fmt: skip
    """Return the gradients for the optimizer.

    Args:
        inverse_scale: the reciprocal of the loss scale; None if the gradients have none.
    """
    clip, scaling = request.clip, request.loss_scale
    by_norm = clip is not None and clip.kind == "norm"
    elements = {unsharded_type(g).element_type for g in gradients.values()}
    common = f64 if f64 in elements else f32
    with_norm = with_norm or by_norm
    values = [b.convert(g, common) for g in gradients.values()] if scaling or with_norm else []
    # Both sums are adjacent, so that they are communicated together.
    zero = b.total([_zero_if_finite(b, x) for x in values]) if scaling is not None else None
    squares = b.total([sum_of_squares(b, x) for x in values]) if with_norm else None
    factor, finite, norm = inverse_scale, None, None
    if zero is not None:
        finite = b.compare("eq", zero, b.constant(0.0, common))
        finite.name_hint = "finite"
    if squares is not None:
        norm = b.value(nn.SqrtOp, b.convert(squares, f64))
        norm = norm if factor is None else b.mul(norm, factor)
        norm.name_hint = "norm"
    if norm is not None and clip is not None and by_norm:
        clipping = _clip_factor(b, norm, clip.values["max"])
        factor = clipping if factor is None else b.mul(clipping, factor)
    out = gradients
    if factor is not None:
        factors = {e: b.convert(factor, e) for e in dict.fromkeys(map(_element, out.values()))}
        out = {i: b.mul(g, factors[_element(g)]) for i, g in out.items()}
    if clip is not None and clip.kind == "value":
        bound = clip.values["max"]
        ends: Props = {"min": float_attr(-bound), "max": float_attr(bound)}
        out = {i: b.value(nn.ClampOp, g, props=ends) for i, g in out.items()}
    for i, g in gradients.items():
        out[i].name_hint = g.name_hint
    return Prepared(out, finite, norm)


def _clip_factor(b: Rewriter, norm: SSAValue, maximum: float) -> SSAValue:
    """Return the factor that reduces the gradients' global norm to `maximum` if it is greater."""
    ratio = b.div(b.constant(maximum, f64), b.add(norm, b.constant(CLIP_EPS, f64)))
    return b.value(nn.ClampOp, ratio, props={"max": float_attr(1.0)})


def _element(v: SSAValue) -> Attribute:
    return unsharded_type(v).element_type


def _zero_if_finite(b: Rewriter, x: SSAValue) -> SSAValue:
    """Return the sum of x - x: 0 if all elements are finite, else NaN; partial if x is split."""
    return b.reduce(b.sub(x, x), "sum", range(len(unsharded_type(x).get_shape())))
