"""Walk a function; find its mesh, its view, and the names of values."""

from collections.abc import Iterable, Iterator, Mapping

from xdsl.dialects.builtin import ModuleOp, StringAttr, TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Block, BlockArgument, Operation, OpResult, SSAValue

from shardir.algebra.mesh import Mesh
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


def values(block: Block) -> Iterator[SSAValue]:
    """Yield arguments, then results in order."""
    yield from block.args
    for op in ops_of(block):
        yield from op.results


def makers(block: Block) -> Iterator[tuple[Operation | BlockArgument, tuple[SSAValue, ...]]]:
    """Yield each argument by itself, then each op with its results; tensors only."""
    for arg in block.args:
        if isinstance(arg.type, TensorType):
            yield arg, (arg,)
    for op in block.ops:
        if made := tuple(v for v in op.results if isinstance(v.type, TensorType)):
            yield op, made


def mesh_of(f: FuncOp, module: ModuleOp) -> Mesh | None:
    """Return the mesh of a function of a module, as `mesh_among` does."""
    return mesh_among(f, ops_of(f.body.block), meshes_of(module))


def mesh_among(f: FuncOp, ops: Iterable[Operation], meshes: Mapping[str, Mesh]) -> Mesh | None:
    """Return the one of a module's meshes that a function's layouts and strategies name, else the
    only one; None if the module has none, or several.

    Args:
        ops: those of the function.

    Raises:
        Failure: the function uses two meshes, or one that is not declared.
    """
    named: dict[str, Operation] = {}
    seen = set[int]()
    for op in ops:
        for v in op.results:
            if id(v._type) not in seen:
                seen.add(id(v._type))
                if (mesh := _mesh_name(v)) is not None:
                    named.setdefault(mesh, op)
        strategy = op.strategy if "strategy" in op.properties and isinstance(op, TensorOp) else None
        if strategy is not None and strategy.data.mesh:
            named.setdefault(strategy.data.mesh, op)
    for v, argument in zip(f.body.block.args, arguments(f), strict=True):
        if (mesh := _mesh_name(v)) is not None:
            named.setdefault(mesh, f)
        if (layout := argument.state_layout) is not None:
            named.setdefault(layout.mesh, f)
    if len(named) > 1:
        names = ", ".join(f"@{n}" for n in named)
        message = f"expected one mesh in @{f.sym_name.data}, got {names}; use one of them"
        raise Failure([(f, message)])
    for name, op in named.items():
        if name not in meshes:
            raise Failure.at(op, undeclared_mesh(name))
        return meshes[name]
    return next(iter(meshes.values())) if len(meshes) == 1 else None


_mesh_names = SignatureMemo()


def _mesh_name(v: SSAValue) -> str | None:
    """Return the mesh that the type of a value names, asked once for each type."""

    def named(_: Attribute) -> str | None:
        layout = layout_of(v)
        if layout is None and (sharding := sharding_of(v)) is not None:
            layout = sharding.layout
        return None if layout is None else layout.mesh

    return _mesh_names.of(v.type, named)


def has_layouts(block: Block) -> bool:
    """Whether a value has a `#dist.layout` or a `#dist.sharding`."""
    return any(sharding_of(v) is not None for v in values(block))


def is_laid_out(block: Block) -> bool:
    """Whether every tensor has a layout."""
    tensors = [v for v in values(block) if isinstance(v.type, TensorType)]
    return bool(tensors) and all(layout_of(v) is not None for v in tensors)


def is_local_body(block: Block) -> bool:
    """Whether the function is in the local view."""
    seen = set[int]()
    for v in values(block):
        if id(v._type) not in seen:
            if is_local(v._type):
                return True
            seen.add(id(v._type))
    return False


def unlaid(block: Block) -> Operation | None:
    """Return the first op with a result without a layout; for an argument, the function."""
    seen = set[int]()
    for v in values(block):
        if id(v._type) not in seen:
            if isinstance(v.type, TensorType) and layout_of(v) is None:
                return v.owner if isinstance(v.owner, Operation) else block.parent_op()
            seen.add(id(v._type))
    return None


def name_of(f: FuncOp) -> str:
    """The name of a function, without `@`."""
    name = f.sym_name
    assert isinstance(name, StringAttr)
    return name.data


def named(v: SSAValue) -> str:
    """The name of a value in messages."""
    if v.name_hint:
        return f"%{v.name_hint}"
    if isinstance(v, BlockArgument):
        return f"argument {v.index}"
    assert isinstance(v, OpResult)
    return f"a result of {v.op.name}"
