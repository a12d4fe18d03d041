"""Kernels that slide over dimensions: convolutions, maxima, and windows as a dimension."""

from collections.abc import Sequence
from math import inf

from xdsl.ir import Operation

from shardir.backend.stablehlo.functions import lowest
from shardir.backend.stablehlo.literals import array_text, ints_text
from shardir.backend.stablehlo.place import DevicePlace, PartitionPlace
from shardir.backend.stablehlo.traced import TracedArray, generic, scalar_region
from shardir.backend.stablehlo.writer import WriteOp
from shardir.dialects import nn
from shardir.dialects.nn.convolution import groups_of
from shardir.dialects.nn.sliding import SPATIAL, Slide


def _dims(letters: str, count: int) -> str:
    return f"[{', '.join([*letters, *map(str, range(count))])}]"


def _convolution(
    x: TracedArray, w: TracedArray, shape: Sequence[int], numbers: tuple[str, str, str],
    edges: Sequence[tuple[int, int]], stride: Sequence[int] = (), of_x: Sequence[int] = (),
    of_w: Sequence[int] = (), reverse: bool = False, groups: int = 1, batch_groups: int = 1,
) -> TracedArray:  # fmt: skip
    """Write a convolution.

    Args:
        numbers: the letters of the first two dimensions of x, of w and of the result.
        of_x, of_w: their dilations.
    """
    n = len(edges)
    x_dims, w_dims, out_dims = (_dims(letters, n) for letters in numbers)
    fields = {"stride": stride, "lhs_dilate": of_x, "rhs_dilate": of_w}
    window = [f"{k} = {ints_text(v)}" for k, v in fields.items() if any(i != 1 for i in v)]
    window.insert(bool(window and "stride" in window[0]),
                  f"pad = [{', '.join(ints_text(e) for e in edges)}]")  # fmt: skip
    if reverse:
        window.append(f"reverse = [{', '.join(['true'] * n)}]")
    after = (
        f") dim_numbers = {x_dims}x{w_dims}->{out_dims}, window = {{{', '.join(window)}}} "
        f"{{batch_group_count = {batch_groups} : i64, feature_group_count = {groups} : i64}}"
    )
    return x.op("convolution", w, shape=shape, before="(", after=after)


def _conv(p: DevicePlace, op: nn.ConvOp, x: TracedArray, w: TracedArray) -> TracedArray:
    slides = op.slides()
    return _convolution(
        x, w, p.shape(op.out), ("bf", "oi", "bf"), [(s.low, s.high) for s in slides],
        [s.stride for s in slides], of_w=[s.dilation for s in slides],
        groups=groups_of(x.shape, w.shape),
    )  # fmt: skip


def _conv_transpose(
    p: DevicePlace, op: nn.ConvTransposeOp, y: TracedArray, w: TracedArray
) -> TracedArray:
    """The convolution of y, with gaps for the strides, and the reversed kernel."""
    slides, shape = op.slides(), p.shape(op.out)
    groups = groups_of(shape, w.shape)
    edges = []
    for s, n, m in zip(slides, shape[SPATIAL:], y.shape[SPATIAL:], strict=True):
        reach = s.dilation * (s.kernel - 1)
        low = reach - s.low
        edges.append((low, n + reach - low - ((m - 1) * s.stride + 1)))
    numbers = ("bf", "io", "bf")
    if groups > 1:
        per_group, kernel = w.shape[0] // groups, w.shape[1:]
        w = w.reshape((groups, per_group, *kernel))
        w = w.transpose([0, 2, 1, *range(3, w.ndim)])
        w = w.reshape((groups * kernel[0], per_group, *kernel[1:]))
        numbers = ("bf", "oi", "bf")
    return _convolution(
        y, w, shape, numbers, edges, of_x=[s.stride for s in slides],
        of_w=[s.dilation for s in slides], reverse=True, groups=groups,
    )  # fmt: skip


def _conv_weight(
    p: DevicePlace, op: nn.ConvWeightOp, x: TracedArray, y: TracedArray
) -> TracedArray:
    """The convolution of x with y as its kernel, summed over the batch."""
    slides, shape = op.slides(), p.shape(op.out)
    edges = []
    for s, k, n, m in zip(slides, shape[SPATIAL:], x.shape[SPATIAL:], y.shape[SPATIAL:],
                          strict=True):  # fmt: skip
        reach = (k - 1) * s.dilation + (m - 1) * s.stride + 1
        edges.append((s.low, reach - n - s.low))
    return _convolution(
        x, y, shape, ("fb", "io", "fb"), edges, [s.dilation for s in slides],
        of_w=[s.stride for s in slides], batch_groups=groups_of(x.shape, shape),
    )  # fmt: skip


# ---- maxima ----


def _pool_properties(slides: Sequence[Slide]) -> dict[str, str]:
    edges = [(0, 0), (0, 0), *((s.low, s.high) for s in slides)]
    return {
        "padding": f"dense<[{', '.join(map(ints_text, edges))}]> : tensor<{len(edges)}x2xi64>",
        "window_dimensions": array_text([1, 1, *(s.kernel for s in slides)]),
        "window_strides": array_text([1, 1, *(s.stride for s in slides)]),
    }


def _max_pool(p: DevicePlace, op: nn.MaxPoolOp, x: TracedArray) -> TracedArray:
    return generic(
        x, "reduce_window", [x, x.constant(-inf, x.element)], [(p.shape(op.out), x.element)],
        _pool_properties(op.slides()), scalar_region("maximum", x.element),
    )[0]  # fmt: skip


def _max_pool_grad(
    p: DevicePlace, op: nn.MaxPoolGradOp, x: TracedArray, dy: TracedArray
) -> TracedArray:
    """The padding is written: XLA takes zeros for that of a select_and_scatter."""
    t = f"tensor<{x.element}>"
    selects = (
        f"      ^bb0(%lhs: {t}, %rhs: {t}):\n"
        f"        %keeps = stablehlo.compare GE, %lhs, %rhs, FLOAT : ({t}, {t}) -> tensor<i1>\n"
        "        stablehlo.return %keeps : tensor<i1>"
    )
    region = f"{selects}\n    }}, {{\n{scalar_region('add', x.element)}"
    slides = op.slides()
    low, high = ([0, 0, *(getattr(s, side) for s in slides)] for side in ("low", "high"))
    wide = x.pad(low, high, -inf)
    operands = [wide, dy, x.constant(0, x.element)]
    properties = _pool_properties([s._replace(low=0, high=0) for s in slides])
    types = [(wide.shape, x.element)]
    (dx,) = generic(x, "select_and_scatter", operands, types, properties, region)
    return dx.part(low, [a + n for a, n in zip(low, x.shape, strict=True)])


# ---- windows as a dimension ----


def unfolded(x: TracedArray, dim: int, count: int, size: int, step: int, start: int,
             filling: float = 0) -> TracedArray:  # fmt: skip
    """`count` windows of `size` elements, `step` apart, the first from `start` on: concatenations
    of as few slices as there are windows, or elements of one."""
    length = (count - 1) * step + size
    low, high = [0] * x.ndim, [0] * x.ndim
    low[dim], high[dim] = max(0, -start), max(0, start + length - x.shape[dim])
    x = x.pad(low, high, filling)
    first = max(0, start)
    shape = (*x.shape[:dim], count, size, *x.shape[dim + 1 :])
    if 0 in shape:
        return x.constant(0, x.element, shape)
    if step == size:
        return x.along(dim, first, first + length).reshape(shape)
    if size <= count:
        columns = [
            x.along(dim, first + j, first + j + (count - 1) * step + 1, step)
            .reshape((*shape[: dim + 1], 1, *shape[dim + 2 :]))
            for j in range(size)
        ]  # fmt: skip
        return columns[0].concatenated(columns[1:], dim + 1)
    rows = [
        x.along(dim, first + k * step, first + k * step + size)
        .reshape((*shape[:dim], 1, *shape[dim + 1 :]))
        for k in range(count)
    ]  # fmt: skip
    return rows[0].concatenated(rows[1:], dim)


def folded(x: TracedArray, dim: int, length: int, step: int, start: int) -> TracedArray:
    """The sum of windows at their positions in a dimension of `length`."""
    count, size = x.shape[dim : dim + 2]
    shape = (*x.shape[:dim], length, *x.shape[dim + 2 :])
    if 0 in (*x.shape, length):
        return x.constant(0, x.element, shape)
    edges = [0] * len(shape)

    def placed(part: TracedArray, first: int, gap: int) -> TracedArray:
        low, high, between = [*edges], [*edges], [*edges]
        low[dim], between[dim] = first, gap
        high[dim] = length - first - ((part.shape[dim] - 1) * (gap + 1) + 1)
        return part.pad(low, high, 0, between)

    span = (count - 1) * step + size
    if step == size:
        return placed(x.reshape((*shape[:dim], span, *shape[dim + 1 :])), start, 0)
    total = None
    for i in range(min(size, count)):
        at, gap = (i, step - 1) if size <= count else (i * step, 0)
        part = x.along(dim + (size <= count), i, i + 1)
        kept = count if size <= count else size
        part = part.reshape((*shape[:dim], kept, *shape[dim + 1 :]))
        new = placed(part, start + at, gap)
        total = new if total is None else total + new
    assert total is not None
    return total


def _starts(p: DevicePlace, op: nn.UnfoldOp | nn.FoldOp) -> list[int]:
    """Where the first window of each device begins in its shard."""
    return [op.start(rank) for rank in p.ranks] if isinstance(p, PartitionPlace) else [
        op.offset.value.data
    ]  # fmt: skip


def _unfold(p: DevicePlace, op: nn.UnfoldOp, x: TracedArray) -> TracedArray:
    d, (count, size) = op.at, p.shape(op.out)[op.at : op.at + 2]
    step, starts = op.step.value.data, _starts(p, op)
    filling = 0 if op.lowest is None else lowest(x.element, -1)
    if len({*starts}) == 1:
        return unfolded(x, d, count, size, step, starts[0], filling)
    assert isinstance(p, PartitionPlace)
    span = p.from_starts(x, d, starts, (count - 1) * step + size, filling)
    return unfolded(span, d, count, size, step, 0)


def _fold(p: DevicePlace, op: nn.FoldOp, x: TracedArray) -> TracedArray:
    size, d, step = p.shape(op.out)[op.at], op.at, op.step.value.data
    starts = _starts(p, op)
    if len({*starts}) == 1:
        return folded(x, d, size, step, starts[0])
    assert isinstance(p, PartitionPlace)
    span = folded(x, d, (x.shape[d] - 1) * step + x.shape[d + 1], step, 0)
    return p.to_starts(span, d, starts, size)


WRITERS: dict[type[Operation], WriteOp] = {
    nn.ConvOp: _conv,
    nn.ConvTransposeOp: _conv_transpose,
    nn.ConvWeightOp: _conv_weight,
    nn.MaxPoolOp: _max_pool,
    nn.MaxPoolGradOp: _max_pool_grad,
    nn.UnfoldOp: _unfold,
    nn.FoldOp: _fold,
}
