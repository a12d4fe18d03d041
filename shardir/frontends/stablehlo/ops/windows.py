"""Reductions of windows: pools, and the gradient of a maximum pool."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardir.build import Value, nn
from shardir.frontends.stablehlo.form import expression
from shardir.frontends.stablehlo.ops.reduction import COMBINE, known_kind, neutral, reduced
from shardir.frontends.stablehlo.ops.shape import pad, pad_by
from shardir.frontends.stablehlo.regions import inlined
from shardir.frontends.stablehlo.translation import HloEntry, OpTranslation
from shardir.frontends.stablehlo.types import in_order_of, is_float, wrap


@dataclass
class WindowSpec:
    """The windows of an op, by dimension: their sizes, strides and dilations, and the padding of
    the operand, at the ends and between its elements."""

    sizes: Sequence[int]
    strides: Sequence[int]
    dilations: Sequence[int]
    edges: Sequence[Sequence[int]]
    between: Sequence[int]

    @classmethod
    def of(cls, t: OpTranslation) -> "WindowSpec":
        sizes, edges = t["window_dimensions"], t["padding"]
        ones = (1,) * len(sizes)
        return cls(
            sizes,
            t["window_strides"] or ones,
            t["window_dilations"] or ones,
            [[0, 0] for _ in sizes] if edges is None else [[int(a), int(b)] for a, b in edges],
            [n - 1 for n in t["base_dilations"] or ones],
        )

    @property
    def low(self) -> list[int]:
        return [e[0] for e in self.edges]

    @property
    def high(self) -> list[int]:
        return [e[1] for e in self.edges]

    @property
    def pads(self) -> bool:
        return any(self.between) or any(map(any, self.edges))


def _reduce_window(t: OpTranslation, *operands: Value) -> Sequence[Value]:
    count = len(operands) // 2
    xs, firsts = operands[:count], operands[count:]
    body, spec = inlined(t.op.regions[0], t.callee), WindowSpec.of(t)
    kind = known_kind(body) if count == 1 else None
    if kind is not None:
        filling = neutral(kind, t.element)
        is_ordered = t.element == "ui64" and kind in ("max", "min")
        (x,), (first,) = xs, firsts
        if is_ordered:
            x, first = in_order_of(x, "ui64"), in_order_of(first, "ui64")
        if t.number(first) == filling or not spec.pads:
            out = _of_known_kind(t, kind, x, spec, filling)
            if t.number(first) != filling:
                out = wrap(COMBINE[kind](out, first), t.element)
            return [in_order_of(out, "ui64") if is_ordered else out]
    windows = [
        _windows(t, pad_by(t, x, spec.low, spec.high, spec.between, f), spec)
        for x, f in zip(xs, firsts, strict=True)
    ]  # fmt: skip
    last = len(windows[0].shape) - 1
    return reduced(t, body, windows, firsts, (last,))


def _windows(t: OpTranslation, x: Value, spec: WindowSpec) -> Value:
    """Return the windows of a padded value: their positions, and all elements of each as the last
    dimension."""
    dims = [d for d in range(len(x.shape)) if spec.sizes[d] != 1 or spec.strides[d] != 1]
    for d in reversed(dims):
        x = _unfolded(t, x, d, spec, 0, x.shape[d])
    inner = [d + 1 + i for i, d in enumerate(dims)]
    outer = [e for e in range(len(x.shape)) if e not in inner]
    x = t.transpose(x, [*outer, *inner])
    return t.reshape(x, (*x.shape[: len(outer)], prod(x.shape[len(outer) :])))


def _unfolded(
    t: OpTranslation, x: Value, d: int, spec: WindowSpec, offset: int, size: int
) -> Value:  # fmt: skip
    """Return the windows of a dimension, whose size with its padding is given, as a further
    dimension behind it."""
    span = (spec.sizes[d] - 1) * spec.dilations[d] + 1
    count = max(0, (size - span) // spec.strides[d] + 1)
    shape = (*x.shape[:d], count, span, *x.shape[d + 1 :])
    is_bool = x.dtype == "i1"
    x = x.to("i32") if is_bool else x
    windows = nn.unfold(x, dim=d, step=spec.strides[d], offset=offset, shape=shape)
    if spec.dilations[d] > 1:
        starts, limits, steps = [0] * len(shape), list(shape), [1] * len(shape)
        steps[d + 1] = spec.dilations[d]
        windows = t.slice(windows, starts, limits, steps)
    return nn.compare(windows, 0, how="ne") if is_bool else windows


def _of_known_kind(
    t: OpTranslation, kind: str, x: Value, spec: WindowSpec, filling: float
) -> Value:  # fmt: skip
    if any(spec.between):
        x = pad(t, x, [0] * len(x.shape), [0] * len(x.shape), spec.between, filling)
    pool = _max_pool(t, kind, x, spec.sizes, spec.strides, spec.edges, spec.dilations)
    return pool if pool is not None else _of_dimensions(t, x, kind, spec, filling)


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


def _of_dimensions(
    t: OpTranslation, x: Value, kind: str, spec: WindowSpec, filling: float
) -> Value:  # fmt: skip
    """Reduce windows of a dimension after another."""
    for d in _pooled(spec.sizes, spec.strides, spec.edges):
        low, high = spec.edges[d]
        size, offset = x.shape[d] + low + high, -low
        if filling != 0:  # windows of nn.unfold have zeros outside of a dimension
            before, after = [0] * len(x.shape), [0] * len(x.shape)
            before[d], after[d] = low, high
            x, offset = pad(t, x, before, after, [0] * len(x.shape), filling), 0
        windows = _unfolded(t, x, d, spec, offset, size)
        x = nn.reduce(windows, kind=kind, dims=(d + 1,))
        x = wrap(x, t.element) if kind in ("sum", "prod") else x
    return x


SELECTED = {"GE(0, 1)": "max", "LE(0, 1)": "min"}
"""Which element of a window is selected: the first one that is the greatest, or the least."""


def _select_and_scatter(t: OpTranslation, x: Value, source: Value, first: Value) -> Value:
    """The gradient of a maximum pool: each cotangent goes to the first maximum of its window."""
    text, scatter = expression(t.op.regions[0]), inlined(t.op.regions[1], t.callee)
    selected, kind = SELECTED.get(text), known_kind(scatter)
    if selected is None or kind not in ("sum", "any"):
        t.refuse(f"a selection by {text} that scatters by {expression(scatter)}")
    spec = WindowSpec.of(t)
    out = _max_pool_grad(t, x, source, spec) if selected == "max" else None
    if out is None:
        out = _scattered(t, selected, x, source, spec)
    if t.number(first) == 0:
        return out
    return wrap(COMBINE[kind](out, t.spread(first)), t.element)


def _max_pool_grad(
    t: OpTranslation, x: Value, source: Value, spec: WindowSpec
) -> Value | None:  # fmt: skip
    """Return the gradient of a pool of floats over all but two dimensions; None for others."""
    pooled = _pooled(spec.sizes, spec.strides, spec.edges)
    kept = [d for d in range(len(x.shape)) if d not in pooled]
    if len(kept) != 2 or not pooled or not is_float(t.element):
        return None
    edges = spec.edges
    if any(max(edges[d]) > spec.sizes[d] // 2 or min(edges[d]) < 0 for d in pooled):
        return None
    order = [*kept, *pooled]
    out = nn.max_pool_grad(
        t.transpose(x, order), t.transpose(source, order),
        **_pool_options(pooled, spec.sizes, spec.strides, edges),
    )  # fmt: skip
    return t.transpose(out, [order.index(d) for d in range(len(order))])


def _scattered(
    t: OpTranslation, selected: str, x: Value, source: Value, spec: WindowSpec
) -> Value:  # fmt: skip
    """Add the source of each window to its selected element, which a one-hot vector marks."""
    is_bool = x.dtype == "i1"
    if is_bool:
        x, source = x.to("i32"), source.to("i32")
    x = in_order_of(x, t.element)
    zeros = [0] * len(x.shape)
    filling = neutral(selected, "i32" if is_bool else t.element)
    padded = pad(t, x, spec.low, spec.high, zeros, filling)
    windows = _windows(t, padded, spec)
    last = len(windows.shape) - 1
    index = (nn.argmax if selected == "max" else nn.argmin)(windows, axis=last)
    hot = nn.one_hot(index, shape=windows.shape, dtype=source.dtype)
    out = nn.mul(hot, t.reshape(source, (*source.shape, 1)))
    dims = [d for d in range(len(x.shape)) if spec.sizes[d] != 1 or spec.strides[d] != 1]
    out = t.reshape(out, (*source.shape, *(spec.sizes[d] for d in dims)))
    inner = iter(range(len(x.shape), len(out.shape)))
    out = t.transpose(out, [e for d in range(len(x.shape)) for e in (
        [d, next(inner)] if d in dims else [d]
    )])  # fmt: skip
    for d in dims:
        shape = (*out.shape[:d], padded.shape[d], *out.shape[d + 2 :])
        out = nn.fold(out, dim=d, step=spec.strides[d], offset=0, shape=shape)
    starts = [max(0, n) for n in spec.low]
    limits = [n + s for n, s in zip(x.shape, starts, strict=True)]
    out = wrap(t.slice(out, starts, limits), t.element)
    return nn.compare(out, 0, how="ne") if is_bool else out


TABLE: dict[str, HloEntry] = {
    "stablehlo.reduce_window": _reduce_window,
    "stablehlo.select_and_scatter": _select_and_scatter,
}
