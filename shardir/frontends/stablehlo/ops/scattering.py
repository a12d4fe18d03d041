"""Writes by index: scatters that combine by a reduction or another computation, and those that
replace."""

from math import prod

from shardir.build import Value, nn
from shardir.frontends.stablehlo.folding import known
from shardir.frontends.stablehlo.form import HloBlock, expression
from shardir.frontends.stablehlo.ops.indexing import (
    IndexedForm,
    clamped,
    columns_of,
    flat_indices,
    in_order,
)
from shardir.frontends.stablehlo.ops.reduction import COMBINE, known_kind, neutral
from shardir.frontends.stablehlo.regions import inlined, of_tensors
from shardir.frontends.stablehlo.translation import HloEntry, OpTranslation
from shardir.frontends.stablehlo.types import WIDTHS, in_order_of, wrap

SET, SUBTRACT = "1", "subtract(0, 1)"
"""The bodies of scatters that replace, and that subtract."""

MAX_WRITES = 16
"""Bounds the writes of an element to which a function is applied at each."""


def _scatter(t: OpTranslation, *operands: Value) -> Value:
    if len(operands) != 3:
        t.refuse("a scatter of several values at once")
    x, ids, updates = operands
    body = inlined(t.op.regions[0], t.callee)
    text = expression(body)
    if text == SUBTRACT:
        return _combine(t, "sum", x, ids, nn.neg(updates))
    kind = "set" if text == SET else known_kind(body)
    if kind is None:
        return _apply(t, body, x, ids, updates)
    if kind in ("any", "all"):  # of i1, as numbers
        numbers = (x.to("i32"), ids, updates.to("i32"))
        out = _combine(t, {"any": "max", "all": "min"}[kind], *numbers)
        return nn.compare(out, 0, how="ne")
    if kind in ("max", "min"):  # ui64 by its order
        x, updates = (in_order_of(v, t.element) for v in (x, updates))
        return in_order_of(_combine(t, kind, x, ids, updates), t.element)
    return _combine(t, kind, x, ids, updates)


def _apply(t: OpTranslation, body: HloBlock, x: Value, ids: Value, updates: Value) -> Value:
    """Apply another computation to the elements that are written: one of the element alone, as
    `x.at[i].apply(f)` has it, at each write of the element; one of the element and the update where
    an element is written once."""
    if any(op.regions for op in body.ops):
        t.refuse(f"a scatter by {expression(body)[:80]}, which has regions")
    counts = t.filled(0, x.shape, "i32"), ids, t.filled(1, updates.shape, "i32")
    writes = _combine(t, "sum", *counts)
    windows = prod(updates.shape[d] for d in range(len(updates.shape))
                   if d not in t["scatter_dimension_numbers"]["update_window_dims"])  # fmt: skip
    numbers = known(writes)
    most = 1 if t["unique_indices"] else windows if numbers is None else int(numbers.max())
    reads_update = any(body.arguments[1] in op.operands for op in body.ops)
    if most > (1 if reads_update else MAX_WRITES) or WIDTHS.get(t.element, 8) < 8:
        t.refuse(
            f"a scatter by {expression(body)[:80]} of up to {most} writes of an element; give "
            "unique_indices=True where the indices differ, or read, compute and set"
        )
    new = _combine(t, "set", t.filled(0, x.shape), ids, updates) if reads_update else x
    computation = of_tensors(body, x.shape)
    for k in range(most):
        (out,) = t.run(computation, [x, new if reads_update else x])
        x = nn.select(nn.compare(writes, k, how="gt"), out, x)
    return x


def _combine(t: OpTranslation, kind: str, x: Value, ids: Value, updates: Value) -> Value:
    """Combine the updates with x: by a reduction, or `set`."""
    numbers = t["scatter_dimension_numbers"]
    at = numbers["index_vector_dim"]
    starts = dict(
        zip(numbers["scattered_dims_to_operand_dims"], columns_of(t, ids, at), strict=True)
    )
    batching = tuple(numbers["input_batching_dims"])
    batch = tuple(d - (d > at) for d in numbers["scatter_indices_batching_dims"])
    dropped = frozenset((*numbers["inserted_window_dims"], *batching))
    window_dims = iter(numbers["update_window_dims"])
    sizes = tuple(
        1 if d in dropped else updates.shape[next(window_dims)] for d in range(len(x.shape))
    )
    batch_shape = tuple(n for d, n in enumerate(ids.shape) if d != at)
    for d, n in enumerate(x.shape):
        if d not in starts and d not in batching and sizes[d] < n:
            starts[d] = t.filled(0, batch_shape, ids.dtype)
    is_one_each = len(batch) == len(batch_shape) > 0 and all(sizes[d] == 1 for d in starts)
    if kind == "set" and is_one_each:
        return _set_one_each(t, x, dict(zip(batching, batch, strict=True)), starts, updates)
    inside = _inside(t, x, starts, sizes)
    columns = {
        d: clamped(t, c, x.shape[d] - sizes[d]) for d, c in starts.items()
        if sizes[d] < x.shape[d]
    }  # fmt: skip
    if kind == "set":
        for d, e in zip(batching, batch, strict=True):
            columns[d] = t.spread(
                t.iota(tuple(x.shape[d] if k == e else 1 for k in range(len(batch_shape))), e,
                       ids.dtype), batch_shape
            )  # fmt: skip
        batching = batch = ()
    of = IndexedForm(x.shape, batching, sizes, columns, batch, dropped, batch_shape)
    windows = numbers["update_window_dims"]
    scattered = [d for d in range(len(updates.shape)) if d not in windows]
    place = {d: windows[i] for i, d in enumerate(of.kept)}
    order = [*(scattered[d] for d in (*of.batch, *of.free)), *(place[d] for d in of.windowed),
             *(place[d] for d in of.rest if d in place)]  # fmt: skip
    updates = t.transpose(updates, order)
    if not columns:
        return _whole(t, x, updates, inside, len(batch_shape), kind, of)
    if kind != "set":
        return _reduced(t, kind, x, of, updates, inside)
    return _set(t, x, of, updates, inside)


def _whole(
    t: OpTranslation, x: Value, updates: Value, inside: Value | None, rank: int, kind: str,
    of: IndexedForm,
) -> Value:  # fmt: skip
    """A scatter whose windows are the whole operand."""
    if of.batching or inside is not None:
        t.refuse("a scatter of whole operands with a batch")
    if kind != "set":
        dims = tuple(range(rank))
        if rank and 0 in updates.shape[:rank]:
            return x
        total = nn.reduce(updates, kind=kind, dims=dims) if rank else updates
        return wrap(COMBINE[kind](x, t.reshape(total, x.shape)), t.element)
    return t.reshape(t.part(updates, 0, updates.shape[0] - 1, 1) if rank else updates, x.shape)


def _inside(
    t: OpTranslation, x: Value, starts: dict[int, Value], sizes: tuple[int, ...]
) -> Value | None:
    """Return which windows are within the operand; others are not written. None: all are."""
    inside: Value | None = None
    for d, column in starts.items():
        last, bounds = x.shape[d] - sizes[d], t.range_of(column)
        if bounds is not None and bounds[0] >= 0 and bounds[1] <= last:
            continue
        both = nn.and_(nn.compare(column, 0, how="ge"), nn.compare(column, last, how="le"))
        inside = both if inside is None else nn.and_(inside, both)
    return inside


def _of_windows(t: OpTranslation, of: IndexedForm, inside: Value, like: Value) -> Value:
    """Return the mask of windows for each element of the updates in the common form."""
    perm = [*of.batch, *of.free]
    mask = t.transpose(inside, perm)
    return t.reshape(mask, (*mask.shape, *[1] * (len(like.shape) - len(perm))))


def _reduced(
    t: OpTranslation, kind: str, x: Value, of: IndexedForm, updates: Value, inside: Value | None
) -> Value:  # fmt: skip
    """Reduce the updates of each element, and combine them with x. Windows outside of the operand
    have the reduction's neutral number."""
    if inside is not None:
        mask = _of_windows(t, of, inside, updates)
        first = neutral(kind, x.dtype)
        updates = nn.select(mask, updates, t.constant(first, updates.dtype))
    flat = flat_indices(t, of)
    lead, rows = len(of.batch), prod(of.shape[d] for d in of.indexed)
    rest = tuple(of.shape[d] for d in of.rest)
    flat = t.transpose(flat, [*of.batch, *of.free, *range(len(of.batch_shape), len(flat.shape))])
    batch, inner = flat.shape[:lead], flat.shape[lead:]
    if kind == "sum" and not lead:
        src = t.reshape(updates, (*inner, *rest))
        out = nn.gather_grad(flat, src, axis=0, shape=(rows, *rest), dtype=src.dtype)
    else:
        src = t.reshape(updates, (*batch, prod(inner), *rest))
        ids = t.spread(t.reshape(flat, (*batch, prod(inner), *[1] * len(rest))), src.shape)
        options = {"axis": lead, "shape": (*batch, rows, *rest), "dtype": src.dtype}
        if kind == "sum":
            out = nn.scatter_add(ids, src, **options)
        else:
            out = nn.scatter_reduce(ids, src, kind=kind, **options)
    out = _back(t, out, of)
    return out if t.number(x) == neutral(kind, x.dtype) else wrap(COMBINE[kind](x, out), t.element)


def _back(t: OpTranslation, out: Value, of: IndexedForm) -> Value:
    """Return a value in the common form in the operand's."""
    order = in_order(of)
    out = t.reshape(out, tuple(of.shape[d] for d in order))
    return t.transpose(out, [order.index(d) for d in range(len(order))])


def _set(
    t: OpTranslation, x: Value, of: IndexedForm, updates: Value, inside: Value | None
) -> Value:
    """Replace rows. Those outside of the operand go to a further row, which is then cut off."""
    flat = flat_indices(t, of)
    flat = t.transpose(flat, [*of.free, *range(len(of.batch_shape), len(flat.shape))])
    rows = prod(of.shape[d] for d in of.indexed)
    rest = tuple(of.shape[d] for d in of.rest)
    table = t.reshape(t.transpose(x, in_order(of)), (rows, *rest))
    count = prod(flat.shape)
    if inside is not None:
        mask = _of_windows(t, of, inside, flat)
        flat = nn.select(mask, flat, t.constant(rows, flat.dtype))
        table = nn.pad(table, low=(0,) * (1 + len(rest)), high=(1, *[0] * len(rest)))
    ids, src = t.reshape(flat, (count,)), t.reshape(updates, (count, *rest))
    out = nn.index_copy(table, ids, src, axis=0)
    if inside is not None:
        out = t.part(out, 0, 0, rows)
    return _back(t, out, of)


def _set_one_each(
    t: OpTranslation, x: Value, batch_of: dict[int, int], starts: dict[int, Value], updates: Value
) -> Value:
    """Replace one element, or one row, for each of a batch: where positions equal the index. So a
    batch may be split, and an index outside of the operand equals no position.

    Args:
        batch_of: the batch dimension of the indices for each of the operand's.
        starts: the indices in each indexed dimension of the operand.
    """
    numbers = t["scatter_dimension_numbers"]
    windows = numbers["update_window_dims"]
    scattered = [d for d in range(len(updates.shape)) if d not in windows]
    inserted = numbers["inserted_window_dims"]
    of_window = dict(
        zip((d for d in range(len(x.shape)) if d not in (*inserted, *batch_of)), windows,
            strict=True)
    )  # fmt: skip
    perm = [scattered[batch_of[d]] if d in batch_of else of_window[d]
            for d in range(len(x.shape)) if d not in inserted]  # fmt: skip
    new = t.reshape(
        t.transpose(updates, perm), tuple(1 if d in starts else n for d, n in enumerate(x.shape))
    )
    to_operand = [batch_of[d] for d in sorted(batch_of)]
    mask: Value | None = None
    for d, column in starts.items():
        shape = tuple(n if d in batch_of else 1 for d, n in enumerate(x.shape))
        position = t.reshape(
            t.iota((x.shape[d],), 0, column.dtype),
            tuple(n if k == d else 1 for k, n in enumerate(x.shape)),
        )
        is_here = nn.compare(position, t.reshape(t.transpose(column, to_operand), shape), how="eq")
        mask = is_here if mask is None else nn.and_(mask, is_here)
    return new if mask is None else t.spread(nn.select(mask, new, x), x.shape)


TABLE: dict[str, HloEntry] = {"stablehlo.scatter": _scatter}
