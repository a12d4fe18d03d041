"""Attention of an emitted program that torch's own call does not compute: shifted causal masks, and
attention with a gradient. `forward` also returns the logsumexp of rows, which `backward` reads.
Both use the kernel that torch chooses."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

aten = torch.ops.aten


def causal(q: Tensor, k: Tensor, start: int, mask: Tensor | None = None) -> Tensor:
    """Return the causal mask of rows of q from index `start` on. A bool `mask` is combined by and,
    a float `mask` by a sum."""
    rows = torch.arange(start, start + q.shape[-2], device=q.device)
    allowed = torch.arange(k.shape[-2], device=q.device) <= rows.unsqueeze(-1)
    if mask is None:
        return allowed
    return mask & allowed if mask.dtype == torch.bool else mask.where(allowed, float("-inf"))


def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the result, and the logsumexp of each row of scores: in f32 for narrower operands, 0
    for a row without keys. `options`: the arguments of torch's call."""
    x = _attention_of(q, k, v, **options)
    out, lse = x.kernel.forward(x)
    return out.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1])


def backward(
    q: Tensor, k: Tensor, v: Tensor, dy: Tensor, out: Tensor, lse: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    """Return the cotangents of q, k and v, from the results of `forward` and the cotangent of the
    first."""
    x = _attention_of(q, k, v, **options)
    dy, out = (_four(t if t.stride(-1) == 1 else t.contiguous()) for t in (dy, out))
    found = x.kernel.backward(x, dy, out, lse.reshape(out.shape[:-1]))
    return tuple(d.reshape(t.shape) for d, t in zip(found, (q, k, v), strict=False))


# ---- the kernels ----


class _Attention(NamedTuple):
    """The arguments of an attention: tensors [batch, heads, rows, elements], and a mask that is
    added to the scores."""

    kernel: "_Kernel"
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    scale: float


class _Kernel(NamedTuple):
    """The two functions of a kernel, on tensors of four dimensions; the logsumexp has three."""

    forward: Callable[[_Attention], tuple[Tensor, Tensor]]
    backward: Callable[[_Attention, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def _attention_of(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> _Attention:  # fmt: skip
    """Return the attention with arguments of torch's call, and the kernel that torch chooses for a
    call with gradients."""
    mask, batches = attn_mask, q.shape[:-3]
    if mask is not None:
        if mask.dtype == torch.bool:  # with a bool mask, cuDNN's rows without keys are not zeros
            mask = q.new_zeros(mask.shape).masked_fill_(~mask, float("-inf"))
        if len(batches) > 1 and mask.ndim > 3:
            mask = mask.expand(*batches, *mask.shape[-3:]).flatten(0, len(batches) - 1)
        mask = _four(mask)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    q, k, v = map(_four, (q, k, v))
    if torch.compiler.is_compiling():
        operands = [(x.shape, x.stride(), x.dtype, x.device) for x in (q, k, v)]
        masked = None if mask is None else (mask.shape, mask.stride(), mask.dtype, mask.device)
        chosen = chosen_of_forms(operands, masked, is_causal, scale, enable_gqa)
    else:
        chosen = _chosen_kernel(q, k, v, mask, is_causal, scale, enable_gqa)
    # The flash kernel for CPUs divides by the number of heads: a device may have none.
    kernel = _KERNELS.get((q.device.type, chosen), _MATH) if q.numel() else _MATH
    return _Attention(kernel, q, k, v, mask, is_causal, scale)


def _chosen_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float,
    enable_gqa: bool,
) -> int:  # fmt: skip
    """Return the number of the kernel that torch chooses."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    return torch._fused_sdp_choice(
        q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def chosen_of_forms(
    operands: Sequence[tuple], mask: tuple | None, is_causal: bool, scale: float, enable_gqa: bool
) -> int:
    """Return the number of the kernel that torch chooses for tensors of these sizes, strides, types
    and devices. torch.compile calls it while it traces a graph, which cannot call it itself
    (`CONSTANT` in run/compiled.py)."""
    q, k, v, *masks = (
        torch.empty_strided(size, stride, dtype=dtype, device=device)
        for size, stride, dtype, device in [*operands, *([] if mask is None else [mask])]
    )
    return _chosen_kernel(q, k, v, masks[0] if masks else None, is_causal, scale, enable_gqa)


def _four(x: Tensor) -> Tensor:
    """Return a view with four dimensions of a tensor with at least two."""
    return x.flatten(0, x.ndim - 4) if x.ndim > 4 else x[(None,) * (4 - x.ndim)]


def _pad(x: Tensor, multiple: int, value: float = 0.0) -> Tensor:
    """Pad the last dimension to a multiple of a number."""
    more = -x.shape[-1] % multiple
    return F.pad(x, (0, more), value=value) if more else x


def _flash_for_cpu(x: _Attention) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(
        x.q, x.k, x.v, 0.0, x.causal, attn_mask=x.mask, scale=x.scale
    )


def _flash_for_cpu_backward(
    x: _Attention, dy: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, ...]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dy, x.q, x.k, x.v, out, lse, 0.0, x.causal, attn_mask=x.mask, scale=x.scale
    )


def _flash(x: _Attention) -> tuple[Tensor, Tensor]:
    """The kernel needs heads with a multiple of 8 elements."""
    q, k, v = (_pad(t, 8) for t in (x.q, x.k, x.v))
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, x.causal, scale=x.scale)
    return out[..., : x.v.shape[-1]], lse


def _flash_backward(x: _Attention, dy: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    dy, q, k, v, out = (_pad(t, 8) for t in (dy, x.q, x.k, x.v, out))
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of no dropout
    found = aten._scaled_dot_product_flash_attention_backward(
        dy, q, k, v, out, lse, None, None, q.shape[-2], k.shape[-2], 0.0, x.causal, state, state,
        scale=x.scale,
    )  # fmt: skip
    return tuple(d[..., : t.shape[-1]] for d, t in zip(found, (x.q, x.k, x.v), strict=True))


def _bias(x: _Attention) -> Tensor | None:
    """Return the mask for all scores, with rows that start at multiples of 16 elements."""
    if x.mask is None:
        return None
    keys = x.k.shape[-2]
    mask = x.mask.expand(*x.mask.shape[:-1], keys)
    return _pad(mask, 16)[..., :keys].expand(*x.q.shape[:-1], keys)


def _efficient(x: _Attention) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        x.q, x.k, x.v, _bias(x), True, 0.0, x.causal, scale=x.scale
    )
    return out, lse[..., : x.q.shape[-2]]


def _efficient_backward(x: _Attention, dy: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """The kernel needs the logsumexp of a multiple of 32 rows."""
    state = torch.zeros((), dtype=torch.int64, device=dy.device)
    return aten._scaled_dot_product_efficient_attention_backward(
        dy, x.q, x.k, x.v, _bias(x), out, _pad(lse, 32, math.inf), state, state, 0.0,
        [True, True, True, False], x.causal, scale=x.scale,
    )  # fmt: skip


def _cudnn(x: _Attention) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        x.q, x.k, x.v, x.mask, True, 0.0, x.causal, scale=x.scale
    )
    return out, lse


def _cudnn_backward(x: _Attention, dy: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    state = torch.zeros((), dtype=torch.int64, device=dy.device)
    return aten._scaled_dot_product_cudnn_attention_backward(
        dy, x.q, x.k, x.v, out, lse.unsqueeze(-1).contiguous(), state, state, x.mask, None, None,
        x.q.shape[-2], x.k.shape[-2], 0.0, x.causal, scale=x.scale,
    )  # fmt: skip


# ---- where there is no kernel ----


def _scores(x: _Attention) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores, in f32 for narrower operands, and k and v with the heads of q."""
    groups = x.q.shape[-3] // max(x.k.shape[-3], 1)
    k, v = (t.repeat_interleave(groups, -3) if groups > 1 else t for t in (x.k, x.v))
    scores = (x.q * x.scale) @ k.mT
    if scores.dtype.itemsize < 4:
        scores = scores.float()
    if x.causal:
        scores = scores.masked_fill(~causal(x.q, k, 0), float("-inf"))
    return scores if x.mask is None else scores + x.mask, k, v


def _by_scores(x: _Attention) -> tuple[Tensor, Tensor]:
    scores, _, v = _scores(x)
    lse = scores.logsumexp(-1)
    is_masked = lse.isneginf()
    p = scores.softmax(-1).masked_fill_(is_masked.unsqueeze(-1), 0.0)  # precise where lse is low
    return p.to(v.dtype) @ v, lse.masked_fill(is_masked, 0.0)


def _by_scores_backward(x: _Attention, dy: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    scores, k, v = _scores(x)
    p = (scores - lse.unsqueeze(-1)).exp_()
    total = (dy.to(p.dtype) * out).sum(-1, keepdim=True)
    ds = ((dy @ v.mT - total) * p * x.scale).to(x.q.dtype)
    dk, dv = ds.mT @ x.q, p.to(dy.dtype).mT @ dy
    if k is not x.k:
        dk, dv = (d.unflatten(-3, (x.k.shape[-3], -1)).sum(-3) for d in (dk, dv))
    return ds @ k, dk, dv


_MATH = _Kernel(_by_scores, _by_scores_backward)
_KERNELS = {
    ("cpu", SDPBackend.FLASH_ATTENTION.value): _Kernel(_flash_for_cpu, _flash_for_cpu_backward),
    ("cuda", SDPBackend.FLASH_ATTENTION.value): _Kernel(_flash, _flash_backward),
    ("cuda", SDPBackend.EFFICIENT_ATTENTION.value): _Kernel(_efficient, _efficient_backward),
    ("cuda", SDPBackend.CUDNN_ATTENTION.value): _Kernel(_cudnn, _cudnn_backward),
}
"""The kernels by device and torch's number."""
