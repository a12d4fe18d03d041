"""Capacities: into how many shards the columns that `megatron` splits can be cut, where they differ
along one class of dimensions.

    %o = nn.attention %q, %k, %v    of 8 heads of %q and 2 of %k and %v: (2, 4), (2), (2)

A capacity is the sizes of the factors of a dimension, major to minor, as far as all ops that pass
the dimension on can split them. Over 4 devices queries are split over all of the axis, and keys
over its major half: each shard of keys is on the two devices whose queries use it.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from math import gcd, prod
from typing import NamedTuple

from xdsl.ir import Operation, SSAValue

from shardir.algebra.factors import FactorAxes
from shardir.algebra.layout import Shape
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.slices import SlicedDim
from shardir.analysis.dimensions import Dimension, DimensionClasses
from shardir.dialects.dist import SAME_VALUE
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.parts import cuts_argument

Capacity = tuple[int, ...]
"""Sizes of factors, major to minor, none of them 1."""


class ColumnFactor(NamedTuple):
    """A factor of columns, or one within them, with its size and its capacity."""

    name: str
    size: int
    capacity: Capacity


class _ColumnDim(NamedTuple):
    """A dimension with its factors, up to the first that is neither of columns nor split within
    them, and its number of elements, or of slices."""

    dimension: Dimension
    factors: list[str]
    size: int


class ColumnCapacities:
    """The capacities of the dimensions of columns of a function.

    Args:
        ops: all ops of the function; `forward`: the tensor ops of its forward part; `products`: of
            these the products with parameters.
        classes: of dimensions; `columns`: those that are split, `other`: those of batch and
            sequence.
    """

    def __init__(
        self,
        ops: Iterable[Operation],
        forward: Sequence[TensorOp],
        products: Collection[TensorOp],
        classes: DimensionClasses,
        columns: Collection[Dimension],
        other: Collection[Dimension | None],
    ):
        self.classes, self.columns = classes, columns
        self._same: dict[SSAValue, SSAValue] = {}
        tensor_ops: list[TensorOp] = []
        for op in ops:
            if isinstance(op, SAME_VALUE):
                self._same[op.out] = self._same.get(op.value, op.value)
            elif isinstance(op, TensorOp) and not cuts_argument(op):
                tensor_ops.append(op)
        self._within = self._classes_within(forward, products) - {*other}
        self._found: dict[Dimension, Capacity] = {}
        if columns:
            self._solve(tensor_ops)

    def of(self, dimension: Dimension) -> Capacity:
        """Return the capacity of a dimension; empty where it is not of columns."""
        key = self._key(dimension)
        if self.classes.of(key) not in self.columns:
            return ()
        return self._found.get(key, (_shape(key[0])[key[1]],))

    def of_factors(self, op: TensorOp) -> tuple[tuple[ColumnFactor, ...], ...]:
        """Return the factors of each dimension of columns of an op, major to minor."""
        found: dict[tuple[ColumnFactor, ...], None] = {}
        for key, names, _ in self._dims(op):
            if self.classes.of(key) in self.columns:
                rest, factors = self.of(key), list[ColumnFactor]()
                for f in names:
                    size = self.classes.factors[op].size(f)
                    mine, rest = _cut(rest, size)
                    factors.append(ColumnFactor(f, size, mine))
                found[tuple(factors)] = None
        return tuple(found)

    # ---- structure ----

    def _key(self, dimension: Dimension) -> Dimension:
        v, d = dimension
        return self._same.get(v, v), d

    def _classes_within(
        self, forward: Sequence[TensorOp], products: Collection[TensorOp]
    ) -> set[Dimension]:
        """Return the classes of factors that may be split within columns: those that follow columns
        in a merged dimension, such as the queries' heads of one head of keys. Where columns of
        a product are reshaped into several dimensions, the last one is what a head consists of; it
        is not split."""
        found, refused = set[Dimension](), {*self.columns}
        made = set[Dimension]()  # columns as products make them
        for op in forward:
            factors, classes = self.classes.factors[op], self.classes.of_factors(op)
            refused |= {classes[f] for f in factors.reduced | factors.replicate if f in classes}
            of_columns = set[str]()
            for v, dims in zip(op.operands, factors.operands, strict=True):
                for d, dim in enumerate(dims):
                    names = [f for f in dim if factors.size(f) > 1]
                    if self._key((v, d)) in made:
                        of_columns |= {*dim} if len(names) == 1 else set()
                        refused |= {classes[f] for f in names[1:][-1:] if f in classes}
            for v, dims in zip(op.results, factors.results, strict=True):
                for d, dim in enumerate(dims):
                    if len(dim) == 1 and (op in products or dim[0] in of_columns):
                        made.add(self._key((v, d)))
            for dim in (dim for dims in (*factors.operands, *factors.results) for dim in dims):
                names = [f for f in dim if factors.size(f) > 1]
                if len(names) > 1 and classes[names[0]] in self.columns:
                    found |= {classes[f] for f in names[1:] if f in classes}
        return found - refused

    def _dims(self, op: TensorOp) -> Iterator["_ColumnDim"]:
        """Yield the dimensions of an op that are of columns, or are split within them."""
        factors, classes = self.classes.factors[op], self.classes.of_factors(op)
        dims_of = (*factors.operands, *factors.results)
        for v, dims in zip((*op.operands, *op.results), dims_of, strict=True):
            for d, dim in enumerate(dims):
                names = [f for f in dim if factors.size(f) > 1]
                if not names:
                    continue
                major = classes[names[0]]
                if major not in self.columns and major not in self._within:
                    continue
                kept = names[:1]
                for f in names[1:]:
                    if f in classes and classes[f] not in self._within:
                        break
                    kept.append(f)
                size = factors.size(kept[0]) if isinstance(dim, SlicedDim) else _shape(v)[d]
                yield _ColumnDim(self._key((v, d)), kept, size)

    # ---- the largest capacities ----

    def _solve(self, ops: Sequence[TensorOp]) -> None:
        """Cut capacities, which begin as the sizes of dimensions, until all ops can split them."""
        dims = {op: found for op in ops if (found := [*self._dims(op)])}
        users = defaultdict[Dimension, list[TensorOp]](list)
        for op, of_op in dims.items():
            for key, _, size in of_op:
                users[key].append(op)
                self._found.setdefault(key, (size,))
        queue = dict.fromkeys(dims)
        while queue:
            op = next(iter(queue))
            del queue[op]
            for key, capacity in self._cut_by(op, dims[op]):
                if capacity != self._found[key]:
                    self._found[key] = capacity
                    queue.update(dict.fromkeys(users[key]))

    def _cut_by(
        self, op: TensorOp, dims: Sequence["_ColumnDim"]
    ) -> Iterator[tuple[Dimension, Capacity]]:
        """Yield the capacities of an op's dimensions that the op can split."""
        sizes = {f: self.classes.factors[op].size(f) for _, names, _ in dims for f in names}
        found: dict[str, Capacity] = {}
        for key, names, _ in dims:
            rest = self._found[key]
            for f in names:
                mine, rest = _cut(rest, sizes[f])
                found[f] = _common(found[f], mine) if f in found else mine
        for _, names, _ in dims:  # a factor is split where those before it are split to the end
            for before, f in pairwise(names):
                if prod(found[before]) != sizes[before]:
                    found[f] = ()
        for key, names, _ in dims:
            capacity = list[int]()
            for f in names:
                capacity += found[f]
                if prod(found[f]) != sizes[f]:
                    break
            yield key, tuple(capacity)


def split_factors(factors: Sequence[ColumnFactor], axes: Axes, mesh: Mesh) -> FactorAxes:
    """Return the axes of the factors of a dimension, which has as many of these axes as they can
    split, major ones first."""
    found, rest = FactorAxes(), axes
    for f, size, capacity in factors:
        found[f], rest = _take(capacity, rest, mesh)
        if mesh.extent(found[f]) != size:
            break
    return {f: mine for f, mine in found.items() if mine}


def split_axes(capacity: Capacity, axes: Axes, mesh: Mesh) -> Axes:
    """Return as many axes, major ones first, as a dimension of this capacity can be split over."""
    return _take(capacity, axes, mesh)[0]


def _take(capacity: Capacity, axes: Axes, mesh: Mesh) -> tuple[Axes, Axes]:
    """Return the major part of axes that splits a dimension of this capacity, and the rest."""
    found, rest = list[Axis](), [*axes]
    for left in capacity:
        while left > 1 and rest and (part := gcd(mesh.extent((rest[0],)), left)) > 1:
            if part == mesh.extent((rest[0],)):
                found.append(rest.pop(0))
            else:
                major, rest[0] = mesh.split(rest[0], part)
                found.append(major)
            left //= part
        if left > 1:
            break
    return mesh.simplify(tuple(found)), tuple(rest)


def _cut(capacity: Capacity, size: int) -> tuple[Capacity, Capacity]:
    """Return what a factor of this size has of a dimension's capacity, and what those after it
    have: nothing, unless the factor can be split to the last element."""
    found, rest = list[int](), [*capacity]
    while size > 1 and rest:
        part = gcd(rest[0], size)
        if part > 1:
            found.append(part)
        size //= part
        if part == rest[0]:
            rest.pop(0)
        else:
            rest[0] //= part
            if size > 1:
                break
    return tuple(found), tuple(rest) if size == 1 else ()


def _common(a: Capacity, b: Capacity) -> Capacity:
    """Return the largest capacity that is within both."""
    found = list[int]()
    for size in b:
        mine, a = _cut(a, size)
        found += mine
        if prod(mine) != size:
            break
    return tuple(found)


def _shape(v: SSAValue) -> Shape:
    return unsharded_type(v).get_shape()
