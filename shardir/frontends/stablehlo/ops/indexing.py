"""Reads by index: gathers and dynamic slices.

A gather reads windows of an operand, which begin at indices of some of its dimensions. Here it is
brought to one form: the operand with its batching dimensions first, then one dimension for all
indexed ones, then the rest; and one index into that dimension for each element of the windows.
Starts are clamped so that windows stay within the operand, where bounds do not show that they do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardir.algebra.layout import Shape
from shardir.build import Value, nn
from shardir.frontends.stablehlo.translation import HloEntry, OpTranslation


@dataclass
class IndexedForm:
    """How indices address an operand.

    Attributes:
        shape: that of the operand.
        batching: its batching dimensions, in the order of those of the indices.
        sizes: the size of the window in each dimension.
        columns: the starts in each indexed dimension, of the shape of the indices' batch.
        batch: the dimensions of the indices' batch that correspond to `batching`.
        dropped: the dimensions of the operand whose windows have no dimension in the result.
    """

    shape: Shape
    batching: tuple[int, ...]
    sizes: Shape
    columns: dict[int, Value]
    batch: tuple[int, ...]
    dropped: frozenset[int]
    batch_shape: Shape

    @property
    def indexed(self) -> list[int]:
        return sorted(self.columns)

    @property
    def rest(self) -> list[int]:
        return [d for d in range(len(self.shape)) if d not in (*self.batching, *self.columns)]

    @property
    def kept(self) -> list[int]:
        """The dimensions of windows in the result."""
        return [d for d in range(len(self.shape)) if d not in self.dropped]

    @property
    def windowed(self) -> list[int]:
        """The indexed dimensions that the result has."""
        return [d for d in self.indexed if d not in self.dropped]

    @property
    def free(self) -> list[int]:
        """The dimensions of the batch without a batching dimension of the operand."""
        return [d for d in range(len(self.batch_shape)) if d not in self.batch]


def columns_of(t: OpTranslation, ids: Value, at: int) -> list[Value]:
    """Return the parts of an index, which are along dimension `at` of the indices."""
    shape = ids.shape
    if at == len(shape):
        return [ids]
    rest = (*shape[:at], *shape[at + 1 :])
    return [t.reshape(t.part(ids, at, k, 1), rest) for k in range(shape[at])]


def clamped(t: OpTranslation, x: Value, last: int) -> Value:
    """Return indices within 0 to `last`."""
    bounds = t.range_of(x)
    if bounds is None or bounds[0] < 0:
        x = nn.max(x, 0)
    if bounds is None or bounds[1] > last:
        x = nn.min(x, last)
    t.facts.bounds.setdefault(x.ssa, (0, last))
    return x


def flat_indices(t: OpTranslation, of: IndexedForm) -> Value:
    """Return the index into the merged indexed dimensions, for each element of each window: of the
    batch's shape, with the sizes of the windows after it."""
    windows = of.windowed
    rank = len(of.batch_shape) + len(windows)
    total: Value | None = None
    for i, d in enumerate(of.indexed):
        stride = prod(of.shape[e] for e in of.indexed[i + 1 :])
        column = of.columns[d]
        shape = (*column.shape, *[1] * len(windows))
        column = t.reshape(column, shape)
        if d in windows and of.sizes[d] > 1:
            at = len(of.batch_shape) + windows.index(d)
            steps = t.iota(
                tuple(of.sizes[d] if e == at else 1 for e in range(rank)), at, column.dtype
            )
            column = nn.add(column, steps)
        if stride != 1:
            column = nn.mul(column, stride)
        total = column if total is None else nn.add(total, column)
    assert total is not None
    full = (*of.batch_shape, *(of.sizes[d] for d in windows))
    return t.spread(t.source(total) if total.shape != full else total, full)


def in_order(of: IndexedForm) -> list[int]:
    """Return the operand's dimensions in the common form."""
    return [*of.batching, *of.indexed, *of.rest]


def merged(t: OpTranslation, x: Value, of: IndexedForm) -> Value:
    """Return the operand in the common form: batching, one indexed dimension, the rest."""
    x = t.transpose(x, in_order(of))
    rows = prod(of.shape[d] for d in of.indexed)
    shape = (*(of.shape[d] for d in of.batching), rows, *(of.shape[d] for d in of.rest))
    return t.reshape(x, shape)


def _gather(t: OpTranslation, x: Value, ids: Value) -> Value:
    numbers, sizes = t["dimension_numbers"], tuple(t["slice_sizes"])
    at = numbers["index_vector_dim"]
    starts = dict(zip(numbers["start_index_map"], columns_of(t, ids, at), strict=True))
    batching = tuple(numbers["operand_batching_dims"])
    batch = tuple(d - (d > at) for d in numbers["start_indices_batching_dims"])
    dropped = frozenset((*numbers["collapsed_slice_dims"], *batching))
    for d, n in enumerate(x.shape):
        if d not in starts and d not in batching and sizes[d] < n:
            x = t.part(x, d, 0, sizes[d])
    columns = {d: clamped(t, c, x.shape[d] - sizes[d]) for d, c in starts.items()
               if sizes[d] < x.shape[d]}  # fmt: skip
    batch_shape = tuple(n for d, n in enumerate(ids.shape) if d != at)
    of = IndexedForm(x.shape, batching, sizes, columns, batch, dropped, batch_shape)
    offsets = numbers["offset_dims"]
    kept = iter(of.kept)
    batch_dims = iter(range(len(batch_shape)))
    wanted = [
        ("o", next(kept)) if d in offsets else ("b", next(batch_dims)) for d in range(len(t.shape))
    ]
    out, labels = _read(t, x, of)
    return t.reshape(t.transpose(out, [labels.index(w) for w in wanted]), t.shape)


def _read(t: OpTranslation, x: Value, of: IndexedForm) -> tuple[Value, list[tuple[str, int]]]:
    """Return the elements of all windows, and what each dimension is: ("b", dimension of the batch)
    or ("o", dimension of the operand)."""
    if not of.columns:  # every window is the whole operand
        kept = [d for d in range(len(of.shape)) if d not in of.dropped or d in of.batching]
        whole = t.reshape(x, tuple(of.shape[d] for d in kept))
        whole = t.transpose(whole, [kept.index(d) for d in (*of.batching, *of.kept)])
        labels = [*(("b", d) for d in of.batch), *(("b", d) for d in of.free)]
        sizes = [of.shape[d] for d in of.batching]
        column = (*sizes, *[1] * len(of.free), *(of.shape[d] for d in of.kept))
        full = (*sizes, *(of.batch_shape[d] for d in of.free), *(of.shape[d] for d in of.kept))
        return t.spread(t.reshape(whole, column), full), [*labels, *(("o", d) for d in of.kept)]
    flat = flat_indices(t, of)
    windows = range(len(of.batch_shape), len(flat.shape))
    rest = [d for d in of.rest if d not in of.dropped]
    if not of.batching and len(of.indexed) == 1:
        (d,) = of.indexed
        before = [e for e in range(d) if e not in of.dropped]
        lost = [e for e in of.rest if e in of.dropped]
        table = t.reshape(x, tuple(n for e, n in enumerate(of.shape) if e not in lost))
        out = nn.gather(table, flat, axis=len(before))
        after = [e for e in rest if e > d]
        labels = [
            *(("o", e) for e in before), *(("b", e) for e in range(len(of.batch_shape))),
            *(("o", e) for e in of.windowed), *(("o", e) for e in after),
        ]  # fmt: skip
        return out, labels
    table = merged(t, x, of)
    rest_shape = tuple(of.shape[d] for d in rest)
    flat = t.transpose(flat, [*of.batch, *of.free, *windows])
    inner = flat.shape[len(of.batch) :]
    labels = [("b", d) for d in (*of.batch, *of.free)]
    labels += [("o", d) for d in (*of.windowed, *rest)]
    if not of.batching:
        table = t.reshape(table, (table.shape[0], *rest_shape))
        return nn.gather(table, flat, axis=0), labels
    lead = flat.shape[: len(of.batch)]
    table = t.reshape(table, (*lead, table.shape[len(lead)], *rest_shape))
    ids = t.reshape(flat, (*lead, prod(inner), *[1] * len(rest)))
    ids = t.spread(ids, (*lead, prod(inner), *rest_shape))
    out = nn.take_along_axis(table, ids, axis=len(lead))
    return t.reshape(out, (*lead, *inner, *rest_shape)), labels


# ---- dynamic slices ----


def _dynamic_slice(t: OpTranslation, x: Value, *starts: Value) -> Value:
    sizes = t["slice_sizes"]
    for d, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        x = read_part(t, x, d, start, size)
    return x


def read_part(t: OpTranslation, x: Value, dim: int, start: Value, size: int) -> Value:
    """Return `size` elements of a dimension from an index on, clamped to stay within it."""
    n = x.shape[dim]
    if size == n:
        return x
    first = t.number(start)
    if first is not None:
        first = min(max(int(first), 0), n - size)
        return _known_part(t, x, dim, first, size)
    ids = t.reshape(clamped(t, start, n - size), (1,))
    if size > 1:
        ids = nn.add(ids, t.iota((size,), 0, ids.dtype))
    return nn.gather(x, ids, axis=dim)


def _known_part(t: OpTranslation, x: Value, dim: int, first: int, size: int) -> Value:
    """Return a part at a known index: of a value that was written in parts, the same part. What a
    loop reads in turn, such as stacked weights, is split once."""
    at, parts = t.facts.pieces.get(x.ssa, (None, []))
    if at == dim:
        start = 0
        for part in parts:
            if start == first and part.shape[dim] == size:
                return part
            start += part.shape[dim]
    n = x.shape[dim]
    if x.ssa in t.facts.invariant and n % size == first % size == 0:
        key = x.ssa, dim, size
        if key not in t.facts.splits:
            t.facts.splits[key] = nn.split(x, sizes=(size,) * (n // size), axis=dim)
        return t.facts.splits[key][first // size]
    return t.part(x, dim, first, size)


def _dynamic_update_slice(t: OpTranslation, x: Value, update: Value, *starts: Value) -> Value:
    return write_part(t, x, update, [(d, s) for d, s in enumerate(starts)])


def write_part(
    t: OpTranslation, x: Value, update: Value, starts: Sequence[tuple[int, Value]]
) -> Value:
    """Return x with the update at the starts in some dimensions: of several dimensions, the part
    along the first one is read, updated along the others, and written."""
    if 0 in update.shape:
        return x
    starts = [(d, s) for d, s in starts if update.shape[d] != x.shape[d]]
    if not starts:
        return update
    (dim, start), *others = starts
    size = update.shape[dim]
    if others:
        update = write_part(t, read_part(t, x, dim, start, size), update, others)
    first = t.number(start)
    if first is not None:
        return _write_known(t, x, update, dim, min(max(int(first), 0), x.shape[dim] - size))
    ids = t.reshape(clamped(t, start, x.shape[dim] - size), (1,))
    if size > 1:
        ids = nn.add(ids, t.iota((size,), 0, ids.dtype))
    return nn.index_copy(x, ids, update, axis=dim)


def _write_known(t: OpTranslation, x: Value, update: Value, dim: int, first: int) -> Value:
    """Write a part at a known index. The parts of a value are remembered: of a loop that writes
    each row in turn, one concatenation of all rows remains."""
    at, parts = t.facts.pieces.get(x.ssa, (None, []))
    if at != dim:
        parts = [x]
    size, written, start = update.shape[dim], False, 0
    new: list[Value] = []
    for part in parts:
        n = part.shape[dim]
        end = start + n
        if end <= first or start >= first + size:
            new.append(part)
        else:
            if start < first:
                new.append(t.part(part, dim, 0, first - start))
            if not written:
                new.append(update)
                written = True
            if end > first + size:
                new.append(t.part(part, dim, first + size - start, end - first - size))
        start = end
    out = nn.concat(*new, axis=dim) if len(new) > 1 else new[0]
    t.facts.pieces[out.ssa] = dim, new
    return out


TABLE: dict[str, HloEntry] = {
    "stablehlo.gather": _gather,
    "stablehlo.dynamic_slice": _dynamic_slice,
    "stablehlo.dynamic_update_slice": _dynamic_update_slice,
}
