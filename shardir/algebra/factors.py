"""Factors: the relation of an op's dimensions, from which all of its layouts follow.

    matmul   (i, k), (k, j) -> (i, j)          k is reduced
    reshape  (a, b) -> (a b)                    the result's dimension holds two factors

A factor is an index of the computation. Splitting the computation along a factor splits every
dimension that holds it; an operand's factor that a result lacks leaves that result partial; a
factor in `replicate` is unsharded; along one in `moved` elements come from other devices, so that
it is unsharded in the operands and may be split in the results.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import fsum, gcd, prod
from typing import NamedTuple

from shardir.algebra.estimates import ranked
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh, sizes_of
from shardir.algebra.redistribution import estimated_seconds
from shardir.algebra.slices import SlicedDim

Dims = tuple[tuple[str, ...], ...]
FactorAxes = dict[str, Axes]

MAX_CHOICES = 256
"""The maximum number of shardings of an op that are compared where its layouts disagree."""


@dataclass(frozen=True)
class Factors:
    """The factors of one op; `sizes` in order of appearance."""

    sizes: tuple[tuple[str, int], ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    replicate: frozenset[str] = frozenset()
    reduction: str = "sum"
    linear: str = ""
    """The reductions of partial operands that the op maps to a partial result of the same axes:
    "sum" when it is linear in all operands together (add, transpose), "any" when it only moves
    data (one operand), "" when operands must be complete."""
    moved: frozenset[str] = frozenset()
    sliding: frozenset[str] = frozenset()
    """Factors along which elements depend on their neighbours, as in a sliding window: devices may
    need elements that others hold (`TensorOp.exchange`). Dimensions that have such a factor, or a
    moved one, may differ in size, so explicit sizes of one's shards do not apply to the other."""
    sparse: frozenset[str] = frozenset()
    """Factors of a value of which the op reads few elements, those at its indices: an all-gather of
    the value may move far more than the elements that are needed."""
    dealt: tuple[str, ...] = ()
    """The order in which a strategy's numbers deal out devices to the factors; empty: the order of
    `sizes`."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((
            self.sizes, self.operands, self.results, self.replicate, self.reduction, self.moved,
            self.sliding, self.sparse,
        ))  # fmt: skip

    def __str__(self) -> str:
        def dims(d: Dims) -> str:
            return f"({', '.join(' '.join(f) or '1' for f in d)})"

        reduced = [f for f, _ in self.sizes if f in self.reduced]
        kinds = f" reduce {self.reduction} {', '.join(reduced)}" if reduced else ""
        replicated = f" replicate {', '.join(sorted(self.replicate))}" if self.replicate else ""
        moved = f" move {', '.join(sorted(self.moved))}" if self.moved else ""
        slide = f" slide {', '.join(sorted(self.sliding))}" if self.sliding else ""
        return (
            f"{', '.join(map(dims, self.operands))} -> {', '.join(map(dims, self.results))} "
            f"{{{', '.join(f'{f}={n}' for f, n in self.sizes)}}}{kinds}{replicated}{moved}{slide}"
        )

    @staticmethod
    def of(
        operands: Sequence[Sequence[str | SlicedDim]],
        results: Sequence[Sequence[str | SlicedDim]],
        shapes: Sequence[Shape],
        *,
        replicate: Sequence[str] = (),
        reduction: str = "sum",
        linear: str = "",
        moved: Sequence[str] = (),
        sliding: Sequence[str] = (),
        sparse: Sequence[str] = (),
        dealt: Sequence[str] = (),
    ) -> "Factors":
        """Return factors from a string per dimension ("i", "a b", or "" where nothing can split),
        or a SlicedDim.

        `shapes` are those of the operands, then of the results. The sizes of the factors of a
        merged dimension come from the side on which they stand alone.
        """
        dims = tuple(
            tuple(tuple(d.split()) if isinstance(d, str) else d for d in v)
            for v in (*operands, *results)
        )
        sizes: dict[str, int] = {}
        for value in dims:
            for d in value:
                for f in d:
                    sizes.setdefault(f, 0)
        for value, shape in zip(dims, shapes, strict=True):
            for d, n in zip(value, shape, strict=True):
                if len(d) == 1 and not isinstance(d, SlicedDim):
                    sizes[d[0]] = n
        return Factors(
            tuple(sizes.items()), dims[: len(operands)], dims[len(operands) :],
            frozenset(replicate), reduction, linear, frozenset(moved), frozenset(sliding),
            frozenset(sparse), tuple(dealt),
        )  # fmt: skip

    @cached_property
    def unrestricted(self) -> "Factors":
        """The same factors, those in `replicate` free to be split."""
        return replace(self, replicate=frozenset()) if self.replicate else self

    def with_sizes(self, sizes: Mapping[str, int]) -> "Factors":
        """Return the same with the sizes of these factors, which no dimension has alone."""
        return replace(self, sizes=tuple((f, sizes.get(f, n)) for f, n in self.sizes))

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(self.sizes)

    def size(self, factor: str) -> int:
        return self._sizes[factor]

    def dim_size(self, dim: tuple[str, ...]) -> int:
        """Return the size of a dimension, from its factors."""
        return sum(dim.slices) if isinstance(dim, SlicedDim) else prod(map(self.size, dim))

    @cached_property
    def reduced(self) -> frozenset[str]:
        """The factors of the operands that some result lacks."""
        ours = {f for v in self.operands for d in v for f in d}
        return frozenset(f for f in ours for v in self.results if all(f not in d for d in v))

    @cached_property
    def per_result(self) -> tuple[tuple[str, ...], ...]:
        """For each result, the operands' factors that it lacks, in order."""
        ours = {f for v in self.operands for d in v for f in d}
        return tuple(
            tuple(f for f, _ in self.sizes if f in ours and all(f not in d for d in v))
            for v in self.results
        )

    def assign(self, dim: tuple[str, ...], axes: Axes, mesh: Mesh) -> tuple[FactorAxes, bool]:
        """Return the axes of each factor of a dimension over `axes`, and whether these are all.

        A merged dimension fills its major factor first; only when that is cut to the last element
        can the next one be split. Axes are cut into sub-axes where that lets them fit.
        """
        if isinstance(dim, SlicedDim):
            is_sliced = dim.axes(tuple(axes), mesh) == mesh.simplify(axes)
            return {dim[0]: tuple(axes) if is_sliced else ()}, is_sliced
        if len(dim) == 1:
            keeps_sizes = dim[0] not in self.sliding | self.moved
            return {dim[0]: axes if keeps_sizes else tuple(axes)}, True
        if not dim or sizes_of(axes):
            return {}, mesh.extent(axes) == 1
        out: FactorAxes = {}
        todo = list(axes)
        for f in dim:
            left, mine = self._sizes[f], []
            while todo and left > 1:
                n = mesh.extent((todo[0],))
                part = gcd(n, left)
                if part == 1:
                    break
                if part == n:
                    mine.append(todo.pop(0))
                else:
                    major, todo[0] = mesh.split(todo[0], part)
                    mine.append(major)
                left //= part
            out[f] = mesh.simplify(tuple(mine))
            if left > 1:
                break
        return out, not todo

    def axes_of(self, layouts: Sequence[Layout], mesh: Mesh) -> FactorAxes:
        """Return the axes that split the factors in the layouts of the operands, then of the
        results; where layouts disagree, those of the first."""
        found: FactorAxes = {}
        for _, _, f, axes in self.assigned([l.dims for l in layouts], mesh):
            if axes:
                found.setdefault(f, axes)
        return found

    def assigned(
        self, values: Sequence[Sequence[Axes] | None], mesh: Mesh
    ) -> Iterator[tuple[int, int, str, Axes]]:
        """Yield the axes that each dimension of each value has for each of its factors: the value,
        the dimension, the factor, the axes.

        `values`: the axes of the dimensions of the operands, then of the results; None for one
        whose layout is open.
        """
        for i, (dims, of_dims) in enumerate(
            zip((*self.operands, *self.results), values, strict=True)
        ):
            for d, (dim, axes) in enumerate(zip(dims, of_dims, strict=True) if of_dims else ()):
                mine, _ = self.assign(dim, axes, mesh)
                for f in dim:
                    yield i, d, f, mine.get(f, ())

    def compose(self, dim: tuple[str, ...], chosen: FactorAxes, mesh: Mesh) -> Axes | None:
        """Return the axes of a dimension from those of its factors; None if no layout has them."""
        if isinstance(dim, SlicedDim):
            return dim.axes(chosen.get(dim[0], ()), mesh)
        if len(dim) == 1:
            return chosen.get(dim[0], ())
        out: list = []
        open_before = False
        for f in dim:
            axes = chosen.get(f, ())
            if axes and open_before:
                return None
            n, size = mesh.extent(axes), self._sizes[f]
            if size % n or sizes_of(axes):
                return None
            open_before = open_before or n < size
            out += axes
        return mesh.simplify(tuple(out))

    def layout(self, dims: Dims, chosen: FactorAxes, mesh: Mesh) -> Layout | None:
        """Return the layout of a value from the axes of its factors; None if there is none."""
        axes = []
        for dim in dims:
            mine = self.compose(dim, chosen, mesh)
            if mine is None:
                return None
            axes.append(mine)
        return Layout(mesh.name, tuple(axes))


class OpSharding(NamedTuple):
    """The sharding of one op: the axes of its factors, the layouts that its operands must have, and
    those of its results."""

    axes: FactorAxes
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]

    @property
    def on_host(self) -> "OpSharding":
        """The same sharding of an op that hosts compute."""
        ends = (tuple([l.on_host for l in end]) for end in (self.operands, self.results))
        return OpSharding(self.axes, *ends)


def try_op_sharding(
    factors: Factors, chosen: FactorAxes, mesh: Mesh, partial: Layout | None = None
) -> OpSharding | None:
    """Return the sharding that splits factors as `chosen`; None if an axis would be used twice or a
    merged dimension cannot be split so. `partial`: the partial axes that all operands keep."""
    used = [a for axes in chosen.values() for a in axes]
    retained = partial.partial if partial is not None else ()
    for i, a in enumerate(used):
        if any(mesh.overlap(a, b) for b in (*used[:i], *retained)):
            return None
    operands, results = [], []
    in_operands = {f: a for f, a in chosen.items() if f not in factors.moved}
    for dims in factors.operands:
        layout = factors.layout(dims, in_operands, mesh)
        if layout is None:
            return None
        operands.append(layout.with_partial(retained, partial.reduction) if partial else layout)
    for dims, lacking in zip(factors.results, factors.per_result, strict=True):
        layout = factors.layout(dims, chosen, mesh)
        if layout is None:
            return None
        reduced = [a for f in lacking for a in chosen.get(f, ())]
        reduced = mesh.simplify(tuple(sorted((*reduced, *retained), key=mesh.order)))
        reduction = partial.reduction if partial is not None else factors.reduction
        if retained and reduced != retained and reduction != factors.reduction:
            return None
        results.append(layout.with_partial(reduced, reduction))
    return OpSharding(chosen, tuple(operands), tuple(results))


@lru_cache(maxsize=65536)
def choose_op_sharding(
    factors: Factors,
    operands: tuple[Layout, ...],
    hints: tuple[Layout | None, ...],
    mesh: Mesh,
    shapes: tuple[Shape, ...],
    itemsizes: tuple[int, ...],
    shared: tuple[tuple[Layout, ...], ...] = (),
    converts: bool = False,
) -> OpSharding:
    """Return the cheapest sharding of an op.

    Args:
        operands: the current layouts of the operands.
        hints: per result, the desired layout, or None.
        shapes: global shapes of the operands, then of the results.
        itemsizes: the bytes of an element of each.
        shared: per operand, the layouts to which it is redistributed in any case, for other ops.
        converts: whether operands and results have several element types.

    A factor on which all layouts agree is split so. For the others, combinations of the proposed
    axes are compared by the estimated time of redistributions: of operands to the layouts that the
    op needs, and of results to the hints (without a hint, a partial result is reduced). Partial
    operands of a linear op may stay partial, or are reduced before it; those of a conversion stay
    partial, since the program chooses the type in which they are added. Of equal ones the most
    finely split is chosen, then the one that keeps partial operands.
    """
    partial = _kept_partial(factors, operands)
    wanted: dict[str, list[Axes]] = {f: [] for f, _ in factors.sizes}
    dims = [None if l is None else l.dims for l in (*operands, *hints)]
    for _, _, f, axes in factors.assigned(dims, mesh):
        proposal = () if f in factors.replicate else axes
        if proposal not in wanted[f]:
            wanted[f].append(proposal)
    if partial is None and all(len(w) <= 1 for w in wanted.values()):
        agreed = {f: w[0] for f, w in wanted.items() if w and w[0]}
        found = try_op_sharding(factors, agreed, mesh)
        if found is not None:
            return found

    def seconds(sharding: OpSharding) -> float:
        have = (*operands, *sharding.results)
        completed = [h or l.complete for h, l in zip(hints, sharding.results, strict=True)]
        return fsum(
            estimated_seconds(shape, mesh, source, target, size)
            for i, (shape, size, source, target) in enumerate(
                zip(shapes, itemsizes, have, (*sharding.operands, *completed), strict=True)
            )
            if source != target and not (i < len(shared) and target in shared[i])
        )

    def split(sharding: OpSharding) -> int:
        return mesh.extent(tuple(a for axes in sharding.axes.values() for a in axes))

    wider = {f: [*dict.fromkeys((*proposals, ()))] for f, proposals in wanted.items()}
    for proposals in (wanted, wider):  # the agreed axes may use an axis twice
        options = [
            found
            for chosen in _choices(factors, mesh, proposals)
            for keep in dict.fromkeys((partial, partial if converts else None))
            if (found := try_op_sharding(factors, chosen, mesh, keep)) is not None
        ]
        if options:
            return ranked(options, seconds, lambda option: -split(option))[0][1]
    unsharded = try_op_sharding(factors, {}, mesh)
    assert unsharded is not None, "every op can be computed unsharded"
    return unsharded


def _kept_partial(factors: Factors, operands: tuple[Layout, ...]) -> Layout | None:
    """Return the partial axes that pass through the op, as a layout that has them."""
    if not factors.linear or not operands or not operands[0].partial:
        return None
    first = operands[0]
    equal = all(o.partial == first.partial and o.reduction == first.reduction for o in operands)
    if equal and (first.reduction == "sum" or factors.linear == "any"):
        return first
    return None


def _choices(factors: Factors, mesh: Mesh, wanted: dict[str, list[Axes]]) -> Iterator[FactorAxes]:
    """Yield the combinations of the factors' proposals. A factor with several proposals or none may
    stay unsharded. One with a single proposal does not: redundant computation costs more than the
    communication that it saves. But a factor of a sparse value and one of the others may give up
    an axis for each other."""
    choices: dict[str, list[Axes]] = {}
    ours, theirs = (
        [
            a
            for f, some in wanted.items()
            if (f in factors.sparse) == sparse
            for x in some
            for a in x
        ]
        for sparse in (True, False)
    )
    agreed: dict[str, Axes] = {}
    count = 1
    for f, proposals in wanted.items():
        options = {*proposals, ()}
        if f in factors.replicate:
            options = {()}
        elif len(proposals) == 1:
            (agreed[f],) = proposals
            others = theirs if f in factors.sparse else ours
            if not any(mesh.overlap(a, b) for a in agreed[f] for b in others):
                options = {agreed[f]}
        choices[f] = sorted(options, key=lambda a: (-mesh.extent(a), a, sizes_of(a)))
        if count * len(options) > MAX_CHOICES:
            choices[f] = choices[f][:1]
        count *= len(choices[f])
    for combo in product(*choices.values()):
        chosen = {f: a for f, a in zip(choices, combo, strict=True) if a}
        used = [a for axes in chosen.values() for a in axes]
        given_up = [a for f, axes in agreed.items() if f not in chosen for a in axes]
        if all(any(mesh.overlap(a, b) for b in used) for a in given_up):
            yield chosen
