"""Plans that need no search: the named collectives in a fixed order, and one exchange.

[..., x], partial {a, b}  ->  [..., x']    slices, reductions, all-to-alls, then gathers
                                           reductions, then one exchange
[..., x]  ->  [..., x'], partial {a, b}    an exchange after which a and b split dimensions, and
                                           then become partial
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from shardir.algebra.collectives import AxisState, CollectiveStep
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh, sizes_of
from shardir.algebra.moves import RedistributionProblem
from shardir.algebra.routes import routes
from shardir.algebra.traffic import sub_axes_of_primes

REPLICATED, SHARDED, PARTIAL, ROOT = AxisState

MAX_SPREAD = 27
"""Bounds the ways to spread partial axes over dimensions: three primes over three dimensions."""


def known_path(
    shape: Shape, mesh: Mesh, source: Layout, target: Layout, itemsize: int
) -> list[CollectiveStep] | None:
    """Return the shortest path of a table, which no plan is faster than.

    None unless both layouts are in a table, and are even or the table is complete.
    """
    if any(map(sizes_of, (*source.dims, *target.dims))):
        return None  # only an exchange has an operand with explicit sizes
    reduction = source.reduction if source.partial else target.reduction
    table = routes(mesh, len(shape), reduction)
    return table.steps(shape, itemsize, source, target) if table else None


def plan_candidates(
    problem: RedistributionProblem, itemsize: int
) -> Iterator[list[CollectiveStep]]:
    """Yield plans that need no search, the preferred one first."""
    p = problem
    near = problem.near
    if near.target == problem.target:
        yield FixedOrder(problem).run()
    reductions = [FixedOrder.reduce_early, FixedOrder.reduce_unordered]
    if near.left(near.source):
        reductions.append(FixedOrder.reduce)
    for reduce in reductions:
        plan = FixedOrder(near)
        reduce(plan)
        yield from _spread_partial(p, plan.now, plan.steps)
        plan.exchange(problem.target)
        plan.make_partial()
        yield plan.steps
    path = known_path(p.shape, p.mesh, p.source, p.target, itemsize)
    if path is not None:
        yield path


def _spread_partial(
    problem: RedistributionProblem, now: Layout, steps: list[CollectiveStep]
) -> Iterator[list[CollectiveStep]]:
    """Yield plans by an exchange after which the axes over which the target is partial, cut into
    primes, split several dimensions, and become partial from there.

    A single move puts all of them into one dimension, whose shards may be less even.
    """
    p, target = problem, problem.target
    axes = tuple([a for a in target.partial if a not in now.partial])
    parts = [p.mesh.simplify((prime,)) for prime, _ in sub_axes_of_primes(p.mesh, axes)]
    primes = tuple([prime for part in parts for prime in part])
    rank = len(p.shape)
    if target.reduction != "sum" or any(map(sizes_of, (*now.dims, *target.dims))):
        return
    if len(primes) < 2 or rank ** len(primes) > MAX_SPREAD:
        return
    for dims in product(range(rank), repeat=len(primes)):
        added = [
            tuple([a for a, e in zip(primes, dims, strict=True) if e == d]) for d in range(rank)
        ]
        splits = [x + more for x, more in zip(target.dims, added, strict=True)]
        nest = all(p.nests(d, target.dims[d], splits[d]) for d in dims)
        if len({*dims}) < 2 or not nest:
            continue
        layout = Layout(target.mesh, tuple(splits)).with_partial(now.partial, now.reduction)
        plan = [*steps, CollectiveStep("exchange", exchange_axes(now, layout), layout)]
        for d, more in enumerate(added):
            if more:
                plan.append(p.move(SHARDED, PARTIAL, plan[-1].layout, more, d))
        yield [*plan[:-1], replace(plan[-1], layout=target)]


class FixedOrder:
    """Named collectives in a fixed order, as in many compilers: those that shrink a value first,
    those that grow it last.

    Attributes:
        now: the layout after the steps so far.
    """

    def __init__(self, problem: RedistributionProblem):
        self.problem, self.mesh, self.target = problem, problem.mesh, problem.target
        self.now = problem.source
        self.steps: list[CollectiveStep] = []

    def add_move(
        self, start: AxisState, end: AxisState, axes: Axes, dim: int = -1, concat: int = -1,
        reduction: str = "",
    ) -> None:  # fmt: skip
        """Append the step of `RedistributionProblem.move`."""
        self.add(self.problem.move(start, end, self.now, axes, dim, concat, reduction))

    def add(self, step: CollectiveStep) -> None:
        """Append a step."""
        self.steps.append(step)
        self.now = step.layout

    def run(self) -> list[CollectiveStep]:
        """Return the steps from the source to the target."""
        self.reduce_early()
        while self.now.dims != self.target.dims:
            if not (self.slice() or self.all_to_all()):
                self.gather()
        self.make_partial()
        return self.steps

    def reduce_early(self) -> None:
        """Slice as far as possible, then reduce all partial values."""
        while self.slice():
            pass
        self.scatter()
        self.reduce()

    def reduce_unordered(self) -> None:
        """Slice and reduce-scatter over the axes of the target's dimensions, though not in their
        order, which an exchange makes; then reduce all other partial values."""
        starts = (REPLICATED,) if self.now.reduction == "any" else (REPLICATED, PARTIAL)
        for start, dim in product(starts, range(len(self.target.dims))):
            have, left = self.now.dims[dim], self.problem.left(self.now)
            of_target = self.target.dims[dim]
            if start is PARTIAL:
                axes = tuple([a for a in of_target if a in left])
            else:
                axes = tuple([a for a in of_target if self.problem.free(self.now, (a,))])
            if axes and self.problem.nests(dim, have, have + axes):
                self.add_move(start, SHARDED, axes, dim)
        self.reduce()

    def leads(self, dim: int, axes: Axes) -> bool:
        """Whether shards over `axes`, a prefix of the target's, need not move again."""
        want = self.target.dims[dim]
        return axes == want or self.problem.nests(dim, axes, want)

    def prefix(self, dim: int) -> int:
        """Return the number of leading axes of a dimension that need not move: 0 unless shards
        nest."""
        have, want = self.now.dims[dim], self.target.dims[dim]
        n = 0
        while n < min(len(have), len(want)) and have[n] == want[n]:
            n += 1
        if n == len(have) == len(want):
            return n
        nests = self.problem.nests
        return n if nests(dim, have[:n], have) and nests(dim, have[:n], want) else 0

    def scatter(self) -> None:
        """Reduce-scatter partial values into dimensions that the target splits over their axes."""
        for dim, want in enumerate(self.target.dims):
            have, left = self.now.dims[dim], self.problem.left(self.now)
            if self.prefix(dim) != len(have) or self.now.reduction == "any":
                continue
            axes = want[len(have) :]
            nests = self.problem.nests
            while axes and not (set(axes) <= set(left) and nests(dim, have, have + axes)):
                axes = axes[:-1]
            if axes and self.leads(dim, have + axes):
                self.add_move(PARTIAL, SHARDED, axes, dim)

    def reduce(self) -> None:
        """All-reduce the partial values that the target does not keep."""
        left = self.problem.left(self.now)
        if left:
            self.add_move(ROOT if self.now.reduction == "any" else PARTIAL, REPLICATED, left)

    def slice(self) -> bool:
        """Split one dimension further over axes that replicate the value; whether there is one."""
        for dim, want in enumerate(self.target.dims):
            have = self.now.dims[dim]
            if self.prefix(dim) != len(have):
                continue
            axes = want[len(have) :]
            free, nests = self.problem.free, self.problem.nests
            while axes and not (free(self.now, axes) and nests(dim, have, have + axes)):
                axes = axes[:-1]
            if axes and self.leads(dim, have + axes):
                self.add_move(REPLICATED, SHARDED, axes, dim)
                return True
        return False

    def all_to_all(self) -> bool:
        """Move minor axes of one dimension to the minor end of another; whether there are any."""
        nests = self.problem.nests
        for dim, want in enumerate(self.target.dims):
            have = self.now.dims[dim]
            if self.prefix(dim) != len(have) or len(have) == len(want):
                continue
            for source, theirs in enumerate(self.now.dims):
                keep = self.prefix(source)
                for n in range(len(theirs) - keep, 0, -1):
                    axes, rest = theirs[-n:], theirs[:-n]
                    if (
                        source != dim
                        and want[len(have) : len(have) + n] == axes
                        and nests(source, rest, theirs)
                        and nests(dim, have, have + axes)
                        and self.leads(dim, have + axes)
                    ):
                        self.add_move(SHARDED, SHARDED, axes, dim, source)
                        return True
        return False

    def gather(self) -> None:
        """Gather axes that the target lacks, in the dimension with the smallest group."""
        best = None
        for dim, have in enumerate(self.now.dims):
            keep = self.prefix(dim)
            if keep < len(have):
                n = self.mesh.extent(have[keep:])
                if best is None or n < best[0]:
                    best = n, dim, keep
        assert best is not None, "layouts that differ have an axis to gather or to slice"
        _, dim, keep = best
        self.add_move(SHARDED, REPLICATED, self.now.dims[dim][keep:], dim)

    def exchange(self, target: Layout) -> None:
        """Exchange to the target's split."""
        layout = target.with_partial(self.now.partial, self.now.reduction)
        if layout.dims != self.now.dims:
            axes = exchange_axes(self.now, layout)
            self.add(CollectiveStep("exchange", axes, layout))

    def make_partial(self) -> None:
        """Make a complete value partial over the target's axes."""
        new = tuple(a for a in self.target.partial if a not in self.now.partial)
        if new:
            self.add_move(REPLICATED, PARTIAL, new, reduction=self.target.reduction)
