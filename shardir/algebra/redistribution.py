"""From one layout to another: the collectives and slices that lead there.

Each step is one move over one group of axes: all-reduce, reduce-scatter, all-to-all, all-gather,
slice, contribute. The order is fixed here: what shrinks a value first (reduce-scatter, slice),
then what keeps its size (all-to-all), then what grows it (all-gather).
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh


@dataclass(frozen=True)
class Step:
    """One move. `dim` is the dimension that is gathered, scattered or sliced; an all-to-all
    splits `dim` and concatenates `concat`. `layout` is what the value has after it."""

    kind: str
    axes: Axes
    layout: Layout
    dim: int = -1
    concat: int = -1


@lru_cache(maxsize=65536)
def plan(shape: Shape, mesh: Mesh, source: Layout, target: Layout) -> tuple[Step, ...]:
    """The steps from `source` to `target` for a tensor of global `shape`."""
    return tuple(_Planner(shape, mesh, source, target).run())


def received(shape: Shape, mesh: Mesh, source: Layout, target: Layout) -> tuple[int, int]:
    """Elements that one device receives, and the number of collectives."""
    elements = count = 0
    layout = source
    for step in plan(shape, mesh, source, target):
        n = step_received(shape, mesh, layout, step)
        elements, count = elements + n, count + (step.kind not in ("slice", "contribute"))
        layout = step.layout
    return elements, count


def step_received(shape: Shape, mesh: Mesh, before: Layout, step: Step) -> int:
    """Elements that one device receives in one step: ring algorithms, largest shard.

    Of a group of n, an all-reduce receives 2 (n - 1) / n of the value, a reduce-scatter and an
    all-to-all (n - 1) / n of what goes in, an all-gather (n - 1) / n of what comes out.
    """

    def local(layout: Layout) -> int:
        n = 1
        for s in layout.local_shape(mesh, shape):
            n *= s
        return n

    n = mesh.extent(step.axes)
    match step.kind:
        case "all_reduce":
            return 2 * local(before) * (n - 1) // n
        case "reduce_scatter" | "all_to_all":
            return local(before) * (n - 1) // n
        case "all_gather":
            return local(step.layout) * (n - 1) // n
        case _:
            return 0


class _Planner:
    def __init__(self, shape: Shape, mesh: Mesh, source: Layout, target: Layout):
        self.shape, self.mesh, self.target = shape, mesh, target
        self.now = source
        self.steps: list[Step] = []

    def go(self, kind: str, axes: Axes, layout: Layout, dim: int = -1, concat: int = -1) -> None:
        self.steps.append(Step(kind, axes, layout, dim, concat))
        self.now = layout

    def run(self) -> list[Step]:
        self.refine()
        self.reduce()
        while self.now.dims != self.target.dims:
            if not (self.slice() or self.exchange()):
                self.gather()
        self.contribute()
        return self.steps

    def refine(self) -> None:
        """Cut the axes of both layouts at each other's digits, so that they can be compared."""
        mesh = self.mesh
        cuts: dict[str, set[int]] = {}
        for a in (*self.now.used, *self.target.used):
            cuts.setdefault(a.name, set()).update(mesh.digit(a))

        def fine(axes: Axes) -> Axes:
            out = []
            for a in axes:
                start, end = mesh.digit(a)
                at = [start, *sorted(c for c in cuts[a.name] if start < c < end), end]
                if any(hi % lo for lo, hi in pairwise(at)):
                    at = [start, end]
                whole = len(at) == 2
                out += [a] if whole else [
                    type(a)(a.name, lo, hi // lo) for lo, hi in pairwise(at)
                ]  # fmt: skip
            return tuple(out)

        def layout(l: Layout) -> Layout:
            return Layout(l.mesh, tuple(map(fine, l.dims))).with_partial(
                fine(l.partial), l.reduction
            )

        self.now, self.goal = layout(self.now), layout(self.target)
        self.target = self.goal

    def divides(self, dim: int, axes: Axes) -> bool:
        return self.shape[dim] % self.mesh.extent(axes) == 0

    def steps_in(self, dim: int, coarse: Axes, fine: Axes) -> bool:
        """Whether shards over `fine` lie within those over `coarse`, its prefix: always when both
        divide the dimension; otherwise only from or to the unsplit dimension."""
        return not coarse or (self.divides(dim, coarse) and self.divides(dim, fine))

    def leads(self, dim: int, axes: Axes) -> bool:
        """Whether shards over `axes`, a prefix of the target's, can stay on the way there."""
        want = self.target.dims[dim]
        return axes == want or self.steps_in(dim, axes, want)

    def prefix(self, dim: int) -> int:
        """How many leading axes of a dimension stay: none when the shards would not nest."""
        have, want = self.now.dims[dim], self.target.dims[dim]
        n = 0
        while n < min(len(have), len(want)) and have[n] == want[n]:
            n += 1
        if n == len(have) == len(want):
            return n
        nested = self.steps_in(dim, have[:n], have) and self.steps_in(dim, have[:n], want)
        return n if nested else 0

    def reduce(self) -> None:
        now, goal = self.now, self.target
        same = now.reduction == goal.reduction
        left = tuple(a for a in now.partial if not (same and a in goal.partial))
        for dim, want in enumerate(goal.dims):
            have = self.now.dims[dim]
            if self.prefix(dim) != len(have) or now.reduction == "any":
                continue
            axes = want[len(have) :]
            while axes and not (set(axes) <= set(left) and self.steps_in(dim, have, have + axes)):
                axes = axes[:-1]
            if axes and self.leads(dim, have + axes):
                left = tuple(a for a in left if a not in axes)
                kept = tuple(a for a in self.now.partial if a not in axes)
                layout = self.now.with_dim(dim, have + axes).with_partial(kept, now.reduction)
                self.go("reduce_scatter", axes, layout, dim)
        if left:
            kept = tuple(a for a in self.now.partial if a not in left)
            kind = "broadcast" if now.reduction == "any" else "all_reduce"
            self.go(kind, left, self.now.with_partial(kept, now.reduction))

    def free(self, axes: Axes) -> bool:
        used = self.now.used
        return not any(self.mesh.overlap(a, b) for a in axes for b in used)

    def slice(self) -> bool:
        """Split a dimension further over axes that replicate the value."""
        for dim, want in enumerate(self.target.dims):
            have = self.now.dims[dim]
            if self.prefix(dim) != len(have):
                continue
            axes = want[len(have) :]
            while axes and not (self.free(axes) and self.steps_in(dim, have, have + axes)):
                axes = axes[:-1]
            if not axes or not self.leads(dim, have + axes):
                continue
            self.go("slice", axes, self.now.with_dim(dim, have + axes), dim)
            return True
        return False

    def exchange(self) -> bool:
        """Move the minor axes of one dimension to the minor end of another."""
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
                        and self.steps_in(source, rest, theirs)
                        and self.steps_in(dim, have, have + axes)
                        and self.leads(dim, have + axes)
                    ):
                        layout = self.now.with_dim(source, rest).with_dim(dim, have + axes)
                        self.go("all_to_all", axes, layout, dim, source)
                        return True
        return False

    def gather(self) -> None:
        """Undo what the target does not have, in the dimension where that is least."""
        best = None
        for dim, have in enumerate(self.now.dims):
            keep = self.prefix(dim)
            if keep < len(have):
                n = self.mesh.extent(have[keep:])
                if best is None or n < best[0]:
                    best = n, dim, keep
        assert best is not None, "layouts that differ have an axis to gather or to slice"
        _, dim, keep = best
        have = self.now.dims[dim]
        self.go("all_gather", have[keep:], self.now.with_dim(dim, have[:keep]), dim)

    def contribute(self) -> None:
        """A complete value becomes partial: the first device of each group keeps it."""
        new = tuple(a for a in self.target.partial if a not in self.now.partial)
        if new:
            self.go("contribute", new, self.target)
