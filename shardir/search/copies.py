"""The copies of a value that several of its users share.

    %w: [{b}, {a}]    all_gather over <a>    [{b}, {}]    all_gather over <b>    [{}, {}]
                      for one user                        for two others

The redistributions of one value form a tree: moves with which several of them begin are made once.
Where two part is a copy that their users share, and each of them is made from the last copy on its
way. So with its copies the time of a value's redistributions is a sum over its users. Considered
are copies on two paths, where the layout is annotated, else on one: of five users of an annotated
value all that they can share is counted. Copies that only ops of the update share may be in buckets
(buckets.py): they are considered apart from those that any users share.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np
from xdsl.dialects.builtin import TensorType

from shardir.algebra.arrays import Indices, Table
from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Mesh
from shardir.algebra.redistribution import known_plan, plan
from shardir.dialects.nn.types import itemsize
from shardir.search.latency_shares import LatencyShares
from shardir.search.transfer_costs import transfer_seconds


class ValueLayout(NamedTuple):
    """The layout of a value, and those of copies that several users share, `late` only those of the
    update: each after those on the way to it."""

    layout: Layout
    shared: tuple[Layout, ...] = ()
    late: bool = False


ValueLayouts = tuple[ValueLayout, ...]

MIN_USERS_OF_PATHS = 4
"""From so many users on, two on each, copies on two paths are shared."""


@lru_cache(maxsize=65536)
def stops(
    mesh: Mesh, shape: Shape, itemsize: int, source: Layout, target: Layout
) -> tuple[Layout, ...]:
    """Return the layout after each move of a plan that takes time, if the plan is one to it and one
    from it, and both are known: to search for them would take long."""

    def is_known(a: Layout, b: Layout, part: Sequence[CollectiveStep]) -> bool:
        return known_plan(shape, mesh, a, b, itemsize) == part

    steps = plan(shape, mesh, source, target, itemsize)
    n = len(steps)
    return tuple([
        step.layout for i, step in enumerate(steps, 1) if step.takes_time(mesh)
        and (i == n or (is_known(source, step.layout, steps[:i])
                        and is_known(step.layout, target, steps[i:])))
    ])  # fmt: skip


def copies(
    mesh: Mesh, t: TensorType, layout: Layout, users: Iterable[Iterable[Sequence[Layout]]],
    paths: int,
) -> list[tuple[Layout, ...]]:  # fmt: skip
    """Return the copies of a value of a layout that its users may share, on at most so many paths
    (1 or 2); each after those on the way to it.

    Args:
        users: of each the layouts that its candidates need.
    """
    shape, size, counts, most = t.get_shape(), itemsize(t), Counter[Layout](), 0
    for needs in users:
        each, by = dict.fromkeys(tuple(need) for need in needs), Counter[Layout]()
        for need in each:
            by |= Counter([s for l in need for s in stops(mesh, shape, size, layout, l)])
        counts += by
        most += max(map(len, each))
    ways = {c: stops(mesh, shape, size, layout, c) for c, n in counts.items() if n > 1}
    # a user parts from each copy but the last, and two from that
    found: list[tuple[Layout, ...]] = [
        path
        for last, (*above, _) in ways.items()
        for n in range(len(above) + 1)
        for path in ((*some, last) for some in combinations(above, n))
        if all(counts[copy] > len(path) - i for i, copy in enumerate(path))
    ]
    if paths > 1 and most >= MIN_USERS_OF_PATHS:
        found += [
            tuple(dict.fromkeys((*one, *two)))
            for one, two in combinations(found, 2)
            if one[-1] not in ways[two[-1]] and two[-1] not in ways[one[-1]]
            and _part(ways[one[-1]], ways[two[-1]]) == _part(one, two)
        ]  # fmt: skip
    return found


def _part(one: Sequence[Layout], two: Sequence[Layout]) -> Layout | None:
    """Return the last layout that two paths have in common; None if there is none."""
    return next((layout for layout in reversed(one) if layout in two), None)


def source(mesh: Mesh, t: TensorType, layouts: ValueLayout, need: Layout) -> Layout:
    """Return the layout from which a value is redistributed: that of the last copy on the way to
    the one that is needed, or its own."""
    layout, shared, _ = layouts
    way = stops(mesh, t.get_shape(), itemsize(t), layout, need) if shared else ()
    return next((copy for copy in reversed(shared) if copy in way), layout)


def copies_made(mesh: Mesh, t: TensorType, layouts: ValueLayout) -> list[tuple[Layout, Layout]]:
    """Return the layouts from which and to which the copies of a value are made."""
    layout, shared, _ = layouts
    before = (ValueLayout(layout, shared[:i]) for i in range(len(shared)))
    return [(source(mesh, t, l, copy), copy) for l, copy in zip(before, shared, strict=True)]


def with_copies(layouts: ValueLayouts, *late: bool) -> ValueLayouts:
    """Return the layouts of a value with copies of these kinds alone: those that only ops of the
    update share, or others."""
    return tuple([l if l.late in late else ValueLayout(l.layout) for l in layouts])


def sources(
    mesh: Mesh, t: TensorType, layouts: ValueLayouts, needs: Sequence[Layout]
) -> tuple[list[Layout], Indices]:
    """Return the layouts of a value and its copies, and the number of the `source` among them:
    [value layout, need]."""
    shape, size, numbers = t.get_shape(), itemsize(t), dict[Layout, int]()
    passing: dict[Layout, dict[Layout, list[int]]] = {}
    """Of each layout with copies the needs on the way to which each stop is."""
    for layout in dict.fromkeys(layout for layout, shared, _ in layouts if shared):
        by = passing[layout] = {}
        for j, need in enumerate(needs):
            for stop in stops(mesh, shape, size, layout, need):
                by.setdefault(stop, []).append(j)
    found = np.zeros((len(layouts), len(needs)), dtype=np.int64)
    for i, (layout, shared, _) in enumerate(layouts):
        found[i] = numbers.setdefault(layout, len(numbers))
        for copy in shared:  # the later ones are nearer
            used = passing[layout].get(copy, [])
            found[i, used] = numbers.setdefault(copy, len(numbers))
    return list(numbers), found


def copy_seconds(
    mesh: Mesh, t: TensorType, layouts: ValueLayouts, shares: LatencyShares | None = None
) -> Table:
    """Return the time to make the copies, with `shares` in buckets: [value layout]."""
    ends = list(dict.fromkeys(l for layout, shared, _ in layouts for l in (layout, *shared)))
    number = {l: i for i, l in enumerate(ends)}
    seconds = transfer_seconds(mesh, t, ends, ends, shares)
    made = (copies_made(mesh, t, each) for each in layouts)
    return np.array([sum((seconds[number[a], number[b]] for a, b in each), 0.0) for each in made])
