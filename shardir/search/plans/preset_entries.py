"""The entries of a plan that a product of presets stands for, in a function.

fsdp(dp) * megatron(tp)   ->   %x: [{dp}], "up": [{dp}, {tp}], uses [{}, {tp}], recompute, ...

ddp                 the batch is split
zero1, zero2        the same, and states of optimizers are split along a dimension
zero3, fsdp         the same, and so are parameters, unevenly where the axes divide no dimension;
                    they are gathered for the forward part, and again for the backward part
megatron            columns of products and rows of the next ones are split
megatron+sequence   the same; of results of which that splits nothing the sequence is split
2d, hsdp, ...       products of these by other names (PRODUCTS)
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from math import prod
from typing import Any

from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import SSAValue

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.plan import (
    NameKind,
    PlanEntry,
    PresetLine,
    UnshardedParameter,
    one_if_equal,
    trimmed,
)
from shardir.diagnostics import ShardirError, coded, did_you_mean
from shardir.dialects.installed import of_registry
from shardir.dialects.nn.types import itemsize, unsharded_type
from shardir.dialects.train import Argument, Role, arguments
from shardir.rewriting.copying import copied
from shardir.rewriting.parts import cut_products, is_cut, parts
from shardir.search.plans.capacities import Capacity
from shardir.search.plans.presets import MIN_SHARD, Preset, ProductOfPresets, Structure, axes_of

PRESETS = {
    "ddp": Preset.DATA,
    "zero1": Preset.DATA,
    "zero2": Preset.DATA,
    "zero3": Preset.ZERO_3,
    "fsdp": Preset.ZERO_3,
    "megatron": Preset.MEGATRON,
    "megatron+sequence": Preset.MEGATRON_SEQUENCE,
}
"""The presets of plans that are on one axis or more, each with that of its activations and
parameters."""

SPLIT_STATES = ("zero1", "zero2")
"""Those that split the states of optimizers alone. Gradients are reduced into the layout of the
states anyway: both make the same program."""

LARGE, LARGE_VECTOR = 256, 65_536
"""The elements beyond which a plan names a parameter that is not split, and one of one
dimension."""

PRODUCTS = {
    "fsdp2": ("fsdp",),
    "tp": ("megatron",),
    "sp": ("megatron+sequence",),
    "hsdp": ("ddp", "fsdp"),
    "2d": ("fsdp", "megatron"),
    "3d": ("ddp", "fsdp", "megatron"),
}
"""The names of torch and others for presets, and for products of presets, each of which is on one
axis; a name of a single preset is on as many as that."""


def by_axis(line: PresetLine, mesh: Mesh) -> dict[str, str]:
    """Return the preset of each axis of a mesh; that of an axis that the product leaves out is
    `ddp`. A product without axes has one preset for each axis, major to minor, or one for all.

    Raises:
        ShardirError: a preset or an axis does not exist, or an axis has two presets.
    """
    factors = list(_single(line))
    names = [str(a) for a in mesh.names]
    named = [axes for _, axes in factors if axes]
    if named and len(named) < len(factors):
        raise ShardirError(coded("N4", f"expected axes of each preset or of none, got {line}"))
    if not named and len(factors) == 1:
        return dict.fromkeys(names, factors[0][0])
    if not named:
        if len(factors) != len(names):
            raise ShardirError(
                coded(
                    "N4",
                    f"expected {len(names)} presets, one for each axis of mesh @{mesh.name} "
                    f"({', '.join(names)}), got {line}",
                )
            )
        factors = [(n, (a,)) for (n, _), a in zip(factors, names, strict=True)]
    found: dict[str, str] = {}
    for name, axes in factors:
        for axis in axes:
            try:
                mesh.check_axis(Axis(axis))
            except ShardirError as e:
                raise ShardirError(coded("N4", str(e), use="correct the axis")) from None
            if axis in found:
                message = f"expected one preset on axis {axis}, got {found[axis]} and {name}"
                raise ShardirError(coded("N4", message))
            found[axis] = name
    return {a: found.get(a, "ddp") for a in names}


def splits_more_than_columns(line: PresetLine) -> bool:
    """Whether a product has presets other than those of columns. Raises ShardirError."""
    return any(PRESETS[name] in (Preset.DATA, Preset.ZERO_3) for name, _ in _single(line))


def _single(line: PresetLine) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the factors of a product of presets, with those that other names stand for. Raises
    ShardirError."""
    products = known_products()
    for name, axes in line.factors:
        if name not in products:
            hint = did_you_mean(name, products).removeprefix("; ")
            use = hint or f"there are {', '.join(products)}"
            raise ShardirError(coded("N4", f"expected a preset, got {name}", use=use))
        value = products[name]
        if callable(value):
            message = f"expected {name} on a line of its own, got {line}"
            raise ShardirError(coded("N4", message, use="write the other presets in other lines"))
        presets = _factors(name, value) if isinstance(value, str) else value
        n = len(presets)
        if n == 1:
            yield presets[0], axes
        elif len(axes) in (0, n):
            yield from ((preset, axes[i : i + 1]) for i, preset in enumerate(presets))
        else:
            raise ShardirError(coded("N4", f"expected {n} axes of {name}, got {line}"))


def known_products() -> dict[str, tuple[str, ...] | str | Callable[[str], Any]]:
    """Return the presets of each name for a product; of the names of installed packages the text of
    a product, or a function from axes to a plan."""
    own: dict[str, Any] = {**{name: (name,) for name in PRESETS}, **PRODUCTS}
    return of_registry("presets", own)


def _factors(name: str, text: str) -> tuple[str, ...]:
    """Return the presets of a product of presets without axes, `ddp * fsdp`. Raises
    ShardirError."""
    factors = tuple(word.strip() for word in text.split("*"))
    if unknown := [word for word in factors if word not in PRESETS]:
        raise ShardirError(
            f"the preset {name}: expected a product of {', '.join(PRESETS)}, got {unknown[0]!r}"
        )
    return factors


def parts_of(f: FuncOp, mesh: Mesh, presets: Mapping[str, str]) -> frozenset[str]:
    """Return the parameters that presets split by parts: those whose parts are columns that are
    split further than all columns are, or whose products have more elements on a device than they
    have."""
    found = cut_products(f)
    batch = tuple(
        [a for a in axes_of(mesh) if PRESETS[presets[a.name]] in (Preset.DATA, Preset.ZERO_3)]
    )
    if not found or set(axes_of(mesh)) == set(batch):
        return frozenset()
    trial = _divided(f, found)
    shards, uncut = (FunctionPresets(g, mesh, presets).product.column_shards for g in (trial, f))

    def is_split_by_parts(key: str, v: SSAValue, of_parts: SSAValue) -> bool:
        most = max(map(shards, parts(of_parts)))
        elements = sum(cut.elements for cut in found[key])
        return most > 1 and (
            most > uncut(v) or elements > mesh.extent(batch) * found[key][0].weight_elements
        )

    of_both = zip(f.body.block.args, trial.body.block.args, arguments(f), strict=True)
    return frozenset(
        a.key for v, w, a in of_both if a.key in found and is_split_by_parts(a.key, v, w)
    )


def _divided(f: FuncOp, keys: Collection[str]) -> FuncOp:
    """Return a copy of a function in which these parameters are cut in place of their products."""
    trial = copied(f)
    for key, of in cut_products(trial).items():
        for cut in of if key in keys else ():
            cut.split_product()
    return trial


def _is_large(shape: Shape) -> bool:
    """Whether a plan says of a parameter that it is not split: it is no short vector, and not
    tiny."""
    return prod(shape) > (LARGE if sum(n > 1 for n in shape) > 1 else LARGE_VECTOR)


class FunctionPresets:
    """A product of presets in a function: `presets` is that of each axis."""

    def __init__(self, f: FuncOp, mesh: Mesh, presets: Mapping[str, str]):
        self.f, self.mesh, self.presets = f, mesh, presets
        product = tuple([PRESETS[presets[a.name]] for a in axes_of(mesh)])
        self.structure = Structure(f)
        self.product = ProductOfPresets(product, self.structure, mesh)
        self.of_states = self._ordered(
            [a for a in axes_of(mesh) if presets[a.name] in SPLIT_STATES]
        )

    def missing(self) -> str:
        """Return what the presets split that the function has not: columns; "" if it has all."""
        columns, structure = self.product.columns, self.structure
        n = self.mesh.extent(columns)
        if n == 1 or self.product.most_columns > 1:
            return ""
        found = "none" if structure.columns else "no product after another one"
        message = f"expected columns of parameters that {n} devices divide, got {found}"
        name = f"@{self.f.sym_name.data}"
        return coded("N5", f"{message} in {name} for {self._text(columns)}")

    def entries(self, names: Mapping[SSAValue, str]) -> Iterator[tuple[NameKind, str, PlanEntry]]:
        """Yield what the presets say of each argument and value, by its name."""
        for v, argument in zip(self.f.body.block.args, arguments(self.f), strict=True):
            if isinstance(v.type, TensorType):
                kind = NameKind.PARAMETER if argument.is_retained else NameKind.INPUT
                yield kind, argument.key or names[v], self._argument(v, argument)
        if self.product.sequence:
            for v, layout in self._in_sequence():
                yield NameKind.VALUE, names[v], PlanEntry(layout=layout)

    def unsharded_parameters(self) -> Iterator[tuple[str, UnshardedParameter]]:
        """Yield what is said of large parameters that devices along some axis of a preset that
        splits parameters, or their states, all hold, by their names."""
        for v, argument in zip(self.f.body.block.args, arguments(self.f), strict=True):
            if v in self.structure.owner and _is_large(unsharded_type(v).get_shape()):
                found = self._unsharded(v, argument)
                if found is not None and argument.key is not None:
                    yield argument.key, found

    def _unsharded(self, v: SSAValue, argument: Argument) -> UnshardedParameter | None:
        entry, product, found = self._argument(v, argument), self.product, dict[str, bool]()
        layouts = [(product.columns, entry.layout), (product.retained, entry.layout)]
        if entry.states is not None:
            layouts.append((self.of_states, entry.states))
        for axes, layout in layouts:
            names = {a.name for a in axes}
            used = [a for a in layout.used if a.name in names] if layout else []
            shards = self.mesh.extent(tuple(used))
            if shards < self.mesh.extent(axes):
                reason, is_meant = self._why_unsharded(v, argument, axes, shards)
                found[f"{self._text(axes)}: {reason}"] = is_meant
        if not found:
            return None
        t = unsharded_type(v)
        size = prod(t.get_shape()) * itemsize(t)
        return UnshardedParameter(size, "; ".join(found), any(found.values()))

    def _why_unsharded(
        self, v: SSAValue, argument: Argument, axes: Axes, shards: int
    ) -> tuple[str, bool]:
        """Return why a parameter is in so many shards over the axes of a preset, and whether that
        is not how the preset is meant."""
        n = self.mesh.extent(axes)
        if axes != self.product.columns:
            return f"no dimension has shards of {MIN_SHARD} elements for {n} devices", True
        capacity = self.product.capacity(v)
        if capacity is None and argument.key in cut_products(self.f):
            capacity = self._capacity_of_parts(argument.key)
        if capacity is None:
            return "not columns of a product that are rows of the next one", False
        heads = " x ".join(map(str, capacity))
        if shards == prod(capacity):
            return f"its {heads} heads or columns are in {shards} shards on {n} devices", False
        split = f"; {shards} shards" if shards > 1 else ""
        return f"{n} devices do not divide its {heads} heads or columns{split}", True

    def _capacity_of_parts(self, key: str) -> Capacity | None:
        """Return the capacity of the first part that a parameter may be cut in."""
        trial = _divided(self.f, {key})
        product = FunctionPresets(trial, self.mesh, self.presets).product
        of_trial = zip(trial.body.block.args, arguments(trial), strict=True)
        return next(product.capacity(parts(v)[0]) for v, a in of_trial if a.key == key)

    def _text(self, axes: Axes) -> str:
        """Return the presets on axes, as a plan has them."""
        names = {self.presets[a.name] for a in axes}
        return f"{'/'.join(sorted(names))}({', '.join(map(str, axes))})"

    def _argument(self, v: SSAValue, argument: Argument) -> PlanEntry:
        product = self.product
        if v not in self.structure.owner:
            return PlanEntry(layout=trimmed(product.layout(v)))
        layout = product.retained_over(v, product.retained)
        used = product.retained_over(v, ()) if product.retained else None
        over = self._ordered([*product.retained, *self.of_states])
        return PlanEntry(
            layout=trimmed(layout),
            uses=None if used is None else trimmed(used),
            states=trimmed(product.retained_over(v, over))
            if self.of_states and argument.role is Role.PARAMETER
            else None,
            recompute=None if used is None else True,
            parts=one_if_equal([trimmed(product.retained_over(part, ())) for part in parts(v)])
            if is_cut(v)
            else None,
        )

    def _in_sequence(self) -> Iterator[tuple[SSAValue, Layout]]:
        """Yield the results of the forward part whose sequence is split, and those of products with
        parameters whose columns are: the sequence of their operands would pass on to them."""
        for op in self.structure.forward:
            roles, factors = self.structure.roles[op], self.structure.classes.factors[op]
            chosen = self.product.split(roles)
            split = chosen.get(roles.sequence or "") == self.product.sequence
            columns = roles.columns and self.structure.is_product(op)
            if not split and not columns:
                continue
            for v, dims in zip(op.results, factors.results, strict=True):
                layout = factors.layout(dims, chosen, self.mesh)
                if layout is not None and {*self.product.sequence} <= {*layout.used}:
                    yield v, trimmed(layout)

    def _ordered(self, axes: list[Axis]) -> Axes:
        return self.mesh.simplify(tuple(sorted(axes, key=self.mesh.order)))
