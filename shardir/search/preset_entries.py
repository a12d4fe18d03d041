"""The entries of a plan that a product of presets stands for, in a function.

fsdp(dp) * megatron(tp)   ->   %x: [{dp}], "up": [{dp}, {tp}], uses [{}, {tp}], recompute, ...

ddp                 the batch is split
zero1, zero2        the same, and states of optimizers are split along a dimension
zero3, fsdp         the same, and so are parameters; they are gathered for the forward part, and
                    again for the backward part
megatron            columns of products and rows of the next ones are split
megatron+sequence   the same; of results of which that splits nothing the sequence is split
2d                  fsdp on one axis and megatron on the next one
"""

from collections.abc import Iterator, Mapping

from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import SSAValue

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.plan import NameKind, PlanEntry, PresetLine, trimmed
from shardir.diagnostics import ShardirError, coded, did_you_mean
from shardir.dialects.train import Argument, Role, arguments
from shardir.rewriting.copying import copied
from shardir.rewriting.parts import cut_products, is_cut, parts
from shardir.search.presets import Preset, ProductOfPresets, Structure, axes_of

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

PAIR = "2d"
NAMES = (*PRESETS, PAIR)


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


def _single(line: PresetLine) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the factors of a product, with the two of `2d`. Raises ShardirError."""
    for name, axes in line.factors:
        if name not in NAMES:
            hint = did_you_mean(name, NAMES).removeprefix("; ")
            use = hint or f"there are {', '.join(NAMES)}"
            raise ShardirError(coded("N4", f"expected a preset, got {name}", use=use))
        if name != PAIR:
            yield name, axes
        elif len(axes) not in (0, 2):
            raise ShardirError(coded("N4", f"expected two axes of {PAIR}, got {line}"))
        else:
            yield "fsdp", axes[:1]
            yield "megatron", axes[1:]


def parts_of(f: FuncOp, mesh: Mesh, presets: Mapping[str, str]) -> frozenset[str]:
    """Return the parameters that presets split by parts: those whose parts are columns, and whose
    products have more elements on a device than they have."""
    batch = tuple(
        [a for a in axes_of(mesh) if PRESETS[presets[a.name]] in (Preset.DATA, Preset.ZERO_3)]
    )
    cuts = {
        key: of for key, of in cut_products(f).items()
        if sum(cut.elements for cut in of) > mesh.extent(batch) * of[0].weight_elements
    }  # fmt: skip
    if not cuts or set(axes_of(mesh)) == set(batch):
        return frozenset()
    trial = copied(f)
    for key, of in cut_products(trial).items():
        for cut in of if key in cuts else ():
            cut.divide()
    splits = FunctionPresets(trial, mesh, presets).product.splits_columns
    of_trial = zip(trial.body.block.args, arguments(trial), strict=True)
    return frozenset(a.key for v, a in of_trial if a.key in cuts and splits(parts(v)[0]))


class FunctionPresets:
    """A product of presets in a function: `presets` is that of each axis."""

    def __init__(self, f: FuncOp, mesh: Mesh, presets: Mapping[str, str]):
        self.f, self.mesh = f, mesh
        product = tuple([PRESETS[presets[a.name]] for a in axes_of(mesh)])
        self.structure = Structure(f)
        self.product = ProductOfPresets(product, self.structure, mesh)
        self.of_states = self._ordered(
            [a for a in axes_of(mesh) if presets[a.name] in SPLIT_STATES]
        )

    def check(self) -> None:
        """Raise ShardirError where there are no columns to split."""
        columns, structure = self.product.columns, self.structure
        n = self.mesh.extent(columns)
        if not any(structure.divides(n, c) for c in structure.columns or (None,)):
            found = "none" if structure.columns else "no product after another one"
            message = f"expected columns of parameters that {n} devices divide, got {found}"
            raise ShardirError(coded("N5", f"{message} in @{self.f.sym_name.data}"))

    def entries(self, names: Mapping[SSAValue, str]) -> Iterator[tuple[NameKind, str, PlanEntry]]:
        """Yield what the presets say of each argument and value, by its name."""
        for v, argument in zip(self.f.body.block.args, arguments(self.f), strict=True):
            if isinstance(v.type, TensorType):
                kind = NameKind.PARAMETER if argument.is_retained else NameKind.INPUT
                yield kind, argument.key or names[v], self._argument(v, argument)
        if self.product.sequence:
            for v, layout in self._in_sequence():
                yield NameKind.VALUE, names[v], PlanEntry(layout=layout)

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
            parts=trimmed(product.retained_over(parts(v)[0], ())) if is_cut(v) else None,
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
