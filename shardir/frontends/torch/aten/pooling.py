"""Pools and resampling."""

from collections.abc import Sequence
from typing import Any

from shardir.build import Value, nn
from shardir.frontends.torch.aten.contraction import edges, sizes
from shardir.frontends.torch.translation import AtenEntry, Translation


def _batched(n: int, entry: AtenEntry) -> AtenEntry:
    """An entry for tensors of a batch, also of one without."""

    def both(t: Translation, x: Value, *args: Any, **named: Any) -> Value:
        if len(x.shape) == n + 1:
            return entry(t, x.reshape(1, *x.shape), *args, **named).reshape(*t.shape)
        return entry(t, x, *args, **named)

    return both


def _clipped(t: Translation, x: Value, window: Sequence[int]) -> tuple[int, ...]:
    """The window, not larger than the tensor where there is one of it alone."""
    n = len(window)
    return tuple(
        min(w, have) if out == 1 else w
        for w, have, out in zip(window, x.shape[-n:], t.shape[-n:], strict=True)
    )


def _margins(
    t: Translation, x: Value, window: Sequence[int], steps: Sequence[int], margins: Sequence[int]
) -> tuple[int, ...]:
    """The padding before and after each dimension, after it as much as the result's size needs,
    which `ceil_mode` rounds up."""
    found = list(margins)
    for d, (w, step) in enumerate(zip(window, steps, strict=True)):
        n, out = x.shape[len(x.shape) - len(window) + d], t.shape[len(t.shape) - len(window) + d]
        needed = (out - 1) * step + w - n - found[2 * d]
        found[2 * d + 1] = max(found[2 * d + 1], needed)
    return tuple(found)


def _max_pool(n: int) -> AtenEntry:
    def entry(
        t: Translation, x: Value, size: Any, stride: Any = (), padding: Any = 0,
        dilation: Any = 1, ceil_mode: bool = False,
    ) -> Value:  # fmt: skip
        window = _clipped(t, x, sizes(size, n))
        steps = window if stride in (None, (), []) else sizes(stride, n)
        if set(sizes(dilation, n)) != {1}:
            return NotImplemented
        margins = _margins(t, x, window, steps, edges(padding, window, ()))
        return nn.max_pool(x, window=window, stride=steps, padding=margins)

    return _batched(n, entry)


def _avg_pool(n: int) -> AtenEntry:
    def entry(
        t: Translation, x: Value, size: Any, stride: Any = (), padding: Any = 0,
        ceil_mode: bool = False, count_include_pad: bool = True, divisor: int | None = None,
    ) -> Value:  # fmt: skip
        window = _clipped(t, x, sizes(size, n))
        steps = window if stride in (None, (), []) else sizes(stride, n)
        given = edges(padding, window, ())
        margins = _margins(t, x, window, steps, given)
        if divisor is not None or (margins != given and count_include_pad and any(given)):
            return NotImplemented
        return nn.avg_pool(
            x, window=window, stride=steps, padding=margins,
            exclude=not count_include_pad or margins != given,
        )  # fmt: skip

    return _batched(n, entry)


def _adaptive(n: int) -> AtenEntry:
    def entry(t: Translation, x: Value, size: Any) -> Value:
        return nn.adaptive_avg_pool(x, size=t.shape[-n:])

    return _batched(n, entry)


def _nearest(n: int) -> AtenEntry:
    def entry(t: Translation, x: Value, *_: Any) -> Value:
        for d in range(n):
            axis = len(x.shape) - n + d
            have, want = x.shape[axis], t.shape[len(t.shape) - n + d]
            if want % have:
                return NotImplemented
            if want > have:
                x = nn.repeat_interleave(x, repeats=want // have, axis=axis)
        return x

    return entry


def _resized(t: Translation, x: Value, shape: Sequence[int], corners: bool) -> Value:
    """Linear resampling, one dimension after the other: products with the matrices of weights."""
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
    """The weights of the source's elements for element i (torch's area_pixel_compute_scale)."""
    if corners:
        at = i * (have - 1) / (want - 1) if want > 1 else 0.0
    else:
        at = max((i + 0.5) * have / want - 0.5, 0.0)
    low = min(int(at), have - 1)
    high = min(low + 1, have - 1)
    row = [0.0] * have
    row[low] += 1 - (at - low)
    row[high] += at - low
    return row


def _linear(n: int) -> AtenEntry:
    def entry(t: Translation, x: Value, size: Any, corners: bool, *scales: float | None) -> Value:
        if any(s is not None and s != w / h for s, w, h in zip(
            scales[0] if scales and isinstance(scales[0], list | tuple) else scales,
            t.shape[-n:], x.shape[-n:], strict=False)):  # fmt: skip
            return NotImplemented
        return _resized(t, x, t.shape[-n:], corners)

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
