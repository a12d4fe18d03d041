"""Losses, attention, norms, positions, windows, pools and convolutions."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from xdsl.dialects import builtin
from xdsl.ir import Operation

from reference.common import Reference, by_autograd, dtype_of, shape_of
from shardir.dialects import nn

aten = torch.ops.aten


def _layer_norm(op: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, w.shape, w, b, op.eps.value.data)


def _layer_norm_grad(op: Any, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> Any:
    return by_autograd(lambda x, w, b: _layer_norm(op, x, w, b), [x, w, torch.zeros_like(w)], dy)


def _cross_entropy(op: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    how = op.reduction.data if type(op) is nn.CrossEntropyLossOp else "none"
    ignore, share = op.options()
    options: Any = {} if ignore is None else {"ignore_index": ignore}
    out = functional.cross_entropy(
        x.reshape(-1, x.shape[-1]), labels.flatten().long(), label_smoothing=share, reduction=how,
        **options,
    )  # fmt: skip
    return out.reshape(labels.shape) if how == "none" else out


def _nll(op: nn.NllLossOp, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    how = op.reduction.data
    options: Any = {} if op.ignore is None else {"ignore_index": op.ignore.value.data}
    rows = x.reshape(-1, x.shape[-1])
    out = functional.nll_loss(rows, labels.flatten().long(), reduction=how, **options)
    return out.reshape(labels.shape) if how == "none" else out


def _loss(call: Callable[..., torch.Tensor], *options: str) -> Reference:
    """A loss of torch's, with the numbers of these properties."""

    def reference(op: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        numbers = {n: getattr(op, n).value.data for n in options}
        return call(x, y, reduction=op.reduction.data, **numbers)

    return reference


def _soft_margin(op: nn.SoftMarginLossOp, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """torch's own is not differentiable in y."""
    return _reduced(op, torch.log1p(torch.exp(-x * y)))


def _kl_div(op: nn.KlDivLossOp, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    log = op.log_target is not None
    return _reduced(op, functional.kl_div(x, y, reduction="none", log_target=log))


def _reduced(op: nn.Loss, losses: torch.Tensor) -> torch.Tensor:
    how = op.reduction.data
    return losses if how == "none" else losses.mean() if how == "mean" else losses.sum()


def _attention(
    op: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """By its formula: torch's own call takes no mask beside `is_causal`."""
    if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if op.scale is None else op.scale.value.data
    scores = q @ k.mT * scale
    if op.causal is not None:
        scores = scores.masked_fill(torch.ones_like(scores).tril() == 0, -torch.inf)
    if mask is not None:
        boolean = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if boolean else scores + mask
    nothing = scores.isneginf().all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0) @ v


def _attention_grad(op: Any, *given: torch.Tensor) -> Any:
    return by_autograd(lambda *x: _attention(op, *x, *given[4:]), given[:3], given[3])


def _turns(op: Any, positions: torch.Tensor, d: int) -> torch.Tensor:
    """e^(i angle) of each pair, [.., d / 2], in the precision of the interpreter's angles."""
    t = op.out.type.element_type
    dtype = torch.float64 if t == builtin.f64 else torch.float32
    frequencies = op.base.value.data ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angles = positions[..., None].to(dtype) * frequencies.to(dtype)
    return torch.polar(torch.ones_like(angles).double(), angles.double())


def _rotary(op: nn.RotaryOp, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """By multiplication with complex numbers."""
    turns, halves = _turns(op, positions, x.shape[-1]), op.pairing.data == "halves"
    pairs = x.unflatten(-1, (2, -1)).mT if halves else x.unflatten(-1, (-1, 2))
    turned = torch.view_as_complex(pairs.contiguous()) * (turns.conj() if op.reverse else turns)
    out = torch.view_as_real(turned)
    return (out.mT if halves else out).flatten(-2)


def _sinusoid(op: nn.SinusoidOp, positions: torch.Tensor) -> torch.Tensor:
    turns = _turns(op, positions, shape_of(op.out)[-1])
    return torch.stack([turns.imag, turns.real], -2 if op.pairing.data == "halves" else -1).flatten(
        -2
    )


def _unfold(op: nn.UnfoldOp, x: torch.Tensor) -> torch.Tensor:
    rows, windows = shape_of(op.x)[op.at], op.windows()
    fill = 0 if op.least is None else (
        -torch.inf if x.dtype.is_floating_point else torch.iinfo(dtype_of(op.x)).min
    )  # fmt: skip
    parts = []
    for p in range(windows.count):
        for r in range(windows.size):
            row = p * windows.step + windows.offset + r
            inside = 0 <= row < rows
            parts.append(x.select(op.at, row) if inside else x.new_full(
                (*x.shape[: op.at], *x.shape[op.at + 1 :]), fill
            ))  # fmt: skip
    shape = shape_of(op.out)
    if not parts:
        return x.new_zeros(shape)
    return torch.stack(parts, op.at).reshape(shape)


def _fold(op: nn.FoldOp, x: torch.Tensor) -> torch.Tensor:
    windows, shape = op.windows(), shape_of(op.out)
    out = [torch.zeros((*shape[: op.at], *shape[op.at + 1 :]), dtype=x.dtype)] * windows.rows
    for p in range(windows.count):
        for r in range(windows.size):
            row = p * windows.step + windows.offset + r
            if 0 <= row < windows.rows:
                out[row] = out[row] + x.select(op.at, p).select(op.at, r)
    return torch.stack(out, op.at) if out else x.new_zeros(shape)


def _conv(op: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    found = op.slides()
    padded = functional.pad(x, [n for s in reversed(found) for n in (s.low, s.high)])
    if not (x.numel() and w.numel()):
        return x.sum() + w.sum() + x.new_zeros(shape_of(op.ends(op.operands, op.results)[2]))
    call = getattr(functional, f"conv{len(found)}d")
    stride, dilation = [s.stride for s in found], [s.dilation for s in found]
    return call(padded, w, None, stride, 0, dilation, padded.shape[1] // w.shape[1])


def _conv_transpose(op: Any, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = torch.zeros(shape_of(op.out), dtype=y.dtype, requires_grad=True)
    with torch.enable_grad():
        return torch.autograd.grad(_conv(op, x, w), [x], y, create_graph=True)[0]


def _conv_weight(op: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    w = torch.zeros(shape_of(op.out), dtype=y.dtype, requires_grad=True)
    with torch.enable_grad():
        return torch.autograd.grad(_conv(op, x, w), [w], y, create_graph=True)[0]


def _batch_norm(op: Any, x: torch.Tensor, w: Any, b: Any, mean: Any, var: Any) -> Any:
    out = functional.batch_norm(x, None, None, w, b, True, 0.0, op.eps.value.data)
    dims, m = [d for d in range(x.ndim) if d != 1], op.momentum.value.data
    new_mean = (1 - m) * mean + m * x.mean(dims)
    return out, new_mean, (1 - m) * var + m * x.var(dims, correction=1)


def _batch_norm_inference(op: Any, x: torch.Tensor, *channels: torch.Tensor) -> torch.Tensor:
    """torch's own has no gradient for the statistics."""
    w, b, mean, var = (c.reshape(-1, *[1] * (x.ndim - 2)) for c in channels)
    out = (x - mean) / (var + op.eps.value.data).sqrt() * w + b
    w, b, mean, var = (c.detach() for c in channels)
    assert torch.allclose(
        out, functional.batch_norm(x.detach(), mean, var, w, b, eps=op.eps.value.data)
    )
    return out


def _max_pool(op: Any, x: torch.Tensor) -> torch.Tensor:
    found = op.slides()
    padded = functional.pad(
        x, [n for s in reversed(found) for n in (s.low, s.high)], value=-torch.inf
    )
    call = getattr(functional, f"max_pool{len(found)}d")
    return call(padded, [s.kernel for s in found], [s.stride for s in found])


def _max_pool_grad(op: Any, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        y = _max_pool(op, leaf)
    return torch.autograd.grad(y, leaf, dy)[0]


def _avg_pool(op: Any, x: torch.Tensor) -> torch.Tensor:
    found, more = op.slides(), {"count_include_pad": op.exclude is None}
    call = getattr(functional, f"avg_pool{len(found)}d")
    assert all(s.low == s.high for s in found)
    return call(x, *([getattr(s, n) for s in found] for n in ("kernel", "stride", "low")), **more)


def _adaptive_avg_pool(op: Any, x: torch.Tensor) -> torch.Tensor:
    return getattr(functional, f"adaptive_avg_pool{x.ndim - 2}d")(x, op.size.data)


TORCH: dict[type[Operation], Reference] = {
    nn.SoftmaxOp: lambda op, x: x.softmax(op.axis.value.data),
    nn.SoftmaxGradOp: lambda op, y, dy: aten._softmax_backward_data(
        dy, y, op.axis.value.data, y.dtype
    ),
    nn.LogSoftmaxOp: lambda op, x: x.log_softmax(op.axis.value.data),
    nn.LogSoftmaxGradOp: lambda op, y, dy: aten._log_softmax_backward_data(
        dy, y, op.axis.value.data, y.dtype
    ),
    nn.CrossEntropyOp: _cross_entropy,
    nn.CrossEntropyGradOp: lambda op, x, labels, dy: by_autograd(
        lambda x: _cross_entropy(op, x, labels), [x], dy
    )[0],
    nn.BinaryCrossEntropyOp: lambda op, x, y: functional.binary_cross_entropy(
        x, y.expand_as(x), reduction="none"
    ),
    nn.BinaryCrossEntropyWithLogitsOp: lambda op, x, y: functional.binary_cross_entropy_with_logits(
        x, y.expand_as(x), reduction="none"
    ),
    nn.CrossEntropyLossOp: _cross_entropy,
    nn.NllLossOp: _nll,
    nn.MseLossOp: _loss(functional.mse_loss),
    nn.L1LossOp: _loss(functional.l1_loss),
    nn.HuberLossOp: _loss(functional.huber_loss, "delta"),
    nn.SmoothL1LossOp: _loss(functional.smooth_l1_loss, "beta"),
    nn.BceLossOp: _loss(functional.binary_cross_entropy),
    nn.BceWithLogitsLossOp: _loss(functional.binary_cross_entropy_with_logits),
    nn.SoftMarginLossOp: _soft_margin,
    nn.KlDivLossOp: _kl_div,
    nn.AttentionOp: _attention,
    nn.AttentionGradOp: _attention_grad,
    nn.RotaryOp: _rotary,
    nn.SinusoidOp: _sinusoid,
    nn.LayerNormOp: _layer_norm,
    nn.LayerNormGradOp: _layer_norm_grad,
    nn.BatchNormOp: _batch_norm,
    nn.BatchNormInferenceOp: _batch_norm_inference,
    nn.GroupNormOp: lambda op, x, w, b: functional.group_norm(
        x, op.groups.value.data, w, b, op.eps.value.data
    ),
    nn.RmsNormOp: lambda op, x, w: functional.rms_norm(x, w.shape, w, op.eps.value.data),
    nn.UnfoldOp: _unfold,
    nn.MaxPoolOp: _max_pool,
    nn.MaxPoolGradOp: _max_pool_grad,
    nn.AvgPoolOp: _avg_pool,
    nn.AdaptiveAvgPoolOp: _adaptive_avg_pool,
    nn.FoldOp: _fold,
    nn.ConvOp: _conv,
    nn.ConvTransposeOp: _conv_transpose,
    nn.ConvWeightOp: _conv_weight,
}
