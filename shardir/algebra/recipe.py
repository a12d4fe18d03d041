"""The fixed order of named collectives from one layout to another."""

from shardir.algebra.collectives import AxisState, CollectiveStep
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes
from shardir.algebra.moves import RedistributionProblem

REPLICATED, SHARDED, PARTIAL, ROOT = AxisState


class Recipe:
    """The named collectives in a fixed order, as in many compilers: those that shrink a value
    first, those that grow it last."""

    def __init__(self, problem: RedistributionProblem):
        self.problem, self.mesh, self.target = problem, problem.mesh, problem.target
        self.now = problem.source
        self.steps: list[CollectiveStep] = []

    def go(
        self, start: AxisState, end: AxisState, axes: Axes, dim: int = -1, concat: int = -1,
        reduction: str = "",
    ) -> None:  # fmt: skip
        self.add(self.problem.move(start, end, self.now, axes, dim, concat, reduction))

    def add(self, step: CollectiveStep) -> None:
        self.steps.append(step)
        self.now = step.layout

    def run(self) -> list[CollectiveStep]:
        self.reduced()
        while self.now.dims != self.target.dims:
            if not (self.slice() or self.all_to_all()):
                self.gather()
        self.make_partial()
        return self.steps

    def reduced(self) -> None:
        """Go as far as the last reduction of partial values."""
        while self.slice():
            pass
        self.scatter()
        self.reduce()

    def leads(self, dim: int, axes: Axes) -> bool:
        """Whether shards over `axes`, a prefix of the target's, need not move again."""
        want = self.target.dims[dim]
        return axes == want or self.problem.nests(dim, axes, want)

    def prefix(self, dim: int) -> int:
        """Return the number of leading axes of a dimension that stay: none unless shards nest."""
        have, want = self.now.dims[dim], self.target.dims[dim]
        n = 0
        while n < min(len(have), len(want)) and have[n] == want[n]:
            n += 1
        if n == len(have) == len(want):
            return n
        nests = self.problem.nests
        return n if nests(dim, have[:n], have) and nests(dim, have[:n], want) else 0

    def scatter(self) -> None:
        """Reduce-scatter partial values into a dimension that the target splits over their axes."""
        for dim, want in enumerate(self.target.dims):
            have, left = self.now.dims[dim], self.problem.left(self.now)
            if self.prefix(dim) != len(have) or self.now.reduction == "any":
                continue
            axes = want[len(have) :]
            nests = self.problem.nests
            while axes and not (set(axes) <= set(left) and nests(dim, have, have + axes)):
                axes = axes[:-1]
            if axes and self.leads(dim, have + axes):
                self.go(PARTIAL, SHARDED, axes, dim)

    def reduce(self) -> None:
        """Reduce partial values where they are."""
        left = self.problem.left(self.now)
        if left:
            self.go(ROOT if self.now.reduction == "any" else PARTIAL, REPLICATED, left)

    def slice(self) -> bool:
        """Split a dimension further over axes that replicate the value."""
        for dim, want in enumerate(self.target.dims):
            have = self.now.dims[dim]
            if self.prefix(dim) != len(have):
                continue
            axes = want[len(have) :]
            free, nests = self.problem.free, self.problem.nests
            while axes and not (free(self.now, axes) and nests(dim, have, have + axes)):
                axes = axes[:-1]
            if axes and self.leads(dim, have + axes):
                self.go(REPLICATED, SHARDED, axes, dim)
                return True
        return False

    def all_to_all(self) -> bool:
        """Move the minor axes of one dimension to the minor end of another."""
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
                        self.go(SHARDED, SHARDED, axes, dim, source)
                        return True
        return False

    def gather(self) -> None:
        """Gather the axes that the target lacks, of the dimension where the group is smallest."""
        best = None
        for dim, have in enumerate(self.now.dims):
            keep = self.prefix(dim)
            if keep < len(have):
                n = self.mesh.extent(have[keep:])
                if best is None or n < best[0]:
                    best = n, dim, keep
        assert best is not None, "layouts that differ have an axis to gather or to slice"
        _, dim, keep = best
        self.go(SHARDED, REPLICATED, self.now.dims[dim][keep:], dim)

    def exchange(self, target: Layout) -> None:
        """Exchange to the target's split."""
        layout = target.with_partial(self.now.partial, self.now.reduction)
        if layout.dims != self.now.dims:
            axes = exchange_axes(self.now, layout)
            self.add(CollectiveStep("exchange", axes, layout))

    def make_partial(self) -> None:
        """Make a complete value partial: the first device of each group keeps it."""
        new = tuple(a for a in self.target.partial if a not in self.now.partial)
        if new:
            self.go(REPLICATED, PARTIAL, new, reduction=self.target.reduction)
