"""Views, movements, splits and joins."""

from collections.abc import Sequence
from math import prod
from typing import Any

from shardir.build import Value, nn
from shardir.frontends.torch.translation import AtenEntry, ByType, Translation

_reshape = ByType(lambda t, x: x.reshape(*t.shape))

_same = ByType(lambda t, x: x)


def _swapped(rank: int, a: int, b: int) -> list[int]:
    perm = [*range(rank)]
    perm[a % rank], perm[b % rank] = perm[b % rank], perm[a % rank]
    return perm


def _transpose(t: Translation, x: Value, a: int, b: int) -> Value:
    return x.transpose(*_swapped(len(x.shape), a, b)) if len(x.shape) > 1 else x


def _t(t: Translation, x: Value) -> Value:
    return x.transpose(1, 0) if len(x.shape) > 1 else x


def _view_dtype(t: Translation, x: Value) -> Value:
    """A bit cast: supported for the tensor's own dtype only."""
    return x if t.argument(0).dtype == t.result.dtype else NotImplemented


def _permute(t: Translation, x: Value, dims: Sequence[int]) -> Value:
    return x.transpose(*dims) if dims else x


def _movedim(t: Translation, x: Value, source: Any, target: Any) -> Value:
    rank = len(x.shape)
    froms, tos = ([v] if isinstance(v, int) else [*v] for v in (source, target))
    froms, tos = [d % rank for d in froms], [d % rank for d in tos]
    unmoved = iter(d for d in range(rank) if d not in froms)
    return x.transpose(*(froms[tos.index(d)] if d in tos else next(unmoved) for d in range(rank)))


def _bounds(n: int, start: int | None, end: int | None) -> tuple[int, int]:
    first, last, _ = slice(start, end).indices(n)
    return first, max(first, last)


def _index(rank: int, dim: int, index: int | slice) -> tuple[int | slice, ...]:
    return (*(slice(None),) * (dim % rank), index)


def _slice(
    t: Translation, x: Value, dim: int = 0, start: int | None = None, end: int | None = None,
    step: int = 1,
) -> Value:  # fmt: skip
    return x[_index(len(x.shape), dim, slice(start, end, step))]


def _narrow(t: Translation, x: Value, dim: int, start: int | Value, length: int) -> Value:
    if isinstance(start, Value):
        return NotImplemented
    start = start + x.shape[dim] if start < 0 else start
    return _slice(t, x, dim, start, start + length)


def _slice_back(
    t: Translation, old: Value, new: Value, dim: int = 0, start: int | None = None,
    end: int | None = None, step: int = 1,
) -> Value:  # fmt: skip
    """`old` with a slice replaced by `new`."""
    dim %= len(old.shape)
    n = old.shape[dim]
    first, last = _bounds(n, start, end)
    new = new.to(old.dtype)
    if step == 1:
        parts = [old[_index(len(old.shape), dim, slice(0, first))], new,
                 old[_index(len(old.shape), dim, slice(last, n))]]  # fmt: skip
        parts = [p for p in parts if p.shape[dim]]
        return nn.concat(*parts, axis=dim) if len(parts) > 1 else parts[0]
    at = nn.remainder(t.iota((n,)) - first, t.value(step, "i64")).compare("eq", 0)
    at = at & (t.iota((n,)) >= first) & (t.iota((n,)) < last)
    # rounded, since 49 * (1 / 49) is below 1; elements between steps are masked by `at`
    source = nn.round((t.iota((n,)) - first).to("f64") * (1 / step))
    source = nn.clamp(source, min=0.0, max=new.shape[dim] - 1.0)
    spread = nn.gather(new, source.to("i64"), axis=dim)
    shape = [n if d == dim else 1 for d in range(len(old.shape))]
    return nn.select(at.reshape(*shape).broadcast_to(*old.shape), spread, old)


def _select(t: Translation, x: Value, dim: int, index: int) -> Value:
    return x[_index(len(x.shape), dim, index)]


def _select_back(t: Translation, old: Value, new: Value, dim: int, index: int) -> Value:
    dim %= len(old.shape)
    index %= old.shape[dim]
    shape = (*old.shape[:dim], 1, *old.shape[dim + 1 :])
    return _slice_back(t, old, new.reshape(*shape), dim, index, index + 1)


_expand = ByType(lambda t, x: x.broadcast_to(*t.shape))


def pieces(x: Value, sizes: Sequence[int], dim: int) -> tuple[Value, ...]:
    """x in pieces along a dimension."""
    if len(sizes) == 1:
        return (x,)
    return tuple(nn.split(x, sizes=tuple(sizes), axis=dim % len(x.shape)))


def _split(t: Translation, x: Value, size: int | Sequence[int], dim: int = 0) -> tuple[Value, ...]:
    n = x.shape[dim]
    sizes = size if not isinstance(size, int) else [min(size, n - i) for i in range(0, n, size)]
    return pieces(x, sizes, dim)


def _chunk(t: Translation, x: Value, chunks: int, dim: int = 0) -> tuple[Value, ...]:
    return _split(t, x, -(-x.shape[dim] // chunks), dim)


def unbind(t: Translation, x: Value, dim: int = 0) -> tuple[Value, ...]:
    dim %= len(x.shape)
    shape = x.shape[:dim] + x.shape[dim + 1 :]
    return tuple(p.reshape(*shape) for p in pieces(x, (1,) * x.shape[dim], dim))


def _cat(t: Translation, xs: Sequence[Value], dim: int = 0) -> Value:
    xs = [t.value(x) for x in xs if x.shape != (0,)]
    return xs[0] if len(xs) == 1 else nn.concat(*xs, axis=dim % len(xs[0].shape))


def stack(t: Translation, xs: Sequence[Value], dim: int = 0) -> Value:
    return nn.stack(*(t.value(x) for x in xs), axis=dim % len(t.shape))


def _pad(
    t: Translation, x: Value, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Value:
    rank = len(x.shape)
    low, high = [0] * rank, [0] * rank
    for i in range(len(pad) // 2):
        low[rank - 1 - i], high[rank - 1 - i] = pad[2 * i], pad[2 * i + 1]
    if mode == "constant":
        # negative numbers remove elements; one call may pad and remove
        starts = [max(0, -k) for k in low]
        ends = [n - max(0, -k) for n, k in zip(x.shape, high, strict=True)]
        x = x[tuple(slice(a, b) for a, b in zip(starts, ends, strict=True))]
        low, high = [max(0, k) for k in low], [max(0, k) for k in high]
        if not any((*low, *high)):
            return x
        return nn.pad(x, low=tuple(low), high=tuple(high), value=float(value or 0.0) or None)
    for d in range(rank):
        if low[d] or high[d]:
            n = x.shape[d]
            at = [_source(i - low[d], n, mode) for i in range(low[d] + n + high[d])]
            x = nn.gather(x, t.function.constant(at, dtype="i64"), axis=d)
    return x


def _source(i: int, n: int, mode: str) -> int:
    """The source of the padded index i in a dimension of size n."""
    if mode == "replicate":
        return min(max(i, 0), n - 1)
    if mode == "circular":
        return i % n
    return -i if i < 0 else 2 * (n - 1) - i if i >= n else i  # reflect


def _roll(t: Translation, x: Value, shifts: Any, dims: Any = ()) -> Value:
    by, at = ([v] if isinstance(v, int) else [*v] for v in (shifts, dims))
    if not at:
        return nn.roll(x.reshape(-1), shifts=tuple(by)).reshape(*x.shape)
    amounts = [0] * len(x.shape)
    for n, d in zip(by, at, strict=True):
        amounts[d] += n
    return nn.roll(x, shifts=tuple(amounts))


def _flip(t: Translation, x: Value, dims: Sequence[int]) -> Value:
    return nn.flip(x, dims=tuple(d % len(x.shape) for d in dims))


def _repeat(t: Translation, x: Value, repeats: Sequence[int]) -> Value:
    x = x.reshape(*(1,) * (len(repeats) - len(x.shape)), *x.shape)
    return nn.tile(x, repeats=tuple(repeats))


def _tile(t: Translation, x: Value, dims: Sequence[int]) -> Value:
    return _repeat(t, x, [*(1,) * (len(x.shape) - len(dims)), *dims])


def _repeat_interleave(t: Translation, x: Value, repeats: int, dim: int | None = None) -> Value:
    if dim is None:
        x, dim = x.reshape(-1), 0
    return nn.repeat_interleave(x, repeats=repeats, axis=dim % len(x.shape))


def _unfold(t: Translation, x: Value, dim: int, size: int, step: int) -> Value:
    """Windows of a dimension, with their elements in a new last dimension."""
    dim %= len(x.shape)
    count = t.shape[dim]
    at = [[i * step + j for j in range(size)] for i in range(count)]
    y = nn.gather(x, t.function.constant(at, dtype="i64"), axis=dim)
    rank = len(y.shape)
    return y.transpose(*(d for d in range(rank) if d != dim + 1), dim + 1)


def _diagonal(t: Translation, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    rank = len(x.shape)
    a, b = dim1 % rank, dim2 % rank
    x = x.transpose(*(d for d in range(rank) if d not in (a, b)), a, b)
    rows, columns = x.shape[-2:]
    first, n = (max(0, -offset), max(0, offset)), t.shape[-1]
    flat = x.reshape(*x.shape[:-2], rows * columns)
    if not n:
        return flat[..., :0]
    start = first[0] * columns + first[1]
    return flat[..., start : start + (n - 1) * (columns + 1) + 1 : columns + 1]


def _pixel_shuffle(t: Translation, x: Value, r: int) -> Value:
    *lead, c, h, w = x.shape
    n = len(lead)
    y = x.reshape(*lead, c // (r * r), r, r, h, w)
    y = y.transpose(*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return y.reshape(*lead, c // (r * r), h * r, w * r)


def _broadcast_tensors(t: Translation, xs: Sequence[Value]) -> tuple[Value, ...]:
    rank = max(len(x.shape) for x in xs)
    padded = [(1,) * (rank - len(x.shape)) + x.shape for x in xs]
    shape = tuple(max(sizes) for sizes in zip(*padded, strict=True))
    return tuple(x.broadcast_to(*shape) for x in xs)


def _meshgrid(t: Translation, xs: Sequence[Value], indexing: str = "ij") -> tuple[Value, ...]:
    sizes = [prod(x.shape) for x in xs]
    order = [1, 0, *range(2, len(xs))] if indexing == "xy" and len(xs) > 1 else [*range(len(xs))]
    shape = [sizes[i] for i in order]
    return tuple(
        x.reshape(*(n if order[d] == i else 1 for d, n in enumerate(shape))).broadcast_to(*shape)
        for i, x in enumerate(xs)
    )


def _as_strided(
    t: Translation, x: Value, size: Sequence[int], stride: Sequence[int],
    storage_offset: int | None = None,
) -> Value:  # fmt: skip
    """Elements of a dense tensor by memory position."""
    if not _is_dense(t.argument(0)):
        return NotImplemented
    offset, want = storage_offset or 0, 1
    for n, step in reversed(list(zip(size, stride, strict=True))):
        if n != 1 and step != want:
            return nn.gather(x.reshape(-1), _places(t, size, stride, offset), axis=0)
        want *= n
    return x.reshape(-1)[offset : offset + prod(size)].reshape(*size)


def _as_strided_scatter(
    t: Translation, x: Value, src: Value, size: Sequence[int], stride: Sequence[int],
    storage_offset: int | None = None,
) -> Value:  # fmt: skip
    if not _is_dense(t.argument(0)):
        return NotImplemented
    at = _places(t, size, stride, storage_offset or 0).reshape(-1)
    return nn.index_copy(x.reshape(-1), at, src.reshape(-1), axis=0).reshape(*x.shape)


def _is_dense(x: Any) -> bool:
    """Whether a fake tensor is contiguous and spans its whole storage."""
    return x.is_contiguous() and x.untyped_storage().nbytes() == x.numel() * x.element_size()


def _places(t: Translation, size: Sequence[int], stride: Sequence[int], offset: int) -> Value:
    """The memory position of each element of a strided tensor."""
    places = t.value(offset, "i64").broadcast_to(*size)
    for dim, step in enumerate(stride):
        places = places + t.iota(size, dim) * step
    return places


TABLE: dict[str, AtenEntry] = {
    "as_strided": _as_strided,
    "as_strided_scatter": _as_strided_scatter,
    **{
        name: _reshape
        for name in (
            "view",
            "_unsafe_view",
            "reshape",
            "view_as",
            "reshape_as",
            "flatten",
            "unflatten",
            "squeeze",
            "unsqueeze",
        )
    },
    **{
        name: _same
        for name in (
            "alias",
            "contiguous",
            "clone",
            "lift_fresh_copy",
            "lift_fresh",
            "_conj",
            "resolve_conj",
            "resolve_neg",
            "requires_grad_",
            "pin_memory",
            "cpu",
        )
    },
    "straight_through": lambda t, x, history: nn.straight_through(x, history),
    "detach": lambda t, x: nn.stop_gradient(x) if x.dtype.startswith(("f", "bf")) else x,
    "view.dtype": _view_dtype,
    "t": _t,
    "numpy_T": lambda t, x: x.transpose(*reversed(range(len(x.shape)))),
    "mT": lambda t, x: x.transpose(),
    "transpose": _transpose,
    "swapaxes": _transpose,
    "permute": _permute,
    "movedim": _movedim,
    "moveaxis": _movedim,
    "slice": _slice,
    "narrow": _narrow,
    "select": _select,
    "expand": _expand,
    "expand_as": _expand,
    "broadcast_to": _expand,
    "split": _split,
    "split_with_sizes": _split,
    "chunk": _chunk,
    "unbind": unbind,
    "cat": _cat,
    "concat": _cat,
    "stack": stack,
    "hstack": lambda t, xs: _cat(t, xs, 0 if len(t.shape) == 1 else 1),
    "pad": _pad,
    "constant_pad_nd": lambda t, x, pad, value=0: _pad(t, x, pad, "constant", value),
    "roll": _roll,
    "flip": _flip,
    "repeat": _repeat,
    "tile": _tile,
    "repeat_interleave.self_int": _repeat_interleave,
    "unfold": _unfold,
    "diagonal": _diagonal,
    "tril": lambda t, x, diagonal=0: nn.tril(x, diagonal=diagonal),
    "triu": lambda t, x, diagonal=0: nn.triu(x, diagonal=diagonal),
    "slice_scatter": _slice_back,
    "select_scatter": _select_back,
    "pixel_shuffle": _pixel_shuffle,
    "broadcast_tensors": _broadcast_tensors,
    "meshgrid": _meshgrid,
}
