"""Meshes, and queries about the layout in a value's type.

A global value has the global shape and a `#dist.layout`; a local one has the shape of a device's
shard and a `#dist.local`, with the axes over which it is split, replicated or partial.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    ModuleOp,
    NoneAttr,
    SymbolNameConstraint,
    SymbolRefAttr,
    TensorType,
)
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import (
    IRDLOperation,
    opt_prop_def,
    prop_def,
    traits_def,
)
from xdsl.traits import SymbolOpInterface
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.cluster import BYTES, Cluster
from shardir.algebra.layout import MOST_ELEMENTS, Layout, LocalLayout, Shape, is_countable
from shardir.algebra.mesh import Mesh
from shardir.algebra.notation import parse_layout
from shardir.algebra.sharding import Sharding
from shardir.compat.xdsl import operands_of
from shardir.diagnostics import ShardirError, coded, one_of
from shardir.dialects.definition import op_definition
from shardir.dialects.dist.attributes import (
    ClusterAttr,
    LayoutAttr,
    LocalAttr,
    MeshAttr,
    ShardingAttr,
)
from shardir.dialects.signatures import SignatureMemo
from shardir.dialects.symbols import cached_by_symbol, find_symbol

MAX_DEVICES = 1 << 20
"""The devices of the largest mesh: the verifier and the interpreter enumerate ranks."""

MAX_AXES = 64
"""The axes of the largest mesh: layouts are checked by pairs of axes."""


@op_definition
class ClusterOp(IRDLOperation):
    """The memory and speed of a device, and the bandwidth and latency within each level,
    innermost to outermost. Redistributions on a mesh that is `on` it are planned for it."""

    name = "dist.cluster"
    sym_name = prop_def(SymbolNameConstraint())
    devices = prop_def(ClusterAttr)
    traits = traits_def(SymbolOpInterface())
    assembly_format = "$sym_name $devices attr-dict"


@op_definition
class MeshOp(IRDLOperation):
    """Named axes, major to minor. A rank is the row-major index of its coordinates; consecutive
    ranks share the units of the cluster, if any."""

    name = "dist.mesh"
    sym_name = prop_def(SymbolNameConstraint())
    axes = prop_def(MeshAttr)
    cluster = opt_prop_def(SymbolRefAttr)
    traits = traits_def(SymbolOpInterface())
    assembly_format = "$sym_name $axes (`on` $cluster^)? attr-dict"

    @property
    def mesh(self) -> Mesh:
        return _mesh(self.sym_name.data, self.axes.data, self._cluster())

    def _cluster(self) -> Cluster | None:
        if self.cluster is None or self.parent is None:
            return None
        wanted = self.cluster.string_value()
        for op in self.parent.ops:
            if isinstance(op, ClusterOp) and op.sym_name.data == wanted:
                return op.devices.data
        return None

    def verify_(self) -> None:
        if not 1 <= len(self.axes.data) <= MAX_AXES:
            message = f"expected 1 to {MAX_AXES} axes in mesh @{self.sym_name.data}"
            raise VerifyException(coded("M1", f"{message}, got {len(self.axes.data)}"))
        try:
            parse_layout(f"@{self.sym_name.data}, []")
        except ShardirError:
            message = f"expected a mesh name that a layout can spell, got {self.sym_name}"
            raise VerifyException(
                coded("M2", message, use="use letters, digits, _, $ and . in it")
            ) from None
        if self.mesh.size > MAX_DEVICES:
            message = f"expected at most {MAX_DEVICES} devices, got {self.mesh.size}"
            raise VerifyException(coded("M3", message))
        if self.cluster is not None and self.mesh.cluster is None:
            declare = (
                f"declare it: dist.cluster {self.cluster} "
                "<levels [node = 8 {bandwidth = 4.5e+11, latency = 3e-06}]>"
            )
            message = f"expected a declared cluster, got {self.cluster}"
            raise VerifyException(coded("M4", message, use=declare))
        with verification():
            self.mesh.check_cluster()


@lru_cache(maxsize=1024)
def _mesh(name: str, axes: tuple[tuple[str, int], ...], cluster: Cluster | None) -> Mesh:
    return Mesh(name, axes, cluster)


def module_of(op: Operation) -> Operation:
    """Return the outermost op around `op`."""
    while (parent := op.parent_op()) is not None:
        op = parent
    return op


def meshes_of(module: Operation) -> dict[str, Mesh]:
    """Return the meshes that a module declares, by name."""
    if not isinstance(module, ModuleOp):
        return {}
    return {op.sym_name.data: op.mesh for op in module.body.ops if isinstance(op, MeshOp)}


def find_mesh(op: Operation, name: str) -> Mesh:
    """Return the mesh `name` of the module around `op`.

    Raises:
        VerifyException: the module declares no such mesh.
    """
    module = module_of(op)

    def declared() -> Mesh:
        op_of_mesh = find_symbol(module, MeshOp, name) if isinstance(module, ModuleOp) else None
        if op_of_mesh is None:
            raise VerifyException(undeclared_mesh(name))
        return op_of_mesh.mesh

    return cached_by_symbol(module, name, declared)


def undeclared_mesh(name: str) -> str:
    """Return the message about a mesh that the module does not declare."""
    declare = f"declare it: dist.mesh @{name} <dp = 2>"
    return coded("M2", f"expected a declared mesh, got @{name}", use=declare)


def layout_of(value: SSAValue) -> Layout | None:
    """Return the layout of a value in either view, or None."""
    return type_layout(value.type)


def type_layout(type: Attribute) -> Layout | None:
    if isinstance(type, TensorType):
        if isinstance(type.encoding, LayoutAttr):
            return type.encoding.data
        if isinstance(type.encoding, LocalAttr):
            return type.encoding.data.layout
    return None


def sharding_of(value: SSAValue) -> Sharding | None:
    """Return the annotation of a global value: a layout, to which propagation may add axes if it
    is a `#dist.sharding`."""
    encoding = value.type.encoding if isinstance(value.type, TensorType) else None
    if isinstance(encoding, ShardingAttr):
        return encoding.data
    return Sharding(encoding.data) if isinstance(encoding, LayoutAttr) else None


def is_local(type: Attribute) -> bool:
    """Whether a type has a `#dist.local`."""
    return isinstance(type, TensorType) and isinstance(type.encoding, LocalAttr)


def global_shape(type: Attribute, mesh: Mesh | None) -> Shape:
    """Return the global shape of a tensor type in either view."""

    def compute() -> Shape:
        assert isinstance(type, TensorType)
        if isinstance(type.encoding, LocalAttr):
            assert mesh is not None
            return type.encoding.data.global_shape(mesh, type.get_shape())
        return type.get_shape()

    return _global_shapes.get_or((type, mesh), {}, compute)


_global_shapes = SignatureMemo()


def global_type(type: Attribute, mesh: Mesh | None) -> TensorType:
    """Return the type of the global value, without a layout, for a type of either view."""
    assert isinstance(type, TensorType)
    return tensor(type.element_type, global_shape(type, mesh))


@lru_cache(maxsize=65536)
def tensor(element: Attribute, shape: Shape) -> TensorType:
    """Return a tensor type without a layout; cached."""
    return TensorType(element, shape)


@lru_cache(maxsize=65536)
def laid_out(element: Attribute, shape: Shape, layout: Layout) -> TensorType:
    """Return a type of the global view; cached."""
    return TensorType(element, shape, LayoutAttr(layout))


@lru_cache(maxsize=65536)
def local(element: Attribute, shape: Shape, layout: Layout, mesh: Mesh) -> TensorType:
    """Return the local view's type of a value with the global `shape`; cached."""
    here = layout.local_shape(mesh, shape)
    return TensorType(element, here, LocalAttr(LocalLayout.of(layout, mesh, shape)))


def with_layout(type: TensorType, layout: Layout | None) -> TensorType:
    """Return a global type with another layout, or with none."""
    if layout is None:
        return tensor(type.element_type, type.get_shape())
    return laid_out(type.element_type, type.get_shape(), layout)


def with_sharding(type: TensorType, sharding: Sharding) -> TensorType:
    """Return a global type with another annotation, which is a layout if it has nothing else."""
    if not (sharding.open or sharding.priorities or sharding.replicated):
        return with_layout(type, sharding.layout)
    return TensorType(type.element_type, type.get_shape(), ShardingAttr(sharding))


def invalid_type_message(type: Attribute) -> str | None:
    """Return the error message for a type that is not valid here; None for a tensor with static
    sizes, one of our element types, and a layout or none."""
    return _foreign.of(type, _foreign_message)


_foreign = SignatureMemo()


def _foreign_message(type: Attribute) -> str | None:
    if not isinstance(type, TensorType):
        return coded("T12", f"expected a tensor with a number for each size, got {type}")
    sizes = [*type.get_shape()]
    for dim, size in enumerate(sizes):
        if size < 0:
            shown = "?" if size == DYNAMIC_INDEX else size
            message = f"expected a size of at least 0 of dimension {dim}, got {shown} in {type}"
            return coded("T12", message, use="write the number, and one program for each size")
    if (element := str(type.element_type)) not in BYTES:
        message = f"expected an element type of {one_of(BYTES)}, got {element} in {type}"
        return coded("T12", message, use="use one of them")
    if not isinstance(type.encoding, NoneAttr | LayoutAttr | ShardingAttr | LocalAttr):
        message = f"expected a layout in a tensor type, got {type.encoding} in {type}"
        return coded("T12", message, use="write #dist.layout<@m, [...]>, or drop it")
    if isinstance(type.encoding, LocalAttr):
        sizes = [*(type.encoding.data.shape or sizes)]
    if not is_countable(sizes):
        message = f"expected at most {MOST_ELEMENTS}, got {'x'.join(map(str, sizes))}"
        return coded("T12", message, use="make a dimension smaller")
    return None


def check_type(op: Operation, type: Attribute, what: str) -> None:
    """Raise VerifyException if a type is not valid, or its layout violates an invariant. The
    message begins with `what`."""
    if (message := invalid_type_message(type)) is not None:
        raise VerifyException(f"{what}: {message}")
    layout = type_layout(type)
    if isinstance(type, TensorType) and isinstance(type.encoding, ShardingAttr):
        layout = type.encoding.data.layout
    if layout is None:
        return
    assert isinstance(type, TensorType)
    mesh = find_mesh(op, layout.mesh)
    try:
        _check(mesh, type.encoding, type.get_shape())
    except ShardirError as e:
        raise VerifyException(f"{what}: {e}") from None


@lru_cache(maxsize=65536)
def _check(mesh: Mesh, encoding: LayoutAttr | ShardingAttr | LocalAttr, shape: Shape) -> None:
    if isinstance(encoding, ShardingAttr):
        encoding.data.layout.check(mesh, shape)
        encoding.data.check(mesh)
        return
    if isinstance(encoding, LayoutAttr):
        encoding.data.check(mesh, shape)
        return
    here = encoding.data
    if here.shape is not None and len(here.shape) != len(shape):
        message = (
            f"expected `of` with {len(shape)} dimensions, as the tensor has, got {len(here.shape)}"
        )
        raise ShardirError(coded("L1", message, use="write the global shape"))
    unsharded = here.global_shape(mesh, shape)
    here.layout.check(mesh, unsharded)
    expected = here.layout.local_shape(mesh, unsharded)
    if expected != shape:
        message = (
            f"expected the shape {list(expected)} of the largest shard of {list(unsharded)}, got "
            f"{list(shape)}"
        )
        raise ShardirError(coded("L5", message))


def type_change(value: SSAValue, out: SSAValue, mesh: Mesh | None = None) -> str:
    """Return the error message if the global types of two values differ, else an empty one."""
    have, want = global_type(value.type, mesh), global_type(out.type, mesh)
    return "" if have == want else f"expected a result of global type {have}, got {want}"


@contextmanager
def verification() -> Iterator[None]:
    """Turn the algebra's ShardirError into the VerifyException that xDSL expects."""
    try:
        yield
    except ShardirError as e:
        raise VerifyException(str(e)) from None


def check_types(op: Operation) -> None:
    """Raise VerifyException if the type of an operand or result is not valid, or its layout
    violates an invariant."""
    for what, values in (("operand", operands_of(op)), ("result", op.results)):
        checked = set[int]()  # a bucket has thousands of values, but few types
        for i, v in enumerate(values):
            t = v.type
            if id(t) in checked:
                continue
            checked.add(id(t))
            check_type(op, t, f"{what} {i}")
