"""Moves: the single steps from a layout, and their costs.

redistribution.py has the table of their cases. `nests` guards the named collectives: a move along a
dimension needs the shards of one layout to lie within those of the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, permutations

from shardir.algebra.bound import crossing, latency_bound, refined, seconds_bound
from shardir.algebra.collectives import AxisState, CollectiveStep, between
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh, sizes_of
from shardir.algebra.routes import full_axes, parts
from shardir.algebra.steps import step_seconds
from shardir.algebra.traffic import cut, sub_axes_of_primes

REPLICATED, SHARDED, PARTIAL, ROOT = AxisState

MAX_CUT, MAX_CUT_VECTORS = 16, 64
"""Bounds the devices on which layouts of even shards, and layouts of tensors of one dimension, are
cut into sub-axes of two: the moves, and so the time of a search, grow with the sub-axes."""


@dataclass(frozen=True)
class RedistributionProblem:
    """A tensor of global `shape`, and a source and a target layout.

    `of` cuts both layouts at each other's sub-axes, unless these cross.
    """

    mesh: Mesh
    shape: Shape
    source: Layout
    target: Layout

    @staticmethod
    def of(mesh: Mesh, shape: Shape, source: Layout, target: Layout) -> "RedistributionProblem":
        """Return the problem of two layouts of any form."""
        ends = refined(mesh, source.simplified(mesh), target.simplified(mesh))
        finer = tuple([cut(mesh, layout, _cuts(mesh, shape)) for layout in ends])
        return RedistributionProblem(mesh, shape, *(ends if crossing(mesh, *finer) else finer))

    @cached_property
    def runs(self) -> tuple[Axes, ...]:
        """The groups of sub-axes over which one move splits a dimension:

        1. sub-axes that are adjacent in either layout;
        2. each single sub-axis, also of axes that neither layout uses: a reduction may be shared
           among the devices along them;
        3. for uneven dimensions, adjacent sub-axes of a mesh axis: shards over one sub-axis do not
           contain shards over two.
        """
        runs: dict[Axes, None] = {}
        for axes in (*self.target.dims, *self.source.dims):
            for i in range(len(axes)):
                runs.update(dict.fromkeys(axes[i:j] for j in range(i + 1, len(axes) + 1)))
        for sub_axes in self.factorisations:
            parts_of_axes = [self.mesh.cut((name,), sub_axes) for name in full_axes(self.mesh)]
            runs.update(((a,), None) for axes in parts_of_axes for a in axes)
            if any(n % self.mesh.size for n in self.shape):
                for axes in parts_of_axes:
                    ends = combinations(range(len(axes) + 1), 2)
                    runs.update(dict.fromkeys(axes[i:j] for i, j in ends))
        return tuple(runs)

    @property
    def near(self) -> "RedistributionProblem":
        """The problem without changes of dimensions of explicit sizes, which need an exchange."""
        ends = zip(self.source.dims, self.target.dims, strict=True)
        dims = tuple(s if sizes_of(s) or sizes_of(t) else t for s, t in ends)
        target = Layout(self.target.mesh, dims, self.target.partial, self.target.reduction)
        return RedistributionProblem(self.mesh, self.shape, self.source, target)

    def divides(self, dim: int, axes: Axes) -> bool:
        """Whether axes split a dimension evenly."""
        return self.shape[dim] % self.mesh.extent(axes) == 0

    def nests(self, dim: int, coarse: Axes, fine: Axes) -> bool:
        """Whether each shard over `fine` lies within a shard over `coarse`, a prefix of `fine`.

        So it is if both divide the dimension, or if `coarse` is empty; never with explicit sizes.
        """
        if self.is_even:
            return True
        if sizes_of(coarse) or sizes_of(fine):
            return False
        return not coarse or (self.divides(dim, coarse) and self.divides(dim, fine))

    def left(self, now: Layout) -> Axes:
        """Return the partial axes of a layout that the target does not keep."""
        keeps = now.reduction == self.target.reduction
        return tuple(a for a in now.partial if not (keeps and a in self.target.partial))

    def free(self, now: Layout, axes: Axes) -> bool:
        """Whether a layout replicates the value along all of these axes."""
        if self.crosses:
            return not any(self.mesh.overlap(a, b) for a in axes for b in now.used)
        return now.used_set.isdisjoint(axes)

    def move(
        self, start: AxisState, end: AxisState, now: Layout, axes: Axes, dim: int = -1,
        concat: int = -1, reduction: str = "",
    ) -> CollectiveStep:  # fmt: skip
        """Return the step that takes `axes` from the state `start` to the state `end`.

        The caller guarantees that the axes are in the state `start`, and minor in their dimension:
        the layout is made without the checks of the collective's record.

        Args:
            dim, concat: as in `CollectiveStep`.
            reduction: of partial values; that of the layout if empty.
        """
        record, reduction, after = between(start, end), reduction or now.reduction, now
        if start is SHARDED:
            gathered = concat if end is SHARDED else dim
            after = after.with_dim(gathered, after.dims[gathered][: -len(axes)])
        elif start is not REPLICATED:
            rest = tuple([a for a in after.partial if a not in axes])
            after = after.with_partial(rest, after.reduction)
        if end is SHARDED:
            after = after.with_dim(dim, after.dims[dim] + axes)
        elif end is PARTIAL:
            kind = reduction if start is REPLICATED else "sum"
            partial = sorted((*after.partial, *axes), key=self.mesh.order)
            after = after.with_partial(tuple(partial), kind)
        return CollectiveStep(record.name, axes, after, dim, concat, reduction)

    @cached_property
    def factorisations(self) -> tuple[Axes, ...]:
        """The sub-axes at which moves cut layouts. There are several if the sub-axes of the source,
        the target and the levels cross, as 2 x 3 and 3 x 2 of an axis of 6."""
        source, target, levels = self.source.used, self.target.used, self.mesh.level_sub_axes
        if not self.crosses:
            needed = (*source, *target, *self.mesh.cut(levels, source + target))
            more = tuple([a for a in _cuts(self.mesh, self.shape) if a.size])
            return (_extend_uncrossed(self.mesh, needed, more),)
        orders = ((source, levels, target), (target, levels, source), (levels, source, target))
        distinct: dict[frozenset[Axis], Axes] = {}
        for first, second, third in orders:
            sub_axes = _extend_uncrossed(self.mesh, (), first + second + third)
            distinct.setdefault(frozenset(sub_axes), sub_axes)
        return tuple(distinct.values())

    @cached_property
    def crosses(self) -> bool:
        """Whether the sub-axes of the two layouts cross."""
        return crossing(self.mesh, self.source, self.target)

    @cached_property
    def is_even(self) -> bool:
        """Whether the costs of all layouts between source and target have closed forms: the mesh's
        size divides each dimension, no shard has an explicit size, the sub-axes do not cross, and
        all devices take part in reductions."""
        if any(map(sizes_of, (*self.source.dims, *self.target.dims))):
            return False
        even = all(n and n % self.mesh.size == 0 for n in self.shape)
        return even and not self.crosses and self.source.reduction != "any"

    def normal(self, now: Layout) -> Layout:
        """Return the form of a layout in which layouts that split equally compare equal."""
        return now.simplified(self.mesh) if self.crosses else now

    def moves(self, now: Layout) -> Iterator[CollectiveStep]:
        """Yield every move from a layout that a plan may need."""
        for sub_axes in self.factorisations:
            yield from self._moves(*(cut(self.mesh, l, sub_axes) for l in (now, self.target)))

    def _moves(self, now: Layout, target: Layout) -> Iterator[CollectiveStep]:
        """Yield the moves from a layout to layouts over its sub-axes."""
        yield from self.local_moves(now)
        yield from self.reductions(now)
        for dim, have in enumerate(now.dims):
            for n in range(1, len(have) + 1):
                rest, axes = have[:-n], have[-n:]
                if not self.nests(dim, rest, have):
                    gathered = now.with_dim(dim, rest)
                    yield CollectiveStep("exchange", exchange_axes(now, gathered), gathered)
                    continue
                yield self.move(SHARDED, REPLICATED, now, axes, dim)
                for other, theirs in enumerate(now.dims):
                    if other != dim and self.nests(other, theirs, theirs + axes):
                        yield self.move(SHARDED, SHARDED, now, axes, other, dim)
        yield from _exchanges(self.mesh, self.runs, target, now, self.crosses)

    def local_moves(self, now: Layout) -> Iterator[CollectiveStep]:
        """Yield the moves without communication: all_slice, and to partial values."""
        for axes in self.runs:
            if self.free(now, axes):
                for dim, have in enumerate(now.dims):
                    if self.nests(dim, have, have + axes):
                        yield self.move(REPLICATED, SHARDED, now, axes, dim)
        # A value may become partial on the way over axes that cross the target's.
        others = [run[0] for run in self.runs if len(run) == 1] if self.crosses else []
        for a in dict.fromkeys((*self.target.partial, *others)):
            kind = self.target.reduction
            if self.free(now, (a,)) and (not now.partial or now.reduction == kind):
                yield self.move(REPLICATED, PARTIAL, now, (a,), reduction=kind)
        if (now if now.partial else self.target).reduction != "sum":
            return  # zeros are the identity of sums only
        for dim, have in enumerate(now.dims):
            for n in range(1, len(have) + 1):
                rest, axes = have[:-n], have[-n:]
                if self.nests(dim, rest, have):
                    yield self.move(SHARDED, PARTIAL, now, axes, dim)

    def reductions(self, now: Layout) -> Iterator[CollectiveStep]:
        """Yield the all-reduces and reduce-scatters; the broadcast of a value of one root."""
        left = now.partial
        if now.reduction == "any":
            if left := self.left(now):
                yield self.move(ROOT, REPLICATED, now, left)
            return
        for n in range(len(left), 0, -1):
            for axes in combinations(left, n):
                yield self.move(PARTIAL, REPLICATED, now, axes)
        runs = [axes for axes in self.runs if set(axes) <= set(left)]
        runs += [axes + _without(left, axes) for axes in runs]
        runs += [axes for n in range(2, len(left) + 1) for axes in combinations(left, n)]
        for axes in dict.fromkeys(runs):
            for dim, have in enumerate(now.dims):
                if self.nests(dim, have, have + axes):
                    yield self.move(PARTIAL, SHARDED, now, axes, dim)


class PlanCosts:
    """The seconds of steps of a problem, and lower bounds of the seconds of plans."""

    def __init__(self, problem: RedistributionProblem, itemsize: int):
        self.problem, self.itemsize = problem, itemsize
        self._latencies: dict[tuple[str, Axes], float] = {}

    def seconds(self, before: Layout, step: CollectiveStep) -> float:
        """Return the seconds of a step in its fastest form."""
        return step_seconds(self.problem.mesh, self.problem.shape, before, step, self.itemsize)

    def latency(self, step: CollectiveStep) -> float:
        """Return the latency of a step: a lower bound of its seconds."""
        if (latency := self._latencies.get((step.kind, step.axes))) is None:
            mesh = self.problem.mesh
            latency = step.forms(mesh)[0].latency if step.communicates(mesh) else 0.0
            self._latencies[step.kind, step.axes] = latency
        return latency

    def bound(self, source: Layout, target: Layout) -> float:
        """Return a lower bound of the seconds of any plan between two layouts."""
        p = self.problem
        return seconds_bound(p.mesh, p.shape, source, target, self.itemsize)

    def latency_bound(self, source: Layout, target: Layout) -> float:
        """Return a lower bound of the latencies of any plan between two layouts."""
        return latency_bound(self.problem.mesh, source, target)


@lru_cache(maxsize=256)
def _cuts(mesh: Mesh, shape: Shape) -> Axes:
    """Return the sub-axes at which layouts are cut, besides each other's.

    On a mesh of a power of two, sub-axes of two cross no other sub-axes, so all layouts are over
    equal ones. Uneven shards of several dimensions, of which a search of strategies has many, are
    cut as little as possible.
    """
    n, sub_axes = mesh.size, parts(mesh)
    even = n <= MAX_CUT and all(size % n == 0 for size in shape)
    if n & (n - 1) == 0 and (even or (len(shape) == 1 and n <= MAX_CUT_VECTORS)):
        return tuple([prime for prime, _ in sub_axes_of_primes(mesh, sub_axes)])
    return sub_axes


def _extend_uncrossed(mesh: Mesh, sub_axes: Axes, more: Axes) -> Axes:
    """Extend `sub_axes` by the axes in `more` that cross no sub-axis before them."""
    for a in more:
        both = (*sub_axes, a)
        if mesh.clash(tuple({*mesh.cut(both, both)})) is None:
            sub_axes = both
    return sub_axes


def _exchanges(
    mesh: Mesh, runs: tuple[Axes, ...], target: Layout, now: Layout, crosses: bool
) -> Iterator[CollectiveStep]:
    """Yield the exchanges from a layout that a plan may need.

    `wanted` is the target's split without axes that are still partial. An exchange leads to

    1. `wanted`, in all dimensions or in one;
    2. 1 with further axes at the minor end of a dimension: those over which the target becomes
       partial, those that the dimension has now, all that are left over, or an unused run;
    3. `wanted` with minor axes of one dimension moved to another;
    4. `wanted` with a crossing run in place of the axes of one dimension;
    5. the present split with one sub-axis moved to the minor end of a dimension.

    Args:
        runs: `RedistributionProblem.runs`.
        crosses: the sub-axes of source and target cross.
    """
    new = tuple(a for a in target.partial if a not in now.partial)
    wanted = [_before(x, now.partial) for x in target.dims]
    ends = [target.with_dim(d, x + new).dims for d, x in enumerate(target.dims)]
    placed = tuple(a for x in wanted for a in x)
    # The axes over which the target is partial are major: other axes are gathered before them.
    rest = [_to_front(_without(y, placed), new) for y in now.dims]
    ends.append(tuple(x + y for x, y in zip(wanted, rest, strict=True)))
    if not any(map(sizes_of, now.dims)):
        left = _to_front(tuple(a for y in rest for a in y), new)
        ends += [(*wanted[:d], x + left, *wanted[d + 1 :]) for d, x in enumerate(wanted)]
    for d, x in enumerate(wanted):
        elsewhere = tuple(a for e, y in enumerate(now.dims) if e != d for a in y)
        for end in (x, x + _without(now.dims[d], x), _before(x, elsewhere)):
            others = tuple(_without(y, end) for y in now.dims)
            ends.append((*others[:d], end, *others[d + 1 :]))
    ends.append(tuple(wanted))
    free = [axes for axes in runs if now.used_set.isdisjoint(axes)]
    for end in dict.fromkeys(ends):
        used = {a for x in end for a in x}
        for axes in free:
            if used.isdisjoint(axes):
                ends += [(*end[:d], x + axes, *end[d + 1 :]) for d, x in enumerate(end)]
    used = target.used + now.used
    for axes in runs if crosses else ():
        if any(a != b and mesh.overlap(a, b) for a in axes for b in used):
            ends += [(*wanted[:d], axes, *wanted[d + 1 :]) for d in range(len(wanted))]
    if not any(map(sizes_of, target.dims)):
        for dim, other in permutations(range(len(wanted)), 2):
            for n in range(len(wanted[dim])):
                end = list(wanted)
                end[dim], end[other] = wanted[dim][:n], wanted[other] + wanted[dim][n:]
                ends.append(tuple(end))
    for dim, have in enumerate(now.dims):
        for i, a in enumerate(have):
            rest = (*now.dims[:dim], have[:i] + have[i + 1 :], *now.dims[dim + 1 :])
            for other, theirs in enumerate(rest):
                for x in ((), *free):
                    ends.append((*rest[:other], (*theirs, a, *x), *rest[other + 1 :]))
    explicit = any(map(sizes_of, now.dims))
    partial = frozenset(now.partial)
    for dims in dict.fromkeys(ends):
        axes = tuple([a for x, y in zip(now.dims, dims, strict=True) if x != y for a in x])
        # An exchange over no axes is a slice, except with explicit sizes.
        if dims != now.dims and (axes or explicit or any(map(sizes_of, dims))):
            splits = [a for x in dims for a in x]
            if len(set(splits)) == len(splits) and partial.isdisjoint(splits):
                layout = Layout(now.mesh, dims, now.partial, now.reduction)
                if not (crosses and mesh.clash(layout.used)):
                    yield CollectiveStep("exchange", axes, layout)


def _before(axes: Axes, others: Axes) -> Axes:
    """Return the axes before the first one that is among the others."""
    n = next((i for i, a in enumerate(axes) if a in others), len(axes))
    return axes if n == len(axes) else axes[:n]


def _to_front(axes: Axes, major: Axes) -> Axes:
    """Return the axes with the `major` ones first; unchanged with explicit sizes."""
    if sizes_of(axes):
        return axes
    return tuple(sorted(axes, key=lambda a: a not in major))


def _without(axes: Axes, others: Axes) -> Axes:
    """Return the axes that are not among the others; the same object if there are none, so that
    explicit sizes stay."""
    rest = tuple(a for a in axes if a not in others)
    return axes if len(rest) == len(axes) else rest
