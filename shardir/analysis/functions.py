"""Walk a function; find its mesh, its view, and the names of values."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import TypeVar

from xdsl.dialects.builtin import ModuleOp, StringAttr, TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Block, BlockArgument, Operation, OpResult, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.compat.xdsl import type_of
from shardir.diagnostics import Failure
from shardir.dialects.blocks import ops_of
from shardir.dialects.dist import (
    is_local,
    layout_of,
    meshes_of,
    sharding_of,
    undeclared_mesh,
)
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.signatures import SignatureMemo
from shardir.dialects.train import arguments

ValueT = TypeVar("ValueT", bound=SSAValue)


def values(block: Block) -> Iterator[SSAValue]:
    """Yield arguments, then results in order."""
    yield from block.args
    yield from results(ops_of(block))


def results(ops: Iterable[Operation]) -> Iterator[OpResult]:
    """Return the results of ops, in order."""
    return chain.from_iterable(map(attrgetter("results"), ops))


def one_of_each_type(values: Iterable[ValueT]) -> Collection[ValueT]:
    """Return the last value of each type: many values have few types."""
    return {id(type_of(v)): v for v in values}.values()


def makers(block: Block) -> Iterator[tuple[Operation | BlockArgument, tuple[SSAValue, ...]]]:
    """Yield each argument with itself, then each op with its results; tensors only."""
    for arg in block.args:
        if isinstance(arg.type, TensorType):
            yield arg, (arg,)
    for op in block.ops:
        if tensors := tuple(v for v in op.results if isinstance(v.type, TensorType)):
            yield op, tensors


def mesh_of(f: FuncOp, module: ModuleOp) -> Mesh | None:
    """Return the mesh of a function of a module, like `mesh_among`."""
    return mesh_among(f, ops_of(f.body.block), meshes_of(module))


def mesh_among(f: FuncOp, ops: Sequence[Operation], meshes: Mapping[str, Mesh]) -> Mesh | None:
    """Return the mesh of a function: the module's only mesh, or the one that the function's layouts
    and strategies name. None if the module has no mesh, or has several and the function names none.

    Args:
        ops: the ops of the function. If there is one mesh their types are not examined: the
            verifier refuses undeclared meshes.
        meshes: the meshes of the module.

    Raises:
        Failure: the function uses two meshes, or an undeclared one.
    """
    if len(meshes) == 1 and all(mesh in meshes for mesh, _ in _naming_by_attributes(f, ops)):
        return next(iter(meshes.values()))
    naming = dict[str, list[Operation]]()
    for mesh, op in (*_naming_by_types(f, ops), *_naming_by_attributes(f, ops)):
        if mesh:
            naming.setdefault(mesh, []).append(op)
    if not naming:
        return None
    if len(naming) == 1 and (name := next(iter(naming))) in meshes:
        return meshes[name]
    position = {op: i for i, op in enumerate((*ops, f))}
    first = {
        name: min(ops_of_mesh, key=position.__getitem__) for name, ops_of_mesh in naming.items()
    }
    names = sorted(first, key=lambda name: position[first[name]])
    if len(names) == 1:
        raise Failure.at(first[names[0]], undeclared_mesh(names[0]))
    used = ", ".join(f"@{n}" for n in names)
    message = f"expected one mesh in @{f.sym_name.data}, got {used}; use one of them"
    raise Failure([(f, message)])


def _naming_by_types(f: FuncOp, ops: Sequence[Operation]) -> Iterator[tuple[str | None, Operation]]:
    """Yield the meshes named in types: of results with the first op that has the type, of arguments
    with the function."""
    for v in one_of_each_type(results(reversed(ops))):
        yield _mesh_name(v), v.op
    for v in one_of_each_type(f.body.block.args):
        yield _mesh_name(v), f


def _naming_by_attributes(f: FuncOp, ops: Sequence[Operation]) -> Iterator[tuple[str, Operation]]:
    """Yield the meshes named in strategies with their ops, and in layouts of states with the
    function."""
    for op in ops:
        if "strategy" in op.properties and isinstance(op, TensorOp) and op.strategy is not None:
            mesh = op.strategy.data.mesh
            if mesh:
                yield mesh, op
    for argument in arguments(f):
        if argument.state_layout is not None:
            yield argument.state_layout.mesh, f


_mesh_names = SignatureMemo()


def _mesh_name(v: SSAValue) -> str | None:
    """Return the mesh that the type of a value names; cached by type."""

    def mesh_of_type(_: Attribute) -> str | None:
        layout = layout_of(v)
        if layout is None and (sharding := sharding_of(v)) is not None:
            layout = sharding.layout
        return None if layout is None else layout.mesh

    return _mesh_names.of(v.type, mesh_of_type)


def has_layouts(block: Block) -> bool:
    """Whether a value has a `#dist.layout` or a `#dist.sharding`."""
    return any(sharding_of(v) is not None for v in values(block))


def is_laid_out(block: Block) -> bool:
    """Whether every tensor has a layout."""
    tensors = [v for v in one_of_each_type(values(block)) if isinstance(v.type, TensorType)]
    return bool(tensors) and not any(map(_is_unlaid, tensors))


def is_local_body(block: Block) -> bool:
    """Whether the function is in the local view."""
    if any(is_local(type_of(v)) for v in block.args):
        return True
    return any(is_local(type_of(v)) for v in one_of_each_type(results(ops_of(block))))


def first_without_layout(block: Block) -> Operation | None:
    """Return the first op with a result without a layout; for an argument, the function."""
    without = {id(type_of(v)) for v in one_of_each_type(values(block)) if _is_unlaid(v)}
    v = next((v for v in values(block) if id(type_of(v)) in without), None) if without else None
    if v is None:
        return None
    return v.owner if isinstance(v.owner, Operation) else block.parent_op()


def _is_unlaid(v: SSAValue) -> bool:
    return isinstance(v.type, TensorType) and layout_of(v) is None


def name_of(f: FuncOp) -> str:
    """Return the name of a function, without `@`."""
    name = f.sym_name
    assert isinstance(name, StringAttr)
    return name.data


def named(v: SSAValue) -> str:
    """Return the name of a value for messages."""
    if v.name_hint:
        return f"%{v.name_hint}"
    if isinstance(v, BlockArgument):
        return f"argument {v.index}"
    assert isinstance(v, OpResult)
    return f"a result of {v.op.name}"
