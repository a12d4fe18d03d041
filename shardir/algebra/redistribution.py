"""From one layout to another: the collectives and slices that lead there.

Each step is one move over one group of axes. A plan is the cheapest of a few: the named collectives
in a fixed order (what shrinks a value first, what grows it last), or one exchange in which each
device fetches exactly what it lacks, before it perhaps the reduction of contributions. No layout
is out of reach, and a plan for complete values receives no more than the bound: what a device
lacks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod

from shardir.algebra.exchange import exchange_axes, lacking
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh, axes_text, sizes_of

LATENCY = 50_000
"""What a collective costs besides its bytes: as much as receiving so many elements. Below about
1 MB Gloo's collectives take the same time whatever their size."""

LOCAL = ("slice", "contribute", "pad")
"""The moves that communicate nothing."""


@dataclass(frozen=True)
class Step:
    """One move. `dim` is the dimension that is gathered, scattered or sliced; an all-to-all
    splits `dim` and concatenates `concat`. `layout` is what the value has after it."""

    kind: str
    axes: Axes
    layout: Layout
    dim: int = -1
    concat: int = -1

    def __str__(self) -> str:
        along = f" dim {self.dim}" if self.dim >= 0 else ""
        concat = f" concat {self.concat}" if self.concat >= 0 else ""
        return f"{self.kind}{along}{concat} over {axes_text(self.axes)} -> [{self.layout}]"


@dataclass(frozen=True)
class Redistribution:
    """A planned redistribution of a tensor of global `shape`, and what it costs."""

    shape: Shape
    itemsize: int
    mesh: Mesh
    source: Layout
    target: Layout
    steps: tuple[Step, ...]

    @property
    def received_bytes(self) -> int:
        """What the device that receives most receives."""
        return _received(self.shape, self.mesh, self.source, self.steps)[0] * self.itemsize

    @property
    def bound_bytes(self) -> int:
        """What the device that lacks most lacks; of what is to be reduced, all of its part."""
        return lacking(self.mesh, self.shape, self.source, self.target) * self.itemsize

    @property
    def peak_bytes(self) -> int:
        """The most that lives on one device at once: a step's operand and its result."""
        sizes = [prod(self.source.local_shape(self.mesh, self.shape))]
        sizes += [prod(s.layout.local_shape(self.mesh, self.shape)) for s in self.steps]
        return max(a + b for a, b in pairwise([*sizes, 0])) * self.itemsize

    def __str__(self) -> str:
        lines = [f"[{self.source}] -> [{self.target}]"]
        lines += [f"  {s}" for s in self.steps] or ["  nothing"]
        return "\n".join(
            [
                *lines,
                f"  receives {self.received_bytes} B (at least {self.bound_bytes} B), "
                f"peak {self.peak_bytes} B",
            ]
        )


def plan_redistribution(
    shape: Shape, itemsize: int, mesh: Mesh, source: Layout, target: Layout
) -> Redistribution:
    """Plans one redistribution.

    Args:
        shape: of the whole tensor.
        itemsize: bytes of an element.

    Raises:
        ShardirError: a layout does not fit the mesh or the shape; it names the invariant.
    """
    for layout in (source, target):
        layout.check(mesh, shape)
    source, target = source.simplified(mesh), target.simplified(mesh)
    return Redistribution(shape, itemsize, mesh, source, target, plan(shape, mesh, source, target))


@lru_cache(maxsize=65536)
def plan(shape: Shape, mesh: Mesh, source: Layout, target: Layout) -> tuple[Step, ...]:
    """The steps from `source` to `target` for a tensor of global `shape`."""
    best = min(
        _candidates(shape, mesh, source, target), key=lambda p: price(shape, mesh, source, p)
    )
    return tuple(best)


def named_collectives(shape: Shape, mesh: Mesh, source: Layout, target: Layout) -> list[Step]:
    """The plan of named collectives alone, in their fixed order."""
    return _Planner(shape, mesh, source, target).run()


def _candidates(shape: Shape, mesh: Mesh, source: Layout, target: Layout) -> Iterator[list[Step]]:
    """Plans to choose from, the preferred one first. Shards of stated sizes are only exchanged."""
    ends = list(zip(source.dims, target.dims, strict=True))
    near = target
    if any(s != t and (sizes_of(s) or sizes_of(t)) for s, t in ends):
        dims = tuple(s if sizes_of(s) or sizes_of(t) else t for s, t in ends)
        near = Layout(target.mesh, dims, target.partial, target.reduction)
    else:
        yield named_collectives(shape, mesh, source, target)
        padded = _Planner(shape, mesh, source, target)
        if padded.pad():
            yield padded.run()
    reduced = _Planner(shape, mesh, source, near)
    while reduced.slice():
        pass
    reduced.scatter()
    reduced.reduce()
    yield [*reduced.steps, *_exchange(mesh, reduced.now, target)]
    if reduced.steps:
        whole = _Planner(shape, mesh, source, near)
        whole.reduce()
        yield [*whole.steps, *_exchange(mesh, whole.now, target)]


def _exchange(mesh: Mesh, now: Layout, target: Layout) -> list[Step]:
    """One exchange to the target's split, and what makes the value partial as the target is."""
    now = now.simplified(mesh)
    moved = target.simplified(mesh).with_partial(now.partial, now.reduction)
    steps = []
    if moved.dims != now.dims:
        steps.append(Step("exchange", exchange_axes(now, moved), moved))
    new = mesh.without(target.partial, now.partial)
    if new:
        steps.append(Step("contribute", new, target))
    return steps


def price(shape: Shape, mesh: Mesh, source: Layout, steps: list[Step]) -> int:
    """What a plan costs, in elements that one device receives."""
    elements, count = _received(shape, mesh, source, steps)
    return elements + LATENCY * count


def received(shape: Shape, mesh: Mesh, source: Layout, target: Layout) -> tuple[int, int]:
    """Elements that one device receives, and the number of collectives, by the plan."""
    return _received(shape, mesh, source, plan(shape, mesh, source, target))


def _received(
    shape: Shape, mesh: Mesh, source: Layout, steps: list[Step] | tuple[Step, ...]
) -> tuple[int, int]:
    elements = count = 0
    layout = source
    for step in steps:
        elements += step_received(shape, mesh, layout, step)
        count += step.kind not in LOCAL and mesh.extent(step.axes) > 1
        layout = step.layout
    return elements, count


def step_received(shape: Shape, mesh: Mesh, before: Layout, step: Step) -> int:
    """Elements that the device which receives most receives in one step, by ring algorithms.

    With n devices in a group: an all-reduce 2 (n - 1) / n of the value, a reduce-scatter n - 1
    shards of what comes out and an all-gather n - 1 of what goes in (uneven ones are padded to the
    largest), an all-to-all and an exchange what the device lacks.
    """

    def local(layout: Layout) -> int:
        return prod(layout.local_shape(mesh, shape))

    n = mesh.extent(step.axes)
    match step.kind:
        case "all_reduce":
            return 2 * local(before) * (n - 1) // n
        case "reduce_scatter":
            return local(step.layout) * (n - 1)
        case "all_gather":
            return local(before) * (n - 1)
        case "all_to_all" | "exchange":
            return lacking(mesh, shape, before.complete, step.layout.complete)
        case "broadcast":
            return local(before)
        case _:
            return 0


class _Planner:
    def __init__(self, shape: Shape, mesh: Mesh, source: Layout, target: Layout):
        self.shape, self.mesh, self.target = shape, mesh, target
        self.now = source
        self.steps: list[Step] = []
        self.refine()

    def go(self, kind: str, axes: Axes, layout: Layout, dim: int = -1, concat: int = -1) -> None:
        self.steps.append(Step(kind, axes, layout, dim, concat))
        self.now = layout

    def run(self) -> list[Step]:
        while self.slice():
            pass
        self.scatter()
        self.reduce()
        while self.now.dims != self.target.dims:
            if not (self.slice() or self.exchange()):
                self.gather()
        self.contribute()
        return self.steps

    def refine(self) -> None:
        """Cut the axes of both layouts at each other's digits, so that they can be compared."""
        used = self.now.used + self.target.used

        def fine(layout: Layout) -> Layout:
            dims = tuple(a if sizes_of(a) else self.mesh.cut(a, used) for a in layout.dims)
            partial = self.mesh.cut(layout.partial, used)
            return Layout(layout.mesh, dims).with_partial(partial, layout.reduction)

        self.now, self.target = fine(self.now), fine(self.target)

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

    def left(self) -> Axes:
        """The partial axes that the target does not keep."""
        same = self.now.reduction == self.target.reduction
        return tuple(a for a in self.now.partial if not (same and a in self.target.partial))

    def scatter(self) -> None:
        """Reduce contributions straight into a dimension that the target splits so."""
        for dim, want in enumerate(self.target.dims):
            have, left = self.now.dims[dim], self.left()
            if self.prefix(dim) != len(have) or self.now.reduction == "any":
                continue
            axes = want[len(have) :]
            while axes and not (set(axes) <= set(left) and self.steps_in(dim, have, have + axes)):
                axes = axes[:-1]
            if axes and self.leads(dim, have + axes):
                kept = tuple(a for a in self.now.partial if a not in axes)
                layout = self.now.with_dim(dim, have + axes)
                layout = layout.with_partial(kept, self.now.reduction)
                self.go("reduce_scatter", axes, layout, dim)

    def reduce(self) -> None:
        """Reduce contributions where they are."""
        left = self.left()
        if left:
            kept = tuple(a for a in self.now.partial if a not in left)
            kind = "broadcast" if self.now.reduction == "any" else "all_reduce"
            self.go(kind, left, self.now.with_partial(kept, self.now.reduction))

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

    def pad(self) -> bool:
        """Split axes become partial ones where they lie: zeros around each shard."""
        if self.target.reduction != "sum" or self.now.reduction != "sum":
            return False
        for dim, have in enumerate(self.now.dims):
            n = len(have)
            while n and have[n - 1] in self.target.partial:
                n -= 1
            if n < len(have) and self.steps_in(dim, have[:n], have):
                layout = self.now.with_dim(dim, have[:n])
                layout = layout.with_partial(self.now.partial + have[n:])
                self.go("pad", have[n:], layout, dim)
        return bool(self.steps)

    def contribute(self) -> None:
        """A complete value becomes partial: the first device of each group keeps it."""
        new = tuple(a for a in self.target.partial if a not in self.now.partial)
        if new:
            self.go("contribute", new, self.target)
