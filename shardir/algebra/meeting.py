"""Plans whose two ends meet in one exchange.

    [{a}, {}], partial sum {b}
      -> [{a, b}, {}]            after the source: slices and reductions make shards smaller
      -> [{b, a}, {c}]           one exchange
      -> [{b}, {}]               before the target: gathers make shards larger

A search from the source alone prices an exchange before it prices what follows. Here the fastest
paths from the source without an exchange, and those to the target, are found first. Then all
exchanges between their ends are priced at once (exchange_costs.py), and the fastest sum is taken.
"""

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count
from math import inf, prod
from typing import NamedTuple

import numpy as np

from shardir.algebra.arrays import Indices
from shardir.algebra.collectives import AxisState, CollectiveStep
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.exchange_costs import ManyExchanges, SplitArrays
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes
from shardir.algebra.moves import RedistributionProblem
from shardir.algebra.plan_costs import PlanCosts

REPLICATED, SHARDED, PARTIAL, _ = AxisState

MAX_STEPS = 1500
"""The maximum number of steps that are priced from either end."""

MAX_EXCHANGES = 200_000
"""The maximum number of exchanges that are priced at once, which limits the memory."""


class Path(NamedTuple):
    """The time of some steps, and the steps."""

    seconds: float
    steps: tuple[CollectiveStep, ...]


class Neighbour(NamedTuple):
    """A layout that one step leads to, or from: the step is always in the plan's direction."""

    layout: Layout
    step: CollectiveStep
    before: Layout


def meeting(problem: RedistributionProblem, itemsize: int, best: float, costs: PlanCosts) -> Path:
    """Return the fastest plan with an exchange between named collectives and local steps, if it
    takes less than `best` seconds; else no steps, and `best`.

    Args:
        problem: of layouts whose sub-axes do not cross.
        itemsize: the bytes of an element.
        costs: of the steps of the problem.
    """
    p, found = problem, Path(best, ())

    def left(layout: Layout) -> float:
        return costs.bound(layout, p.target)

    def so_far(layout: Layout) -> float:
        return costs.bound(p.source, layout)

    after_source = _reached(p, costs, best, p.source, _following, left)
    before_target = _reached(p, costs, best, p.target, _preceding, so_far)
    for ends in dict.fromkeys((l.partial, l.reduction) for l in before_target):
        heads, tails = (
            sorted((x for x in some.items() if _is_end(p, x[0], ends)), key=lambda x: x[1].seconds)
            for some in (after_source, before_target)
        )
        if heads and tails:
            found = min(found, _joined(p, itemsize, heads, tails, found), key=lambda x: x.seconds)
    return found


def _is_end(problem: RedistributionProblem, layout: Layout, ends: tuple[Axes, str]) -> bool:
    """Whether a layout is partial as an end, and splits the tensor evenly."""
    same = (layout.partial, layout.reduction) == ends
    return same and layout.even(problem.mesh, problem.shape)


PathEnds = list[tuple[Layout, Path]]


def _joined(
    problem: RedistributionProblem, itemsize: int, heads: PathEnds, tails: PathEnds, found: Path
) -> Path:
    """Return the fastest plan of a head, an exchange and a tail, if it is faster than `found`."""
    mesh, size = problem.mesh, prod(problem.shape) * itemsize
    (old, source), (new, target) = _splits(heads), _splits(tails)
    sums = np.array([h.seconds for _, h in heads])[:, None] + [t.seconds for _, t in tails]
    first, last = np.nonzero(sums < found.seconds)
    exchanges = ManyExchanges(mesh, SplitArrays(mesh, old), SplitArrays(mesh, new))
    for start in range(0, len(first), MAX_EXCHANGES):
        i, j = (x[start : start + MAX_EXCHANGES] for x in (first, last))
        latency, rate = exchanges.lowest(source[i], target[j])
        some = latency + rate * size + sums[i, j] < found.seconds
        i, j = i[some], j[some]
        latency, rate = exchanges.costs(source[i], target[j])
        seconds = np.where(np.isnan(rate), inf, latency + rate * size) + sums[i, j]
        k = int(seconds.argmin()) if len(seconds) else -1
        if len(seconds) and seconds[k] < found.seconds:
            (here, head), (there, tail) = heads[i[k]], tails[j[k]]
            step = CollectiveStep("exchange", exchange_axes(here, there), there)
            between = () if here == there else (step,)
            found = Path(float(seconds[k]), (*head.steps, *between, *tail.steps))
    return found


def _splits(ends: PathEnds) -> tuple[list[Axes], Indices]:
    """Return the splits of a dimension that occur, and their numbers: [end, dimension]."""
    numbers: dict[Axes, int] = {}
    found = [[numbers.setdefault(axes, len(numbers)) for axes in l.dims] for l, _ in ends]
    return list(numbers), np.array(found)


def _reached(
    problem: RedistributionProblem, costs: PlanCosts, best: float, start: Layout,
    neighbours: Callable[[RedistributionProblem, Layout], Iterator[Neighbour]],
    rest: Callable[[Layout], float],
) -> dict[Layout, Path]:  # fmt: skip
    """Return the fastest paths from `start`, or to it, by steps to `neighbours`, of those that with
    the bound of what is left take less than `best` seconds: by A*, at most MAX_STEPS of it."""
    p, serial, priced = problem, count(), 0
    found, done = {start: Path(0.0, ())}, set[Layout]()
    todo = [(rest(start), next(serial), start)]
    while todo and priced < MAX_STEPS:
        *_, layout = heappop(todo)
        if layout in done:
            continue
        done.add(layout)
        so_far = found[layout]
        for other, step, before in neighbours(p, layout):
            if other in done or so_far.seconds + (left := rest(other)) >= best:
                continue
            priced += 1
            seconds = so_far.seconds + costs.seconds(before, step)
            if seconds + left < best and (other not in found or seconds < found[other].seconds):
                steps = (*so_far.steps, step) if before is layout else (step, *so_far.steps)
                found[other] = Path(seconds, steps)
                heappush(todo, (seconds + left, next(serial), other))
    return found


def _following(problem: RedistributionProblem, layout: Layout) -> Iterator[Neighbour]:
    """Yield the layouts to which a local step or a reduction leads."""
    for step in (*problem.local_moves(layout), *problem.reductions(layout)):
        yield Neighbour(step.layout, step, layout)


def _preceding(problem: RedistributionProblem, layout: Layout) -> Iterator[Neighbour]:
    """Yield the layouts from which a local step or an all-gather leads to this one."""
    p = problem

    def step(
        before: Layout, start: AxisState, end: AxisState, axes: Axes, dim: int = -1
    ) -> Neighbour:
        reduction = layout.reduction if end is PARTIAL else ""
        return Neighbour(before, p.move(start, end, before, axes, dim, reduction=reduction), before)

    for dim, have in enumerate(layout.dims):
        for axes in p.runs:
            if p.free(layout, axes) and p.nests(dim, have, have + axes):
                yield step(layout.with_dim(dim, have + axes), SHARDED, REPLICATED, axes, dim)
        for n in range(len(have)):
            if p.nests(dim, have[:n], have):
                yield step(layout.with_dim(dim, have[:n]), REPLICATED, SHARDED, have[n:], dim)
    if layout.reduction == "sum":
        for a in layout.partial:
            rest = tuple([b for b in layout.partial if b != a])
            before = layout.with_partial(rest, layout.reduction)
            yield step(before, REPLICATED, PARTIAL, (a,))
            for dim, have in enumerate(before.dims):
                if p.nests(dim, have, (*have, a)):
                    yield step(before.with_dim(dim, (*have, a)), SHARDED, PARTIAL, (a,), dim)
