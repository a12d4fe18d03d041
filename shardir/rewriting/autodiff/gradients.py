"""Gradients for the optimizer: without the loss scale, clipped.

Two sums over all gradients, of their squares and of x - x (0 where all elements are finite), are
partial over the axes that split a gradient; replicated elements count once. They are reduced
together.
"""

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


def prepare(
    b: Rewriter, request: StepOp, scale: SSAValue | None, gradients: Gradients
) -> tuple[Gradients, SSAValue | None]:
    """Return the gradients for the optimizer, and a scalar that tells whether all are finite, where
    losses are scaled; `scale` is the loss scale, where it is a state."""
    clip, scaling = request.clip, request.loss_scale
    by_norm = clip is not None and clip.kind == "norm"
    elements = {unsharded_type(g).element_type for g in gradients.values()}
    common = f64 if f64 in elements else f32
    values = [b.convert(g, common) for g in gradients.values()] if scaling or by_norm else []
    # Both sums are adjacent, so that they are communicated together.
    zero = b.total([_zero_if_finite(b, x) for x in values]) if scaling is not None else None
    squares = b.total([sum_of_squares(b, x) for x in values]) if by_norm else None
    factor = finite = None
    if zero is not None:
        finite = b.compare("eq", zero, b.constant(0.0, common))
        finite.name_hint = "finite"
        factor = _unscale(b, request, scale)
    if squares is not None:
        assert clip is not None
        factor = _clip_factor(b, b.convert(squares, f64), factor, clip.values["max"])
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
    return out, finite


def _unscale(b: Rewriter, request: StepOp, scale: SSAValue | None) -> SSAValue:
    """Return the reciprocal of the loss scale."""
    one = b.constant(1.0, f64)
    if scale is not None:
        return b.div(one, b.convert(scale, f64))
    assert request.loss_scale is not None
    return b.constant(1 / request.loss_scale.values["factor"], f64)


def _clip_factor(
    b: Rewriter, squares: SSAValue, unscale: SSAValue | None, maximum: float
) -> SSAValue:
    """Return the factor that reduces the gradients' global norm to `maximum` where it is greater,
    and removes the loss scale."""
    norm = b.value(nn.SqrtOp, squares)
    if unscale is not None:
        norm = b.mul(norm, unscale)
    norm.name_hint = "norm"
    ratio = b.div(b.constant(maximum, f64), b.add(norm, b.constant(CLIP_EPS, f64)))
    factor = b.value(nn.ClampOp, ratio, props={"max": float_attr(1.0)})
    return factor if unscale is None else b.mul(factor, unscale)


def _element(v: SSAValue) -> Attribute:
    return unsharded_type(v).element_type


def _zero_if_finite(b: Rewriter, x: SSAValue) -> SSAValue:
    """Return the sum of x - x: 0 where all elements are finite, else NaN; partial where x is
    split."""
    return b.reduce(b.sub(x, x), "sum", range(len(unsharded_type(x).get_shape())))
