"""Elements by index."""

from collections.abc import Sequence
from math import prod

import torch

from shardir.build import Value, nn
from shardir.frontends.torch.translation import AtenEntry, Translation


def _embedding(
    t: Translation, table: Value, ids: Value, padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
) -> Value:  # fmt: skip
    if scale_grad_by_freq:
        table = _scaled_by_frequency(t, table, ids)
    if padding_idx < 0:
        return nn.gather(table, ids, axis=0)
    # The row is read, but gets no gradient (torch.nn.functional.embedding).
    rows = t.iota((table.shape[0], 1)).compare("eq", padding_idx)
    fixed = nn.select(rows.broadcast_to(*table.shape), nn.stop_gradient(table), table)
    return nn.gather(fixed, ids, axis=0)


def _scaled_by_frequency(t: Translation, table: Value, ids: Value) -> Value:
    """The table, with the gradient of each row divided by the number of its reads."""
    flat, n = ids.reshape(-1), table.shape[0]
    ones = t.value(1, "i64").broadcast_to(*flat.shape)
    counts = nn.scatter_add(flat, ones, axis=0, shape=(n,), dtype="i64")
    share = (1.0 / nn.max(counts, 1).to(table.dtype)).reshape(n, 1)
    fixed = nn.stop_gradient(table)
    return fixed + (table - fixed) * share


def _index(t: Translation, x: Value, indices: Sequence[Value | None]) -> Value:
    """Advanced indexing of some dimensions, with torch's broadcasting of indices."""
    indexed_dims = [d for d, i in enumerate(indices) if i is not None]
    tensors = [i for i in indices if i is not None]
    if any(i.dtype == "i1" for i in tensors):
        return NotImplemented
    flat, shape = flat_index(t, [x.shape[d] for d in indexed_dims], tensors)
    if indexed_dims == [*range(indexed_dims[0], indexed_dims[-1] + 1)]:
        first, moved = indexed_dims[0], x
    else:  # torch puts the dimensions of the indices first
        other_dims = [d for d in range(len(x.shape)) if d not in indexed_dims]
        first, moved = 0, x.transpose(*indexed_dims, *other_dims)
    n = len(indexed_dims)
    moved = moved.reshape(
        *moved.shape[:first], prod(moved.shape[first : first + n]), *moved.shape[first + n :]
    )
    return nn.gather(moved, flat.reshape(*shape), axis=first)


def flat_index(
    t: Translation, sizes: Sequence[int], indices: Sequence[Value]
) -> tuple[Value, tuple[int, ...]]:
    """Combine indices into dimensions of `sizes` into one row-major index, after broadcasting;
    negative indices count from the end. Return it with its shape."""
    rank = max(len(i.shape) for i in indices)
    padded = [(1,) * (rank - len(i.shape)) + i.shape for i in indices]
    shape = tuple(max(ns) for ns in zip(*padded, strict=True))
    flat: Value | None = None
    for n, i in zip(sizes, indices, strict=True):
        i = i.to("i64")
        i = nn.select(i < 0, i + n, i)
        flat = i if flat is None else flat * n + i
    assert flat is not None
    return flat.broadcast_to(*shape), shape


def _index_put(
    t: Translation, x: Value, indices: Sequence[Value | None], values: Value,
    accumulate: bool = False,
) -> Value:  # fmt: skip
    indexed_dims = [d for d, i in enumerate(indices) if i is not None]
    tensors = [i for i in indices if i is not None]
    if len(tensors) == 1 and tensors[0].dtype == "i1" and not values.shape and indexed_dims == [0]:
        mask = tensors[0]
        mask = mask.reshape(*mask.shape, *(1,) * (len(x.shape) - len(mask.shape)))
        return nn.select(mask.broadcast_to(*x.shape), values.to(x.dtype).broadcast_to(*x.shape), x)
    if any(i.dtype == "i1" for i in tensors):
        return NotImplemented
    flat, shape = flat_index(t, [x.shape[d] for d in indexed_dims], tensors)
    if len(indexed_dims) == len(shape) == 1 and not accumulate:
        at = indexed_dims[0]
        rows = values.to(x.dtype).broadcast_to(*x.shape[:at], *shape, *x.shape[at + 1 :])
        return nn.index_copy(x, flat, rows, axis=at)
    if indexed_dims != [*range(len(indexed_dims))]:  # indexed dimensions first
        remaining_dims = [d for d in range(len(x.shape)) if d not in indexed_dims]
        order = [*indexed_dims, *remaining_dims]
        if indexed_dims == [
            *range(indexed_dims[0], indexed_dims[-1] + 1)
        ]:  # else they are first in torch's values too
            at, count = indexed_dims[0], len(shape)
            ends = (*x.shape[:at], *shape, *x.shape[indexed_dims[-1] + 1 :])
            values = values.broadcast_to(*ends).transpose(
                *range(at, at + count), *range(at), *range(at + count, len(ends))
            )
        moved = _index_put(t, x.transpose(*order), tensors, values, accumulate)
        return moved.transpose(*(order.index(d) for d in range(len(order))))
    n, row = prod(x.shape[: len(indexed_dims)]), x.shape[len(indexed_dims) :]
    source = values.to(x.dtype).broadcast_to(*shape, *row).reshape(prod(shape), prod(row))
    ids = flat.reshape(prod(shape), 1).broadcast_to(prod(shape), prod(row))
    added = nn.scatter_add(ids, source, axis=0, shape=(n, prod(row)), dtype=x.dtype)
    added = added.reshape(*x.shape)
    if accumulate:
        return x + added
    ones = t.value(1, "i64").broadcast_to(prod(shape))
    named = nn.scatter_add(flat.reshape(-1), ones, axis=0, shape=(n,), dtype="i64") > 0
    named = named.reshape(*x.shape[: len(indexed_dims)], *(1,) * len(row)).broadcast_to(*x.shape)
    return nn.select(named, added, x)  # for equal indices, the result is undefined in torch


def _index_copy(t: Translation, x: Value, dim: int, ids: Value, source: Value) -> Value:
    """Replace rows by index; torch allows no negative indices."""
    return nn.index_copy(x, ids.reshape(-1), source.to(x.dtype), axis=dim % len(x.shape))


def _scatter(t: Translation, x: Value, dim: int, ids: Value, source: Value | float) -> Value:
    """Write elements by index; for equal indices, the result is undefined in torch."""
    dim %= len(x.shape)
    if any(a != b for d, (a, b) in enumerate(zip(ids.shape, x.shape, strict=True)) if d != dim):
        return NotImplemented
    ones = t.value(1, "i64").broadcast_to(*ids.shape)
    named = nn.scatter_add(ids, ones, axis=dim, shape=x.shape, dtype="i64") > 0
    if not isinstance(source, Value) or not source.shape:
        return nn.select(named, t.value(source).broadcast_to(*x.shape), x)
    source = source[tuple(slice(0, n) for n in ids.shape)]
    return nn.select(named, nn.scatter_add(ids, source, axis=dim, shape=x.shape, dtype=x.dtype), x)


def _scatter_add(t: Translation, x: Value, dim: int, ids: Value, source: Value) -> Value:
    dim %= len(x.shape)
    source = source[tuple(slice(0, n) for n in ids.shape)]
    if any(a != b for d, (a, b) in enumerate(zip(ids.shape, x.shape, strict=True)) if d != dim):
        return NotImplemented
    return x + nn.scatter_add(ids, source, axis=dim, shape=x.shape, dtype=x.dtype)


def _index_add(
    t: Translation, x: Value, dim: int, ids: Value, source: Value, *, alpha: float = 1
) -> Value:
    dim %= len(x.shape)
    shape = [ids.shape[0] if d == dim else 1 for d in range(len(x.shape))]
    at = ids.to("i64").reshape(*shape).broadcast_to(*source.shape)
    source = source if alpha == 1 else source * alpha
    return x + nn.scatter_add(at, source, axis=dim, shape=x.shape, dtype=x.dtype)


def _gather(t: Translation, x: Value, dim: int, ids: Value) -> Value:
    if not x.shape:
        return x.broadcast_to(*t.shape)
    dim %= len(x.shape)
    x = x[tuple(slice(None) if d == dim else slice(0, n) for d, n in enumerate(ids.shape))]
    return nn.take_along_axis(x, ids, axis=dim)


def _take_along_dim(t: Translation, x: Value, ids: Value, dim: int | None = None) -> Value:
    """Read elements by index along one dimension, with broadcasting of the other dimensions."""
    if dim is None:
        return _gather(t, x.reshape(-1), 0, ids.reshape(-1))
    dim %= len(x.shape)
    sizes = torch.broadcast_shapes(*((*v.shape[:dim], 1, *v.shape[dim + 1 :]) for v in (x, ids)))
    x, ids = (v.broadcast_to(*sizes[:dim], v.shape[dim], *sizes[dim + 1 :]) for v in (x, ids))
    return _gather(t, x, dim, ids)


def _one_hot(t: Translation, ids: Value, num_classes: int = -1) -> Value:
    if num_classes < 0:
        return NotImplemented
    return nn.one_hot(ids, shape=(*ids.shape, num_classes), dtype="i64")


def _masked_scatter(t: Translation, x: Value, mask: Value, source: Value) -> Value:
    """Replace elements where a mask holds by consecutive elements of a source."""
    mask = mask.broadcast_to(*x.shape)
    ids = nn.cumsum(mask.reshape(-1).to("i64"), axis=0) - 1
    ids = nn.min(nn.max(ids, 0), prod(source.shape) - 1)
    taken = nn.gather(source.reshape(-1).to(x.dtype), ids, axis=0).reshape(*x.shape)
    return nn.select(mask, taken, x)


def _embedding_bag(
    t: Translation, table: Value, ids: Value, offsets: Value, scale_grad_by_freq: bool = False,
    mode: int = 0, per_sample_weights: Value | None = None, include_last_offset: bool = False,
    padding_idx: int | None = -1,
) -> tuple[Value | None, ...]:  # fmt: skip
    """Sums and means of bags of rows: a product with the incidence matrix of bags and ids. If the
    further results, for torch's backward op, are used, torch's kernel computes all."""
    has_further_uses = any(user.args[1:] != (0,) for user in t.node.users)
    if mode == 2 or scale_grad_by_freq or has_further_uses:
        return NotImplemented
    n, bags = ids.shape[0], t.shape[0]
    starts = offsets[:bags].to("i64").reshape(bags, 1)
    if include_last_offset:
        ends = offsets[1:].to("i64").reshape(bags, 1)
    else:
        end = t.value(n, "i64").broadcast_to(1, 1)
        ends = nn.concat(starts[1:], end, axis=0) if bags > 1 else end
    index = t.iota((bags, n), 1)
    inside = (index >= starts) & (index < ends)
    if padding_idx is not None and padding_idx >= 0:
        inside = inside & ids.compare("ne", padding_idx).reshape(1, n).broadcast_to(bags, n)
    share = inside.to(table.dtype)
    if per_sample_weights is not None:
        share = share * per_sample_weights.reshape(1, n)
    if mode == 1:
        share = share / nn.clamp(share.sum(1, keep=True), min=1.0)
    return share @ nn.gather(table, ids, axis=0), None, None, None


def _embedding_bag_padded(
    t: Translation, table: Value, ids: Value, offsets: Value, scale_grad_by_freq: bool, mode: int,
    sparse: bool, per_sample_weights: Value | None, include_last_offset: bool,
    padding_idx: int | None,
) -> tuple[Value | None, ...]:  # fmt: skip
    """Embedding bag with a padding_idx that may be negative, counted from the end."""
    del sparse  # the storage of the gradient
    row = -1 if padding_idx is None else padding_idx % table.shape[0]
    return _embedding_bag(
        t, table, ids, offsets, scale_grad_by_freq, mode, per_sample_weights,
        include_last_offset, row,
    )  # fmt: skip


def _histc(t: Translation, x: Value, bins: int = 100, min: float = 0, max: float = 0) -> Value:
    """The number of elements in each of `bins` equal intervals; the last interval is closed."""
    if min == max:
        return NotImplemented
    flat = x.reshape(-1).to("f64")
    bin_of = nn.floor((flat - float(min)) * (bins / (max - min))).to("i64")
    bin_of = nn.max(nn.min(bin_of, bins - 1), 0)
    inside = (flat >= float(min)) & (flat <= float(max))
    ones = inside.to("f64").reshape(-1, 1) * nn.one_hot(
        bin_of, shape=(*bin_of.shape, bins), dtype="f64"
    )
    return ones.sum(0).to(t.dtype)


TABLE: dict[str, AtenEntry] = {
    "embedding_bag": _embedding_bag,
    "embedding_bag.padding_idx": _embedding_bag_padded,
    "_embedding_bag": _embedding_bag,
    "histc": _histc,
    "embedding": _embedding,
    "index.Tensor": _index,
    "index_select": lambda t, x, dim, ids: nn.gather(x, ids, axis=dim % len(x.shape)),
    "index_put": _index_put,
    "masked_scatter": _masked_scatter,
    "gather": _gather,
    "take_along_dim": _take_along_dim,
    "scatter": _scatter,
    "scatter_add": _scatter_add,
    "index_add": _index_add,
    "index_copy": _index_copy,
    "one_hot": _one_hot,
}
