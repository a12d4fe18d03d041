"""Convolutions and pools on a rank's part.

`padding` has two numbers for each spatial dimension, low and high. Torch has kernels of up to three
spatial dimensions: a dimension with a kernel of size 1 and stride 1 is moved into the batch, and so
are the windows of a split dimension.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .windows import span

aten = torch.ops.aten
Numbers = Sequence[int]


class SlidingKernel:
    """A kernel over the spatial dimensions that are not moved into the batch."""

    def __init__(
        self, rows: Numbers, kernel: Numbers, stride: Numbers, padding: Numbers, dilation: Numbers
    ):
        n = len(kernel)
        still = [
            i for i in range(n)
            if kernel[i] == stride[i] == 1 and not any(padding[2 * i : 2 * i + 2])
            and (n > 3 or rows[i] == 1)
        ]  # fmt: skip
        self.still = [2 + i for i in still[: n - 1]]
        left = [i for i in range(n) if 2 + i not in self.still]
        self.kernel, self.stride, self.dilation = (
            [numbers[i] for i in left] for numbers in (kernel, stride, dilation)
        )
        self.low, self.high = ([padding[2 * i + side] for i in left] for side in (0, 1))
        self.span = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True)]

    def fold(self, x: Tensor) -> Tensor:
        """Move the still dimensions of x into its batch."""
        k = len(self.still)
        return x.movedim(self.still, tuple(range(k))).flatten(0, k) if k else x

    def unfold(self, y: Tensor, sizes: Numbers) -> Tensor:
        """Move the still dimensions of a result back to their places; `sizes` is its shape."""
        k = len(self.still)
        if not k:
            return y
        batch = [*(sizes[d] for d in self.still), sizes[0]]
        return y.unflatten(0, batch).movedim(tuple(range(k)), self.still)

    def padded(self, x: Tensor, value: float = 0.0) -> tuple[Tensor, list[int]]:
        """Return x, padded if the two ends differ, and the padding that torch applies."""
        if self.low == self.high:
            return x, self.low
        ends = [n for i in reversed(range(len(self.low))) for n in (self.low[i], self.high[i])]
        return F.pad(x, ends, value=value), [0] * len(self.low)

    def places(self, x: Tensor) -> list[int]:
        """Return the spatial sizes of the result."""
        spatial = zip(x.shape[2:], self.low, self.high, self.span, self.stride, strict=True)
        return [(n + low + high - span) // stride + 1 for n, low, high, span, stride in spatial]


# ---- convolutions ----------------------------------------------------------------------------


def conv(
    x: Tensor, weight: Tensor, stride: Numbers, padding: Numbers, dilation: Numbers, groups: int
) -> Tensor:
    s = SlidingKernel(x.shape[2:], weight.shape[2:], stride, padding, dilation)
    folded = s.fold(x)
    places = s.places(folded)
    if folded.numel() and weight.numel():
        padded, left = s.padded(folded)
        kernel = weight.squeeze(s.still)
        given = s.stride, left, s.dilation, False, [0] * len(left), groups
        if x.dtype == torch.int32:  # torch lacks kernels with dilation
            y = aten.convolution(padded.long(), kernel.long(), None, *given).int()
        else:
            y = aten.convolution(padded, kernel, None, *given)
    else:
        y = x.new_zeros((folded.shape[0], weight.shape[0], *places))
    return s.unfold(y, x.shape)


def conv_transpose(
    y: Tensor, weight: Tensor, shape: Numbers, stride: Numbers, padding: Numbers,
    dilation: Numbers, groups: int,
) -> Tensor:  # fmt: skip
    """Return the transposed convolution: a tensor like x, of this shape."""
    if not (y.numel() and weight.numel()):
        return y.new_zeros(tuple(shape))
    s = SlidingKernel(y.shape[2:], weight.shape[2:], stride, padding, dilation)
    folded, kernel = s.fold(y), weight.squeeze(s.still)
    rows = [n for d, n in enumerate(shape) if d >= 2 and d not in s.still]
    bounds = zip(folded.shape[2:], s.stride, s.span, strict=True)
    full = [(n - 1) * stride + span for n, stride, span in bounds]
    more = [n - (f - 2 * p) for n, f, p in zip(rows, full, s.low, strict=True)]
    most = map(max, s.stride, s.dilation)
    if s.low == s.high and all(0 <= m < most for m, most in zip(more, most, strict=True)):
        x = aten.convolution(folded, kernel, None, s.stride, s.low, s.dilation, True, more, groups)
    else:
        none = [0] * len(rows)
        x = aten.convolution(folded, kernel, None, s.stride, none, s.dilation, True, none, groups)
        for d, (low, n) in enumerate(zip(s.low, rows, strict=True)):
            x = span(x, 2 + d, low, n)
    return s.unfold(x, shape)


def conv_weight(
    x: Tensor, y: Tensor, shape: Numbers, stride: Numbers, padding: Numbers, dilation: Numbers,
    groups: int,
) -> Tensor:  # fmt: skip
    """Return the cotangent of the weight, of this shape."""
    if not (x.numel() and y.numel()):
        return x.new_zeros(tuple(shape))
    s = SlidingKernel(x.shape[2:], shape[2:], stride, padding, dilation)
    padded, left = s.padded(s.fold(x))
    kernel = x.new_empty(1).expand((*shape[:2], *s.kernel))  # only its shape is read
    given = s.stride, left, s.dilation, False, [0] * len(left), groups
    made = aten.convolution_backward(s.fold(y), padded, kernel, None, *given, [False, True, False])[
        1
    ]
    return made.view(tuple(shape))


# ---- pools -----------------------------------------------------------------------------------


def max_pool(x: Tensor, kernel: Numbers, stride: Numbers, padding: Numbers) -> Tensor:
    s = SlidingKernel(x.shape[2:], kernel, stride, padding, [1] * len(kernel))
    folded = s.fold(x)
    if folded.numel():
        y = _maxima(*s.padded(folded, -torch.inf), s)
    else:
        y = x.new_empty((*folded.shape[:2], *s.places(folded)))
    return s.unfold(y, x.shape)


def max_pool_grad(
    x: Tensor, dy: Tensor, kernel: Numbers, stride: Numbers, padding: Numbers
) -> Tensor:
    """Return the cotangent of x. The forward part is recomputed to find the maxima."""
    if not x.numel():
        return torch.zeros_like(x)
    s = SlidingKernel(x.shape[2:], kernel, stride, padding, [1] * len(kernel))
    folded = s.fold(x)
    padded, left = s.padded(folded, -torch.inf)
    with torch.enable_grad():
        leaf = padded.detach().requires_grad_()
        y = _maxima(leaf, left, s)
    dx = torch.autograd.grad(y, leaf, s.fold(dy))[0]
    for d, n in enumerate(folded.shape[2:]):
        low = s.low[d] - left[d]
        inside = dx.narrow(2 + d, low, n)
        if low:  # torch takes the first element of a window of -inf, which may be padding
            inside = inside.clone()
            inside.narrow(2 + d, 0, 1).add_(dx.narrow(2 + d, 0, low).sum(2 + d, keepdim=True))
        dx = inside
    return s.unfold(dx, x.shape)


def _maxima(padded: Tensor, left: list[int], s: SlidingKernel) -> Tensor:
    call = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(left) - 1]
    return call(padded, s.kernel, s.stride, left)
