"""Reductions of windows: pools, and the gradient of a maximum pool."""

from collections.abc import Sequence

from shardir.build import Value, nn
from shardir.frontends.stablehlo.form import expression
from shardir.frontends.stablehlo.ops.reduction import COMBINE, kind_of, neutral
from shardir.frontends.stablehlo.ops.shape import pad
from shardir.frontends.stablehlo.translation import HloEntry, OpTranslation
from shardir.frontends.stablehlo.types import is_float, wrap


def _reduce_window(t: OpTranslation, x: Value, first: Value) -> Value:
    kind = kind_of(t, t.op.regions[0])
    rank = len(x.shape)
    sizes = t["window_dimensions"]
    strides = t["window_strides"] or (1,) * rank
    dilations = t["window_dilations"] or (1,) * rank
    edges = (
        [[int(a), int(b)] for a, b in t["padding"]] if t["padding"] is not None else [[0, 0]] * rank
    )
    base = [n - 1 for n in t["base_dilations"] or (1,) * rank]
    number = t.number(first)
    filling = neutral(kind, t.element)
    if any(base):
        x = pad(t, x, [0] * rank, [0] * rank, base, filling)
    pool = _max_pool(t, kind, x, sizes, strides, edges, dilations)
    out = pool if pool is not None else _of_windows(
        t, x, kind, sizes, strides, edges, dilations, filling
    )  # fmt: skip
    if number == filling:
        return out
    return COMBINE[kind](out, first)


def _max_pool(
    t: OpTranslation, kind: str, x: Value, sizes: Sequence[int], strides: Sequence[int],
    edges: Sequence[Sequence[int]], dilations: Sequence[int],
) -> Value | None:  # fmt: skip
    """Return a maximum pool over all but two dimensions; None for other windows."""
    if kind != "max" or not is_float(t.element) or any(n != 1 for n in dilations):
        return None
    pooled = _pooled(sizes, strides, edges)
    if not pooled:
        return None
    kept = [d for d in range(len(sizes)) if d not in pooled]
    if len(kept) != 2 or any(max(edges[d]) > sizes[d] // 2 or min(edges[d]) < 0 for d in pooled):
        return None
    order = [*kept, *pooled]
    out = nn.max_pool(t.transpose(x, order), **_pool_options(pooled, sizes, strides, edges))
    return t.transpose(out, [order.index(d) for d in range(len(order))])


def _pooled(
    sizes: Sequence[int], strides: Sequence[int], edges: Sequence[Sequence[int]]
) -> list[int]:
    return [
        d for d in range(len(sizes)) if sizes[d] != 1 or strides[d] != 1 or any(edges[d])
    ]  # fmt: skip


def _pool_options(
    pooled: Sequence[int], sizes: Sequence[int], strides: Sequence[int],
    edges: Sequence[Sequence[int]],
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    return {
        "window": tuple(sizes[d] for d in pooled),
        "stride": tuple(strides[d] for d in pooled),
        "padding": tuple(n for d in pooled for n in edges[d]),
    }


def _of_windows(
    t: OpTranslation, x: Value, kind: str, sizes: Sequence[int], strides: Sequence[int],
    edges: Sequence[Sequence[int]], dilations: Sequence[int], filling: float,
) -> Value:  # fmt: skip
    """Reduce windows of a dimension after another."""
    for d in _pooled(sizes, strides, edges):
        span = (sizes[d] - 1) * dilations[d] + 1
        low, high = edges[d]
        n = x.shape[d] + low + high
        count = max(0, (n - span) // strides[d] + 1)
        offset = -low
        if filling != 0:  # windows of nn.unfold have zeros outside of a dimension
            before, after = [0] * len(x.shape), [0] * len(x.shape)
            before[d], after[d] = low, high
            x, offset = pad(t, x, before, after, [0] * len(x.shape), filling), 0
        shape = (*x.shape[:d], count, span, *x.shape[d + 1 :])
        windows = nn.unfold(x, dim=d, step=strides[d], offset=offset, shape=shape)
        if dilations[d] > 1:
            starts, limits, steps = [0] * len(shape), list(shape), [1] * len(shape)
            steps[d + 1] = dilations[d]
            windows = t.slice(windows, starts, limits, steps)
        x = nn.reduce(windows, kind=kind, dims=(d + 1,))
        x = wrap(x, t.element) if kind in ("sum", "prod") else x
    return x


def _select_and_scatter(t: OpTranslation, x: Value, source: Value, first: Value) -> Value:
    """The gradient of a maximum pool: each cotangent goes to the first maximum of its window."""
    select, scatter = map(expression, t.op.regions)
    if (select, scatter) not in (("GE(0, 1)", "add(0, 1)"), ("GE(0, 1)", "add(1, 0)")):
        t.refuse(f"a selection by {select} that scatters by {scatter}")
    rank = len(x.shape)
    sizes = t["window_dimensions"]
    strides = t["window_strides"] or (1,) * rank
    edges = (
        [[int(a), int(b)] for a, b in t["padding"]] if t["padding"] is not None else [[0, 0]] * rank
    )
    pooled = _pooled(sizes, strides, edges)
    kept = [d for d in range(rank) if d not in pooled]
    if len(kept) != 2 or not pooled or t.number(first) != 0:
        t.refuse("a selection in windows over other than all but two dimensions")
    if any(max(edges[d]) > sizes[d] // 2 or min(edges[d]) < 0 for d in pooled):
        t.refuse("a selection in windows with more padding than half of them")
    order = [*kept, *pooled]
    out = nn.max_pool_grad(
        t.transpose(x, order), t.transpose(source, order),
        **_pool_options(pooled, sizes, strides, edges),
    )  # fmt: skip
    return t.transpose(out, [order.index(d) for d in range(rank)])


TABLE: dict[str, HloEntry] = {
    "stablehlo.reduce_window": _reduce_window,
    "stablehlo.select_and_scatter": _select_and_scatter,
}
