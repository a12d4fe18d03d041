"""Factors: the relation of an op's dimensions, from which all of its layouts follow.

    matmul   (i, k), (k, j) -> (i, j)          k is reduced
    reshape  (a, b) -> (a b)                    the result's dimension holds two factors

A factor is an index of the computation. To split the computation along a factor is to split every
dimension that holds it. A result that lacks an operand's factor is partial over the factor's axes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, prod
from typing import NamedTuple

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh, sizes_of
from shardir.algebra.slices import SlicedDim

Dims = tuple[tuple[str, ...], ...]
FactorAxes = dict[str, Axes]


@dataclass(frozen=True)
class Factors:
    """The factors of one op.

    Attributes:
        sizes: of the factors, in the order of appearance.
        operands, results: the factors of each dimension.
        replicate: factors that stay unsharded.
        reduction: of partial results.
        linear: the partial operands from which the op computes a result that is partial over their
            axes: "sum" if it is linear in all operands together (add, transpose), "any" if it only
            moves data (one operand), "" if operands must be complete.
        moved: factors along which elements come from other devices: unsharded in operands, and
            perhaps split in results.
        sliding: factors along which elements depend on neighbours, as in a sliding window: devices
            may need elements of other devices (`TensorOp.exchange`). Dimensions with a sliding or
            moved factor may differ in size, so explicit sizes of shards do not carry over.
        repeated: factors on which results that lack them do not depend: each device that splits one
            computes the whole result.
        sparse: factors of a value of which the op reads few elements, at its indices: an all-gather
            of the value may move far more elements than the op needs.
        dealt: the order in which a strategy's numbers deal out devices to factors; the order of
            `sizes` if empty.
    """

    sizes: tuple[tuple[str, int], ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    replicate: frozenset[str] = frozenset()
    reduction: str = "sum"
    linear: str = ""
    moved: frozenset[str] = frozenset()
    sliding: frozenset[str] = frozenset()
    repeated: frozenset[str] = frozenset()
    sparse: frozenset[str] = frozenset()
    dealt: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((
            self.sizes, self.operands, self.results, self.replicate, self.reduction, self.moved,
            self.sliding, self.repeated, self.sparse,
        ))  # fmt: skip

    def __str__(self) -> str:
        def dims(d: Dims) -> str:
            return f"({', '.join(' '.join(f) or '1' for f in d)})"

        reduced = [f for f, _ in self.sizes if f in self.reduced]
        kinds = f" reduce {self.reduction} {', '.join(reduced)}" if reduced else ""
        replicated = f" replicate {', '.join(sorted(self.replicate))}" if self.replicate else ""
        moved = f" move {', '.join(sorted(self.moved))}" if self.moved else ""
        repeat = f" repeat {', '.join(sorted(self.repeated))}" if self.repeated else ""
        slide = f" slide {', '.join(sorted(self.sliding))}" if self.sliding else ""
        return (
            f"{', '.join(map(dims, self.operands))} -> {', '.join(map(dims, self.results))} "
            f"{{{', '.join(f'{f}={n}' for f, n in self.sizes)}}}"
            f"{kinds}{replicated}{repeat}{moved}{slide}"
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
        repeated: Sequence[str] = (),
        sparse: Sequence[str] = (),
        dealt: Sequence[str] = (),
    ) -> "Factors":
        """Return the factors of an op.

        Args:
            operands, results: for each dimension a string ("i", "a b" for a merged dimension, "" if
                it cannot be split) or a SlicedDim.
            shapes: of the operands, then of the results. The size of a factor of a merged dimension
                comes from a dimension that has this factor only.
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
            frozenset(repeated), frozenset(sparse), tuple(dealt),
        )  # fmt: skip

    @cached_property
    def unrestricted(self) -> "Factors":
        """The factors with an empty `replicate`."""
        return replace(self, replicate=frozenset()) if self.replicate else self

    def with_sizes(self, sizes: Mapping[str, int]) -> "Factors":
        """Return the factors with other sizes, of factors that stand in merged dimensions only."""
        return replace(self, sizes=tuple((f, sizes.get(f, n)) for f, n in self.sizes))

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(self.sizes)

    def size(self, factor: str) -> int:
        """Return the size of a factor."""
        return self._sizes[factor]

    def dim_size(self, dim: tuple[str, ...]) -> int:
        """Return the size of a dimension, from its factors."""
        return sum(dim.slices) if isinstance(dim, SlicedDim) else prod(map(self.size, dim))

    @cached_property
    def reduced(self) -> frozenset[str]:
        """The operands' factors over which some result sums: it lacks them."""
        return frozenset(f for factors in self.per_result for f in factors)

    @cached_property
    def per_result(self) -> tuple[tuple[str, ...], ...]:
        """For each result, the operands' factors over which it sums, in order."""
        own = {f for v in self.operands for d in v for f in d} - self.repeated
        return tuple(
            tuple(f for f, _ in self.sizes if f in own and all(f not in d for d in v))
            for v in self.results
        )

    def assign(self, dim: tuple[str, ...], axes: Axes, mesh: Mesh) -> tuple[FactorAxes, bool]:
        """Return the axes of each factor of a dimension over `axes`, and whether all axes are
        assigned.

        The major factor of a merged dimension comes first; the next factor can be split only once
        the major factor is cut into single elements. Axes are cut into sub-axes if necessary.
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
            left, own = self._sizes[f], []
            while todo and left > 1:
                n = mesh.extent((todo[0],))
                part = gcd(n, left)
                if part == 1:
                    break
                if part == n:
                    own.append(todo.pop(0))
                else:
                    major, todo[0] = mesh.split(todo[0], part)
                    own.append(major)
                left //= part
            out[f] = mesh.simplify(tuple(own))
            if left > 1:
                break
        return out, not todo

    def axes_of(self, layouts: Sequence[Layout], mesh: Mesh) -> FactorAxes:
        """Return the axes that split the factors in layouts. If layouts disagree, the first one
        counts.

        Args:
            layouts: the layouts of the operands, then of the results.
        """
        chosen: FactorAxes = {}
        for _, _, f, axes in self.assignments([l.dims for l in layouts], mesh):
            if axes:
                chosen.setdefault(f, axes)
        return chosen

    def assignments(
        self, values: Sequence[Sequence[Axes] | None], mesh: Mesh
    ) -> Iterator[tuple[int, int, str, Axes]]:
        """Yield (value, dimension, factor, axes) for each factor of each dimension.

        Args:
            values: the axes of the dimensions of the operands, then of the results; None for a
                value whose layout is open.
        """
        for i, (dims, of_dims) in enumerate(
            zip((*self.operands, *self.results), values, strict=True)
        ):
            for d, (dim, axes) in enumerate(zip(dims, of_dims, strict=True) if of_dims else ()):
                own, _ = self.assign(dim, axes, mesh)
                for f in dim:
                    yield i, d, f, own.get(f, ())

    def compose(self, dim: tuple[str, ...], chosen: FactorAxes, mesh: Mesh) -> Axes | None:
        """Return the axes of a dimension from the axes of its factors; None if no layout has
        them."""
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
        """Return the layout of a value from the axes of its factors; None if no layout has
        them."""
        axes = []
        for dim in dims:
            own = self.compose(dim, chosen, mesh)
            if own is None:
                return None
            axes.append(own)
        return Layout(mesh.name, tuple(axes))


class OpSharding(NamedTuple):
    """The sharding of one op: the axes of its factors, the layouts that its operands must have, and
    the layouts of its results."""

    axes: FactorAxes
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]

    @property
    def on_host(self) -> "OpSharding":
        """The sharding with all layouts in host memory, of an op that hosts compute."""
        ends = (tuple([l.on_host for l in end]) for end in (self.operands, self.results))
        return OpSharding(self.axes, *ends)


def try_op_sharding(
    factors: Factors, chosen: FactorAxes, mesh: Mesh, partial: Layout | None = None
) -> OpSharding | None:
    """Return the sharding that splits factors as `chosen`; None if an axis would be used twice, or
    if a merged dimension cannot be split so.

    Args:
        partial: a layout with the partial axes that all operands keep.
    """
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
