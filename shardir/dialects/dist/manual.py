"""Manual computations: functions of the local view, called in the global view.

    func.func private @ring(%x: tensor<2x4xf32, #dist.local<@m, [{d}, {}]>>)
        -> tensor<2x4xf32, #dist.local<@m, [{d}, {}]>> { ... collectives ... }

    %y = dist.manual @ring(%x) over <d = 4> strategy<(({d}, {}),) -> (({d}, {}),)>
           : (tensor<8x4xf32>) -> tensor<8x4xf32>

The operands are split as the strategy says, each device runs the function on its shards, and the
results are assembled. Layouts propagate to the operands and from the results, never through.

Over the axes of the mesh that `over` leaves out, the free ones, the function is global: its values
are equal along them. The strategy may split dimensions over free axes too, minor to the others,
which the body maps (shardir/rewriting/free_axes.py): all of these axes split one factor.
"""

from itertools import islice
from math import prod
from typing import ClassVar

from xdsl.dialects.builtin import SymbolRefAttr, TensorType
from xdsl.dialects.func import FuncOp
from xdsl.irdl import prop_def, var_operand_def, var_result_def
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Mesh, axes_text
from shardir.algebra.strategy import Strategy
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist.attributes import MeshAttr, StrategyAttr
from shardir.dialects.dist.types import (
    find_mesh,
    is_local,
    local,
    module_of,
    type_layout,
    verification,
)
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.symbols import find_symbol


@op_definition
class ManualOp(TensorOp):
    """A function of the local view on the shards of the operands. Its collectives, and the values
    that vary over axes (`partial any`), are its own: nothing is inferred in it. `over` has axes of
    the mesh, and the strategy the layouts of operands and results. `lower-to-spmd` inlines it"""

    name = "dist.manual"
    callee = prop_def(SymbolRefAttr)
    manual_axes = prop_def(MeshAttr)
    xs = var_operand_def(TensorType)
    outs = var_result_def(TensorType)
    assembly_format = f"$callee `(` $xs `)` `over` $manual_axes {STRATEGY}"
    INFERRED: ClassVar[bool] = False
    KEEPS_STRATEGY: ClassVar[bool] = True

    @property
    def function(self) -> FuncOp:
        """The function. Raises VerifyException if none of this name has a body."""
        name = self.callee.string_value()
        f = find_symbol(module_of(self), FuncOp, name)
        if f is None or not f.body.blocks:
            message = f"expected a function @{name} with a body in the local view, got none"
            raise VerifyException(coded("T13", message, use="write it"))
        return f

    @property
    def mesh(self) -> Mesh:
        """The mesh of the function's types."""
        return self._mesh_of(self.function)

    @property
    def cuts(self) -> tuple[list[tuple[Axes, ...]], list[tuple[Axes, ...]]]:
        """The axes of each dimension of each operand, and of each result."""
        assert self.strategy is not None
        data = self.strategy.data
        operands, results = (
            [tuple([c for c in dims if not isinstance(c, int)]) for dims in side]
            for side in (data.operands, data.results or ())
        )
        return operands, results

    @classmethod
    def check_results(cls, operands: Types, results: Types, props: Props) -> None:
        if not results:
            raise ShardirError(coded("T13", "expected results of dist.manual, got none", use=""))
        sizes = _sizes(props)
        for what, t, dims in _values(operands, results, props):
            for d, (size, axes) in enumerate(zip(t.get_shape(), dims, strict=True)):
                where = f"dimension {d} of {what}"
                manual = _manual(axes, sizes)
                if other := [a for a in axes if a.size]:
                    message = f"{where}: expected whole axes, got {other[0]}"
                    raise ShardirError(coded("T13", message, use="split it over whole axes"))
                if axes[: len(manual)] != manual:
                    message = f"{where}: expected {axes_text(manual)} major, got {axes_text(axes)}"
                    raise ShardirError(coded("T13", message, use="write other axes after them"))
                n = prod(sizes[a.name] for a in manual)
                if size % n:
                    message = f"{where}: expected a size that {n} devices divide, got {size}"
                    raise ShardirError(coded("T13", message, use="pad it"))

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        """A factor for each axis, of the devices along it; one for the dimensions that free axes
        split; and one for the rest of each dimension, which stays unsharded."""
        sizes = _sizes(props)
        devices = {f"device_{name}": n for name, n in sizes.items()}
        rest: dict[str, int] = {}
        mapped: dict[str, int] = {}
        values: list[list[str]] = []
        entries: list[tuple[list[str], int, str]] = []
        for _, t, dims in _values(operands, results, props):
            for size, axes in zip(t.get_shape(), dims, strict=True):
                manual = _manual(axes, sizes)
                own = size // prod(sizes[a.name] for a in manual)
                free = "free" + "".join(f"_{a.name}" for a in axes if a not in manual)
                if len(axes) > len(manual):
                    mapped[free] = min(own, mapped.get(free, own))
                entries.append(([f"device_{a.name}" for a in manual], own, free))
        shapes = [t.get_shape() for t in (*operands, *results)]
        at = iter(entries)
        for shape in shapes:
            values.append([])
            for names, own, free in islice(at, len(shape)):
                major, name = mapped.get(free, 1), f"r{len(rest)}"
                rest[name] = own // major
                values[-1].append(" ".join([*names, *([free] if free in mapped else []), name]))
        n = len(operands)
        factors = Factors.of(
            values[:n], values[n:], shapes,
            replicate=[*rest], repeated=[*devices, *mapped],
        )  # fmt: skip
        return factors.with_sizes(devices | mapped | rest)

    def verify_(self) -> None:
        super().verify_()
        if any(is_local(v.type) for v in self.operands):
            message = "expected dist.manual in the global view, got operands of the local view"
            raise VerifyException(coded("T13", message, use="call it before lower-to-spmd"))
        f = self.function
        mesh, name = self._mesh_of(f), f.sym_name.data
        if not {*self.manual_axes.data} <= {*mesh.axes}:
            axes = ", ".join(f"{a} = {n}" for a, n in mesh.axes)
            message = f"expected dist.manual over <{axes}>, axes of the mesh, got other ones"
            raise VerifyException(coded("T13", message, use="write these"))
        types = (*f.function_type.inputs, *f.function_type.outputs)
        sides = ([unsharded_type(v) for v in side] for side in (self.operands, self.results))
        operands, results = sides
        values = _values(operands, results, self.properties)
        if len(types) != len(values):
            message = f"expected {len(values)} arguments and results of @{name}, got {len(types)}"
            raise VerifyException(coded("T13", message))
        sizes = _sizes(self.properties)
        for (what, t, dims), have in zip(values, types, strict=True):
            with verification():
                Layout(mesh.name, dims).check(mesh, t.get_shape())
            if not Layout(mesh.name, dims).even(mesh, t.get_shape()):
                message = f"expected shards of {what} of one size, got those of [{dims}]"
                raise VerifyException(coded("T13", message, use="pad it"))
            layout = Layout(mesh.name, tuple(_manual(d, sizes) for d in dims)).simplified(mesh)
            want = local(t.element_type, t.get_shape(), layout, mesh)
            if want != have:
                message = f"expected {what} of @{name} of type {want}, got {have}"
                raise VerifyException(coded("T13", message))

    def _mesh_of(self, f: FuncOp) -> Mesh:
        """Return the mesh of the function's types. Raises VerifyException if it is global."""
        for t in (*f.function_type.inputs, *f.function_type.outputs):
            if (layout := type_layout(t)) is not None:
                return find_mesh(self, layout.mesh)
        message = f"expected @{f.sym_name.data} in the local view, got types without #dist.local"
        raise VerifyException(coded("T13", message, use="write the types of a device's shards"))

    def evaluate(self, device: Device, *arrays: Array) -> Array | tuple[Array, ...]:
        raise AssertionError("dist.manual is evaluated on all devices at once")


def _sizes(props: Props) -> dict[str, int]:
    axes = props["manual_axes"]
    assert isinstance(axes, MeshAttr)
    return dict(axes.data)


def _manual(axes: Axes, sizes: dict[str, int]) -> Axes:
    """Return the axes over which the function is local."""
    return tuple(a for a in axes if a.name in sizes)


def _values(
    operands: Types, results: Types, props: Props
) -> list[tuple[str, TensorType, tuple[Axes, ...]]]:
    """Return the name of each operand and result, its type, and the axes of its dimensions.

    Raises:
        ShardirError: the strategy does not have these axes.
    """
    strategy = props.get("strategy")
    data = strategy.data if isinstance(strategy, StrategyAttr) else Strategy(None, ())
    values: list[tuple[str, TensorType, tuple[Axes, ...]]] = []
    for side, types, cuts in (
        ("operand", operands, data.operands), ("result", results, data.results or ())
    ):  # fmt: skip
        if [len(c) for c in cuts] != [len(t.get_shape()) for t in types]:
            message = f"expected the axes of each dimension of each {side}, got strategy<{data}>"
            fix = "write strategy<(({d}, {}),) -> (({d}, {}),)>"
            raise ShardirError(coded("T13", message, use=fix))
        for i, (t, dims) in enumerate(zip(types, cuts, strict=True)):
            axes = tuple(c for c in dims if not isinstance(c, int))
            if len(axes) < len(dims):
                message = f"expected the axes of {side} {i}, got numbers in strategy<{data}>"
                raise ShardirError(coded("T13", message, use="write axes, as {d}"))
            values.append((f"{side} {i}", t, axes))
    return values
