"""Presets: known plans of a function, found by its structure, not by names.

    data               the batch is split
    zero-3             the batch; a parameter and its states are split along a dimension, and the
                       parameter is gathered for its uses (Rajbhandari et al., 2020)
    megatron           of two products with parameters in a row the first has its columns split, the
                       second its rows; so have tables that are looked up, and the last product
                       before a loss (Shoeybi et al., 2019)
    megatron+sequence  the same; ops in which that splits nothing have the sequence split
                       (Korthikanti et al., 2022)

A product has a preset for each axis of a mesh, which says what the axis splits: `zero-3` over dp
and `megatron` over tp split the batch and columns of the same ops.

The batch is the class of the first dimension of inputs (analysis/dimensions.py); the sequence that
of their second one, unless parameters are multiplied along it. Columns are a class that products
make before other products use it, so that it is not that of a residual connection.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from itertools import product, takewhile
from math import gcd, prod
from typing import NamedTuple

from xdsl.dialects.builtin import AnyFloat, TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, SSAValue

from shardir.algebra.factors import FactorAxes
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh
from shardir.analysis.dimensions import Dimension, DimensionClasses
from shardir.dialects.dist import SAME_VALUE
from shardir.dialects.nn import SplitOp
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.scores import Attending
from shardir.dialects.train import BackwardOp, Role, Update, arguments, updated_keys
from shardir.rewriting.parts import is_cut
from shardir.search.plans.capacities import (
    Capacity,
    ColumnCapacities,
    ColumnFactor,
    split_axes,
    split_factors,
)


class Preset(StrEnum):
    """The dimensions that the devices along an axis split."""

    DATA = "data"
    ZERO_3 = "zero-3"
    MEGATRON = "megatron"
    MEGATRON_SEQUENCE = "megatron+sequence"


Product = tuple[Preset, ...]
"""A preset for each axis of a mesh with several devices."""


def axes_of(mesh: Mesh) -> Axes:
    """Return the axes of a mesh along which there are several devices."""
    return tuple([a for a in mesh.names if mesh.extent((a,)) > 1])


def products(mesh: Mesh) -> Iterator[Product]:
    """Yield all products of presets."""
    return product(Preset, repeat=len(axes_of(mesh)))


class ParameterUse(NamedTuple):
    """A product with a parameter: the classes that are summed over, and those of the parameter that
    the result has. Of a table that is looked up the rows only."""

    rows: tuple[Dimension, ...]
    columns: tuple[Dimension, ...]
    is_lookup: bool = False


class Structure:
    """The dimensions of a function that presets split.

    Attributes:
        owner: the parameter of each parameter, of what is computed of one element by element, of
            its parts, and of gradients. A state that no step changes, and that is multiplied or
            looked up as a parameter is, counts as one: a frozen weight.
        batch, sequence: classes of dimensions, if there are any.
        columns: the classes that `megatron` splits; `capacities`: into how many shards.
        forward: the ops of the forward part.
        roles: of each op.
    """

    def __init__(self, f: FuncOp):
        block = f.body.block
        self.ops = [op for op in block.ops if isinstance(op, TensorOp)]
        forward = takewhile(lambda op: not isinstance(op, BackwardOp), block.ops)
        self.forward = [op for op in forward if isinstance(op, TensorOp)]
        self.classes = DimensionClasses(self.ops)
        self.owner: dict[SSAValue, SSAValue] = {}
        inputs: list[SSAValue] = []
        frozen: list[SSAValue] = []
        changed = {*updated_keys(f)}
        for v, argument in zip(block.args, arguments(f), strict=True):
            if isinstance(v.type, TensorType):
                if argument.role is Role.PARAMETER:
                    self.owner[v] = v
                elif argument.role is Role.INPUT:
                    inputs.append(v)
                elif argument.key not in changed and isinstance(v.type.element_type, AnyFloat):
                    frozen.append(v)
        self.owner.update((v, v) for v in frozen)
        self._add_owned(block)
        multiplied = {
            self.owner[v]
            for op in self.forward if self._parameter_use(op) is not None
            for v in op.operands if v in self.owner
        }  # fmt: skip
        buffers = {v for v in frozen if v not in multiplied}
        self.owner = {v: own for v, own in self.owner.items() if own not in buffers}
        use_of = {op: use for op in self.forward if (use := self._parameter_use(op)) is not None}
        uses = [*use_of.values()]
        multiplied = {c for use in uses for c in use.rows}
        self.batch = self._most_common(inputs, 0, set())
        self.sequence = self._most_common(inputs, 1, {self.batch, *multiplied})
        self.columns = self._columns(uses)
        self.capacities = ColumnCapacities(
            block.ops, self.forward, [op for op, use in use_of.items() if use.columns],
            self.classes, self.columns, (self.batch, self.sequence),
        )  # fmt: skip
        self._divisor: dict[Dimension, int] = {}
        for op in self.ops:
            factors = self.classes.factors[op]
            for f_, c in self.classes.of_factors(op).items():
                self._divisor[c] = gcd(self._divisor.get(c, 0), factors.size(f_))
        self.roles = {op: self._roles(op) for op in self.ops}

    # ---- structure ----

    def _add_owned(self, block: Block) -> None:
        """Find the owners of values that are made of a parameter, or that update it."""
        constant = set[SSAValue]()
        for op in block.ops:
            if isinstance(op, SAME_VALUE):
                self.classes.join_values(op.value, op.out)
                if op.value in self.owner:
                    self.owner[op.out] = self.owner[op.value]
            if not isinstance(op, TensorOp):
                continue
            given = [v for v in op.operands if v not in constant and _elements(v) > 1]
            if all(v in constant for v in op.operands):
                constant.update(op.results)
            elif given and all(v in self.owner for v in given):
                own = self.owner[given[0]]
                is_cut = isinstance(op, SplitOp)
                made = (v for v in op.results if is_cut or _elements(v) == _elements(own))
                self.owner.update((v, own) for v in made)
        for op in reversed(self.ops):
            if isinstance(op, Update):
                own = self.owner.get(op.operands[0])
            elif self.classes.factors[op].reduced:
                own = None
            else:
                own = next((self.owner[v] for v in op.results if v in self.owner), None)
            if own is not None:
                for v in op.operands:
                    if v not in constant and _elements(v) == _elements(own):
                        self.owner.setdefault(v, own)

    def _parameter_use(self, op: TensorOp) -> ParameterUse | None:
        """Return the product or lookup that an op is; None if it is neither."""
        factors, classes = self.classes.factors[op], self.classes.of_factors(op)
        owned = {i for i, v in enumerate(op.operands) if v in self.owner}
        dims = [[f for dim in of for f in dim if f in classes] for of in factors.operands]
        others = {f for i, fs in enumerate(dims) if i not in owned for f in fs}
        mine = [f for i in sorted(owned) for f in dims[i]]
        summed = [f for f in mine if f in factors.reduced]
        if not others or not summed:
            return None
        if factors.sparse:
            ids = max((factors.size(f) for f in others), default=1)
            rows = [classes[f] for f in summed if factors.size(f) > ids]
            return ParameterUse(tuple(rows), (), is_lookup=True)
        rows = [classes[f] for f in summed if f in others]
        columns = [classes[f] for f in mine if f not in others and f not in factors.reduced]
        return ParameterUse(tuple(rows), tuple(columns)) if rows else None

    def is_product(self, op: TensorOp) -> bool:
        """Whether an op is a product with a parameter whose columns the result has."""
        use = self._parameter_use(op)
        return use is not None and bool(use.columns)

    def _most_common(
        self, inputs: Sequence[SSAValue], d: int, excluded: set[Dimension | None]
    ) -> Dimension | None:
        """Return the class that most inputs have as dimension d."""
        found = Counter(
            c
            for v in inputs
            if len(_shape(v)) > d and (c := self.classes.of((v, d))) not in excluded
        )
        return found.most_common(1)[0][0] if found else None

    def _columns(self, uses: Sequence[ParameterUse]) -> frozenset[Dimension]:
        """Return the classes that are split as columns of one product and rows of the next."""
        made, used = dict[Dimension, int](), dict[Dimension, int]()
        for i, use in enumerate(uses):
            made.update(dict.fromkeys(use.columns, i))
            for c in use.rows:
                used.setdefault(c, i)
        normalised = {
            c for op in self.forward for f, c in self.classes.of_factors(op).items()
            if f in self.classes.factors[op].replicate and not isinstance(op, Attending)
        }  # fmt: skip
        found = {c for use in uses if use.is_lookup for c in use.rows}
        for use in uses:
            if found.isdisjoint((*use.rows, *use.columns)):
                split = (
                    c for c in use.columns if c not in (self.batch, self.sequence)
                    and (made[c] < used[c] if c in used else c in normalised)
                )  # fmt: skip
                found.update([*split][:1])
        return frozenset(found)

    def divides(self, extent: int, c: Dimension | None) -> bool:
        """Whether all dimensions of a class can be split so many ways."""
        return extent == 1 or (c is not None and self._divisor.get(c, 0) % extent == 0)

    def _roles(self, op: TensorOp) -> "OpRoles":
        classes = self.classes.of_factors(op)
        first = {c: f for f, c in reversed(classes.items())}
        batch = first.get(self.batch) if self.batch else None
        return OpRoles(
            batch,
            first.get(self.sequence) if self.sequence and batch else None,
            self.capacities.of_factors(op),
            () if batch else tuple(self._retained(op)),
        )

    def _retained(self, op: TensorOp) -> Iterator["RetainedDim"]:
        """Yield the dimensions of the parameter that an op is for."""
        factors = self.classes.factors[op]
        dims_of = zip(
            (*op.operands, *op.results), (*factors.operands, *factors.results), strict=True
        )
        v, dims = next(((v, dims) for v, dims in dims_of if v in self.owner), (None, ()))
        if v is None:
            return
        mine = [self.classes.of((v, d)) for d in range(len(dims))]
        for d, n in enumerate(_shape(self.owner[v])):
            c = self.classes.of((self.owner[v], d))
            same = [e for e, other in enumerate(mine) if other == c]
            at = d if d in same else next(iter(same), None)
            f = None if at is None else next((f for f in dims[at] if factors.size(f) > 1), None)
            yield RetainedDim(n, self.capacities.of((self.owner[v], d)), f)


class RetainedDim(NamedTuple):
    """A dimension of an op's parameter: its size, its capacity if it is of columns, and the op's
    factor."""

    size: int
    columns: Capacity
    factor: str | None


class OpRoles(NamedTuple):
    """The factors of an op that presets split.

    Attributes:
        batch, sequence: the factors.
        columns: the factors of each dimension of columns.
        retained: the dimensions of the parameter that the op is for, of one without a batch.
    """

    batch: str | None
    sequence: str | None
    columns: tuple[tuple[ColumnFactor, ...], ...]
    retained: tuple[RetainedDim, ...]


class ProductOfPresets:
    """A preset for each axis of a mesh with several devices: what each op splits."""

    def __init__(self, presets: Product, structure: Structure, mesh: Mesh):
        def along(*those: Preset) -> Axes:
            axes = zip(axes_of(mesh), presets, strict=True)
            return mesh.simplify(tuple([a for a, preset in axes if preset in those]))

        self.presets, self.structure, self.mesh = presets, structure, mesh
        self.batch = along(Preset.DATA, Preset.ZERO_3)
        self.retained = along(Preset.ZERO_3)
        self.sequence = along(Preset.MEGATRON_SEQUENCE)
        self.columns = along(Preset.MEGATRON, Preset.MEGATRON_SEQUENCE)
        self._splits: dict[OpRoles, FactorAxes] = {}

    def __str__(self) -> str:
        return " * ".join(
            f"{p}({a})" for p, a in zip(self.presets, axes_of(self.mesh), strict=True)
        )

    @property
    def exists(self) -> bool:
        """Whether there is all that the presets split, and whether it can be split."""
        s, extent = self.structure, self.mesh.extent
        return (
            s.divides(extent(self.batch), s.batch)
            and s.divides(extent(self.sequence), s.sequence)
            and (not self.columns or self.most_columns == extent(self.columns))
        )

    @cached_property
    def most_columns(self) -> int:
        """The largest number of shards in which columns of a parameter are split."""
        own = (v for v, owner in self.structure.owner.items() if v is owner)
        dims = ((v, d) for v in own for d in range(len(_shape(v))))
        return max((self.mesh.extent(self._columns_of(*dim)) for dim in dims), default=1)

    def layout(self, v: SSAValue) -> Layout:
        """Return the layout of an argument: an input or a state has the first dimensions of the
        batch's class and of columns split (a cache of keys its samples and heads), a parameter its
        columns, and the dimension that `zero-3` retains in shards. The axes of a dimension are in
        the order of the mesh, as in the search."""
        if v in self.structure.owner:
            dims = self.retained_over(v, self.retained).dims
            ordered = [self.mesh.simplify(tuple(sorted(a, key=self.mesh.order))) for a in dims]
            return Layout(self.mesh.name, tuple(ordered))
        classes = [self.structure.classes.of((v, d)) for d in range(len(_shape(v)))]
        first = next((d for d, c in enumerate(classes) if c == self.structure.batch), None)
        dims = [self.batch if d == first else () for d in range(len(classes))]
        column = self._column(v)
        if column is not None and column != first:
            dims[column] = self._columns_of(v, column)
        return Layout(self.mesh.name, tuple(dims))

    def column_shards(self, v: SSAValue) -> int:
        """Return the number of shards in which the columns of a value are split; 1 if it has none
        that can be."""
        column = self._column(v)
        return 1 if column is None else self.mesh.extent(self._columns_of(v, column))

    def capacity(self, v: SSAValue) -> Capacity | None:
        """Return the capacity of the first dimension of columns of a value, if it has one."""
        structure = self.structure
        dims = ((v, d) for d in range(len(_shape(v))))
        of_columns = (d for d in dims if structure.classes.of(d) in structure.columns)
        return next((structure.capacities.of(d) for d in of_columns), None)

    def _columns_of(self, v: SSAValue, d: int) -> Axes:
        """Return the axes that split a dimension as columns."""
        return split_axes(self.structure.capacities.of((v, d)), self.columns, self.mesh)

    def _column(self, v: SSAValue) -> int | None:
        """Return the first dimension that is of columns which are split."""
        return next((d for d in range(len(_shape(v))) if self._columns_of(v, d)), None)

    def retained_over(self, v: SSAValue, over: Axes) -> Layout:
        """Return the layout of a parameter or state with its columns split, and one dimension over
        these axes: within each part of its columns, so that it is gathered over these axes alone. A
        parameter that is cut in parts has another dimension split, if it has one, so that each
        device has a part of each."""
        shape, column = _shape(v), self._column(v)
        dims: list[Axes] = [()] * len(shape)
        if column is not None:
            dims[column] = self._columns_of(v, column)
            if is_cut(v):
                dims[column], n = (), self.mesh.extent(self.columns)
                others = (d for d, size in enumerate(shape) if d != column and size % n == 0)
                if (other := next(others, None)) is not None:
                    dims[other] = self.columns
        d = _retained_dim(shape, dims, over, self.mesh)
        if d is not None:
            dims[d] = self.mesh.simplify((*dims[d], *over))
        return Layout(self.mesh.name, tuple(dims))

    def split(self, roles: OpRoles) -> FactorAxes:
        """Return the axes that split each factor of an op."""
        if roles not in self._splits:
            self._splits[roles] = self._split(roles)
        return self._splits[roles]

    def _split(self, roles: OpRoles) -> FactorAxes:
        found = FactorAxes()
        if roles.batch is not None and self.batch:
            found[roles.batch] = self.batch
        of_dims = [split_factors(dim, self.columns, self.mesh) for dim in roles.columns]
        columns = max(of_dims, key=self._shards, default=FactorAxes())
        if columns:
            found.update(columns)
        elif roles.sequence is not None and self.sequence:
            found[roles.sequence] = self.sequence
        if self.retained:
            shape = tuple([dim.size for dim in roles.retained])
            dims = [split_axes(dim.columns, self.columns, self.mesh) for dim in roles.retained]
            d = _retained_dim(shape, dims, self.retained, self.mesh)
            if d is not None and (f := roles.retained[d].factor) is not None:
                axes = sorted((*dims[d], *self.retained), key=self.mesh.order)
                found[f] = self.mesh.simplify(tuple(axes))
        return found

    def _shards(self, of: FactorAxes) -> int:
        """Return the number of shards that factors are split in."""
        return self.mesh.extent(tuple([a for axes in of.values() for a in axes]))


MIN_SHARD = 8
"""How many elements a parameter has for each device, at least, to be split unevenly."""


def _retained_dim(shape: Shape, dims: Sequence[Axes], over: Axes, mesh: Mesh) -> int | None:
    """Return the dimension that is split over further axes: the first one that these divide, or
    else the one of the smallest padding, of those that are not split yet, as shards of shards would
    not be those of both. None of a parameter that has few elements."""
    n = mesh.extent(over)
    if n == 1:
        return None
    for d, size in enumerate(shape):
        if size % mesh.extent((*dims[d], *over)) == 0:
            return d
    if prod(shape) < MIN_SHARD * n * prod(map(mesh.extent, dims)):
        return None
    unsplit = (d for d, size in enumerate(shape) if size > 1 and not dims[d])
    return min(unsplit, key=lambda d: -(-shape[d] // n) * n / shape[d], default=None)


def _shape(v: SSAValue) -> Shape:
    assert isinstance(v.type, TensorType)
    return v.type.get_shape()


def _elements(v: SSAValue) -> int:
    return prod(_shape(v))
