"""Bidirectional search: plans of a forward path, one exchange, and a backward path.

    [{a}, {}], partial sum {b}
      -> [{a, b}, {}]            forward from the source: slices and reductions shrink shards
      -> [{b, a}, {c}]           one exchange
      -> [{b}, {}]               backward from the target: gathers grow shards

A search from the source alone must price an exchange before the steps after it. Here both frontiers
are searched without exchanges first. Then all exchanges between them are priced at once
(exchange_costs.py), and the fastest sum is the plan.
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
from shardir.algebra.moves import PlanCosts, RedistributionProblem

REPLICATED, SHARDED, PARTIAL, _ = AxisState

MAX_STEPS = 1500
"""Bounds the steps that are priced from either end, as MAX_PRICED of planner.py bounds A*."""

MAX_EXCHANGES = 200_000
"""Bounds the exchanges that are priced at once, and so the memory of the arrays of their costs."""


class Path(NamedTuple):
    """Consecutive steps, and their seconds."""

    seconds: float
    steps: tuple[CollectiveStep, ...]


class Neighbour(NamedTuple):
    """The layout at the other end of a step. The step goes from `before` in the direction of the
    plan."""

    layout: Layout
    step: CollectiveStep
    before: Layout


def search_both_ends(
    problem: RedistributionProblem, itemsize: int, best: float, costs: PlanCosts
) -> Path:
    """Return the fastest plan of a forward path, an exchange and a backward path; no steps, and
    `best`, unless it takes less than `best` seconds.

    Args:
        problem: of layouts whose sub-axes do not cross.
        itemsize: the bytes of an element.
        costs: of the steps of the problem.
    """
    p, plan = problem, Path(best, ())

    def remaining(layout: Layout) -> float:
        return costs.bound(layout, p.target)

    def elapsed(layout: Layout) -> float:
        return costs.bound(p.source, layout)

    forward = _search(p, costs, best, p.source, _successors, remaining)
    backward = _search(p, costs, best, p.target, _predecessors, elapsed)
    for partial in dict.fromkeys((l.partial, l.reduction) for l in backward):
        heads, tails = (
            sorted(
                (x for x in paths.items() if _can_exchange(p, x[0], partial)),
                key=lambda x: x[1].seconds,
            )
            for paths in (forward, backward)
        )
        if heads and tails:
            plan = _join(p, itemsize, heads, tails, plan)
    return plan


def _can_exchange(
    problem: RedistributionProblem, layout: Layout, partial: tuple[Axes, str]
) -> bool:
    """Whether a layout has these partial axes and this reduction, and splits the tensor evenly."""
    is_equal = (layout.partial, layout.reduction) == partial
    return is_equal and layout.even(problem.mesh, problem.shape)


PathEnds = list[tuple[Layout, Path]]


def _join(
    problem: RedistributionProblem, itemsize: int, heads: PathEnds, tails: PathEnds, best: Path
) -> Path:
    """Return the fastest plan of a head, an exchange and a tail; `best` if none is faster."""
    mesh, size = problem.mesh, prod(problem.shape) * itemsize
    (old, source), (new, target) = _split_numbers(heads), _split_numbers(tails)
    sums = np.array([h.seconds for _, h in heads])[:, None] + [t.seconds for _, t in tails]
    first, last = np.nonzero(sums < best.seconds)
    exchanges = ManyExchanges(mesh, SplitArrays(mesh, old), SplitArrays(mesh, new))
    for start in range(0, len(first), MAX_EXCHANGES):
        i, j = (x[start : start + MAX_EXCHANGES] for x in (first, last))
        latency, rate = exchanges.lowest(source[i], target[j])
        faster = latency + rate * size + sums[i, j] < best.seconds
        i, j = i[faster], j[faster]
        latency, rate = exchanges.costs(source[i], target[j])
        seconds = np.where(np.isnan(rate), inf, latency + rate * size) + sums[i, j]
        k = int(seconds.argmin()) if len(seconds) else -1
        if len(seconds) and seconds[k] < best.seconds:
            (before, head), (after, tail) = heads[i[k]], tails[j[k]]
            step = CollectiveStep("exchange", exchange_axes(before, after), after)
            middle = () if before == after else (step,)
            best = Path(float(seconds[k]), (*head.steps, *middle, *tail.steps))
    return best


def _split_numbers(frontier: PathEnds) -> tuple[list[Axes], Indices]:
    """Return the distinct splits of a dimension, and their numbers: [layout, dimension]."""
    numbers: dict[Axes, int] = {}
    rows = [[numbers.setdefault(axes, len(numbers)) for axes in l.dims] for l, _ in frontier]
    return list(numbers), np.array(rows)


def _search(
    problem: RedistributionProblem, costs: PlanCosts, best: float, start: Layout,
    neighbours: Callable[[RedistributionProblem, Layout], Iterator[Neighbour]],
    rest: Callable[[Layout], float],
) -> dict[Layout, Path]:  # fmt: skip
    """Return the fastest path between `start` and each layout (A*, at most MAX_STEPS steps).

    Args:
        best: a path is left out unless its seconds and `rest` are below `best`.
        neighbours: the direction of the search.
        rest: a lower bound of the seconds between a layout and the other end of the plan.
    """
    p, serial, priced = problem, count(), 0
    paths, done = {start: Path(0.0, ())}, set[Layout]()
    todo = [(rest(start), next(serial), start)]
    while todo and priced < MAX_STEPS:
        *_, layout = heappop(todo)
        if layout in done:
            continue
        done.add(layout)
        so_far = paths[layout]
        for other, step, before in neighbours(p, layout):
            if other in done or so_far.seconds + (left := rest(other)) >= best:
                continue
            priced += 1
            seconds = so_far.seconds + costs.seconds(before, step)
            if seconds + left < best and (other not in paths or seconds < paths[other].seconds):
                steps = (*so_far.steps, step) if before is layout else (step, *so_far.steps)
                paths[other] = Path(seconds, steps)
                heappush(todo, (seconds + left, next(serial), other))
    return paths


def _successors(problem: RedistributionProblem, layout: Layout) -> Iterator[Neighbour]:
    """Yield the layouts to which a local step or a reduction leads."""
    for step in (*problem.local_moves(layout), *problem.reductions(layout)):
        yield Neighbour(step.layout, step, layout)


def _predecessors(problem: RedistributionProblem, layout: Layout) -> Iterator[Neighbour]:
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
