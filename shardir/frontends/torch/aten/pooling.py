"""Pooling and resampling."""

from collections.abc import Sequence
from functools import wraps
from math import prod
from typing import Any

from shardir.build import Value, nn
from shardir.frontends.torch.aten.contraction import edges, sizes
from shardir.frontends.torch.translation import AtenEntry, Translation


def _batched(n: int, entry: AtenEntry) -> AtenEntry:
    """Extend an entry for batches to a single sample."""

    @wraps(entry)
    def with_batch(t: Translation, x: Value, *args: Any, **named: Any) -> Value:
        if len(x.shape) > n + 1:
            return entry(t, x, *args, **named)
        out = entry(t, x.reshape(1, *x.shape), *args, **named)
        return out if out is NotImplemented else out.reshape(*t.shape)

    return with_batch


def _clipped(
    t: Translation, x: Value, window: Sequence[int], padding: Sequence[int]
) -> tuple[int, ...]:
    """The window, clipped to the tensor in dimensions with one window and without padding."""
    n = len(window)
    return tuple(
        min(w, have) if out == 1 and not pad else w
        for w, have, out, pad in zip(window, x.shape[-n:], t.shape[-n:], padding[::2], strict=True)
    )


def _margins(
    t: Translation, x: Value, window: Sequence[int], steps: Sequence[int], margins: Sequence[int]
) -> tuple[int, ...]:
    """Return the padding before and after each dimension, extended after it for the result's size,
    which `ceil_mode` rounds up."""
    widened = list(margins)
    for d, (w, step) in enumerate(zip(window, steps, strict=True)):
        n, out = x.shape[len(x.shape) - len(window) + d], t.shape[len(t.shape) - len(window) + d]
        missing = (out - 1) * step + w - n - widened[2 * d]
        widened[2 * d + 1] = max(widened[2 * d + 1], missing)
    return tuple(widened)


def _max_pool(n: int) -> AtenEntry:
    def entry(
        t: Translation, x: Value, size: Any, stride: Any = (), padding: Any = 0,
        dilation: Any = 1, ceil_mode: bool = False,
    ) -> Value:  # fmt: skip
        del ceil_mode  # the result's size has it
        padding_only = edges(padding, sizes(size, n), ())
        window = _clipped(t, x, sizes(size, n), padding_only)
        steps = window if stride in (None, (), []) else sizes(stride, n)
        if set(sizes(dilation, n)) != {1}:
            return NotImplemented
        margins = _margins(t, x, window, steps, padding_only)
        return nn.max_pool(x, window=window, stride=steps, padding=margins)

    return _batched(n, entry)


def _avg_pool(n: int) -> AtenEntry:
    def entry(
        t: Translation, x: Value, size: Any, stride: Any = (), padding: Any = 0,
        ceil_mode: bool = False, count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Value:  # fmt: skip
        del ceil_mode  # the result's size has it
        padding_only = edges(padding, sizes(size, n), ())
        window = _clipped(t, x, sizes(size, n), padding_only)
        steps = window if stride in (None, (), []) else sizes(stride, n)
        margins = _margins(t, x, window, steps, padding_only)
        extended = margins != padding_only
        how = dict(window=window, stride=steps, padding=margins)
        if divisor_override is not None:
            return nn.avg_pool(x, **how) * (prod(window) / divisor_override)
        if not (extended and count_include_pad and any(padding_only)):
            return nn.avg_pool(x, **how, exclude=not count_include_pad or extended)
        y = nn.avg_pool(x, **how)
        for d, (w, step) in enumerate(zip(window, steps, strict=True)):
            # elements that ceil_mode adds after the padding do not count
            end = x.shape[len(x.shape) - n + d] + padding_only[2 * d] + padding_only[2 * d + 1]
            counts = [min(w, end - i * step) for i in range(y.shape[len(y.shape) - n + d])]
            if set(counts) != {w}:
                scale = t.function.constant([w / count for count in counts], dtype=x.dtype)
                y = y * scale.reshape(-1, *(1,) * (n - 1 - d))
        return y

    return _batched(n, entry)


def _has_scales(t: Translation, x: Value, n: int, *scales: Any) -> bool:
    """Whether the scale factors of a resampling, if any, are the ratios of sizes."""
    factors = [s for s in scales if s is not None]
    factors = [*factors[0]] if factors and isinstance(factors[0], list | tuple) else factors
    ratios = [want / have for want, have in zip(t.shape[-n:], x.shape[-n:], strict=True)]
    return not factors or factors == ratios


def _adaptive(n: int) -> AtenEntry:
    def entry(t: Translation, x: Value) -> Value:
        return nn.adaptive_avg_pool(x, size=t.shape[-n:])

    return _batched(n, entry)


def _nearest(n: int) -> AtenEntry:
    def entry(
        t: Translation, x: Value, scales: float | None = None, scales_d: float | None = None,
        scales_h: float | None = None, scales_w: float | None = None,
        scale_factors: Sequence[float] | None = None,
    ) -> Value:  # fmt: skip
        if not _has_scales(t, x, n, scale_factors, scales, scales_d, scales_h, scales_w):
            return NotImplemented
        for d in range(n):
            axis = len(x.shape) - n + d
            have, want = x.shape[axis], t.shape[len(t.shape) - n + d]
            if want % have:
                return NotImplemented
            if want > have:
                x = nn.repeat_interleave(x, repeats=want // have, axis=axis)
        return x

    return entry


def _resize_linearly(t: Translation, x: Value, shape: Sequence[int], corners: bool) -> Value:
    """Linear resampling, dimension by dimension: products with matrices of weights."""
    n = len(shape)
    for d, want in enumerate(shape):
        axis = len(x.shape) - n + d
        have = x.shape[axis]
        if have == want:
            continue
        rows = [_weights(i, have, want, corners) for i in range(want)]
        matrix = t.function.constant(rows, dtype=x.dtype)
        letters = "abcdefgh"[: len(x.shape)]
        out = letters.replace(letters[axis], "z")
        x = nn.einsum(x, matrix, equation=f"{letters},z{letters[axis]}->{out}")
    return x


def _weights(i: int, have: int, want: int, corners: bool) -> list[float]:
    """The weights of the source's elements in element i (torch's area_pixel_compute_scale)."""
    if corners:
        position = i * (have - 1) / (want - 1) if want > 1 else 0.0
    else:
        position = max((i + 0.5) * have / want - 0.5, 0.0)
    low = min(int(position), have - 1)
    high = min(low + 1, have - 1)
    row = [0.0] * have
    row[low] += 1 - (position - low)
    row[high] += position - low
    return row


def _linear(n: int) -> AtenEntry:
    def entry(
        t: Translation, x: Value, align_corners: bool, scales: float | None = None,
        scales_d: float | None = None, scales_h: float | None = None,
        scales_w: float | None = None, scale_factors: Sequence[float] | None = None,
    ) -> Value:  # fmt: skip
        exact = _has_scales(t, x, n, scale_factors, scales, scales_d, scales_h, scales_w)
        if not align_corners and not exact:
            return NotImplemented
        return _resize_linearly(t, x, t.shape[-n:], align_corners)

    return entry


TABLE: dict[str, AtenEntry] = {
    **{f"max_pool{n}d": _max_pool(n) for n in (1, 2, 3)},
    **{f"avg_pool{n}d": _avg_pool(n) for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": _adaptive(n) for n in (1, 2, 3)},
    **{f"upsample_nearest{n}d": _nearest(n) for n in (1, 2, 3)},
    "upsample_linear1d": _linear(1),
    "upsample_bilinear2d": _linear(2),
    "upsample_trilinear3d": _linear(3),
}
