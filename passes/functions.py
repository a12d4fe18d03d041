"""What several passes do with functions: walk them, find their mesh, set types."""

from collections.abc import Iterator

from xdsl.dialects.builtin import (
    DictionaryAttr,
    FloatAttr,
    FunctionType,
    ModuleOp,
    StringAttr,
    TensorType,
)
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, Block, BlockArgument, Operation, OpResult, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.dialects.builder import Builder
from shardir.dialects.composites import adopt
from shardir.dialects.dist import (
    PropagationBarrierOp,
    ShardingGroupOp,
    is_local,
    layout_of,
    meshes_of,
    sharding_of,
)
from shardir.dialects.nn.base import TensorOp, plain
from shardir.dialects.places import maker
from shardir.dialects.train import arg_attrs, result_attrs
from shardir.syntax.diagnostics import Failure

FOUND = "search"
"""The attribute of a function in which a search says what it found."""


def found_by_search(f: FuncOp) -> dict[str, float]:
    """The numbers that a search said of a function: the seconds of its plan (`objective`), those
    that no plan takes less than (`bound`), and the gap between them; none where there was none."""
    said = f.attributes.get(FOUND)
    numbers = said.data.items() if isinstance(said, DictionaryAttr) else ()
    return {k: x.value.data for k, x in numbers if isinstance(x, FloatAttr)}


def bodies(module: ModuleOp) -> Iterator[tuple[FuncOp, Block]]:
    """The functions that have a body, from now on without ops that nobody described: those are
    custom ones. Control flow between blocks is not part of the language."""
    for op in module.body.ops:
        if isinstance(op, FuncOp) and op.body.blocks:
            if len(op.body.blocks) > 1:
                raise Failure([(op, "a function of the sharding passes has one block")])
            adopt(op.body.block)
            yield op, op.body.block


def values(block: Block) -> Iterator[SSAValue]:
    """Arguments, then results in order."""
    yield from block.args
    for op in block.ops:
        yield from op.results


def makers(block: Block) -> Iterator[tuple[Operation | BlockArgument, tuple[SSAValue, ...]]]:
    """Each argument by itself, then each op with its results; those that are no tensors aside."""
    for arg in block.args:
        if isinstance(arg.type, TensorType):
            yield arg, (arg,)
    for op in block.ops:
        if made := tuple(v for v in op.results if isinstance(v.type, TensorType)):
            yield op, made


def mesh_of(f: FuncOp, module: ModuleOp) -> Mesh | None:
    """The mesh of a function: the one that its layouts or strategies name, else the module's only
    one; None when there is none.

    Raises:
        Failure: the function uses two meshes, one that is not declared, or does not say which of
            several.
    """
    meshes = meshes_of(module)
    named: dict[str, Operation] = {}
    for op in f.body.block.ops:
        for v in op.results:
            if (mesh := _mesh_name(v)) is not None:
                named.setdefault(mesh, op)
        if isinstance(op, TensorOp) and op.strategy is not None and op.strategy.data.mesh:
            named.setdefault(op.strategy.data.mesh, op)
    for v in f.body.block.args:
        if (mesh := _mesh_name(v)) is not None:
            named.setdefault(mesh, f)
    if len(named) > 1:
        names = ", ".join(f"@{n}" for n in named)
        raise Failure([(f, f"@{f.sym_name.data} uses the meshes {names}; one function, one mesh")])
    for name, op in named.items():
        if name not in meshes:
            raise Failure([(op, f"[M2] no mesh @{name}; declare it: dist.mesh @{name} <dp = 2>")])
        return meshes[name]
    return next(iter(meshes.values())) if len(meshes) == 1 else None


def _mesh_name(v: SSAValue) -> str | None:
    layout = layout_of(v)
    if layout is None and (sharding := sharding_of(v)) is not None:
        layout = sharding.layout
    return None if layout is None else layout.mesh


def has_layouts(block: Block) -> bool:
    """Whether a global layout, or what is stated of one, stands on some value."""
    return any(sharding_of(v) is not None for v in values(block))


def is_laid_out(block: Block) -> bool:
    """Whether every tensor has a layout."""
    tensors = [v for v in values(block) if isinstance(v.type, TensorType)]
    return bool(tensors) and all(layout_of(v) is not None for v in tensors)


def is_local_body(block: Block) -> bool:
    """Whether the function is in the local view."""
    return any(is_local(v.type) for v in values(block))


def sharding_groups(block: Block) -> list[dict[SSAValue, ShardingGroupOp]]:
    """The values that are to lie alike, group by group, each with an op that says so. Groups that
    share a value are one.

    Raises:
        Failure: values of a group have different shapes.
    """
    found: list[dict[SSAValue, ShardingGroupOp]] = []
    ids: list[set[int]] = []
    for op in block.ops:
        if not isinstance(op, ShardingGroupOp):
            continue
        members, numbers = {op.value: op}, {op.group.value.data}
        for i in reversed(range(len(found))):
            if op.value in found[i] or not numbers.isdisjoint(ids[i]):
                members, numbers = found.pop(i) | members, ids.pop(i) | numbers
        found.append(members)
        ids.append(numbers)
    faults: list[tuple[Operation | None, str]] = []
    for members in found:
        first, *others = members
        for v in others:
            if plain(v).get_shape() != plain(first).get_shape():
                shapes = [list(plain(w).get_shape()) for w in (v, first)]
                message = (
                    f"[P2] the values of sharding group {members[v].group.value.data} are to have "
                    f"one shape, but {maker(v)} is {shapes[0]}, and {maker(first)} is {shapes[1]}; "
                    "leave one of them out"
                )
                faults.append((members[v], message))
    if faults:
        raise Failure(faults)
    return found


def contradiction(
    op: ShardingGroupOp, one: tuple[SSAValue, object], other: tuple[SSAValue, object]
) -> str:
    """What is wrong where two values of a group are stated to lie so."""
    said = [f"{maker(v)} lies as [{where}]" for v, where in (one, other)]
    return (
        f"[P3] the values of sharding group {op.group.value.data} are to lie alike, but {said[0]}, "
        f"and {said[1]}; state one of them, or both alike"
    )


def settle(op: PropagationBarrierOp | ShardingGroupOp, builder: Builder) -> None:
    """Takes a barrier or a group out, where layouts are decided. A barrier between two layouts
    becomes a redistribution."""
    if isinstance(op, PropagationBarrierOp):
        layout = layout_of(op.out)
        value = op.value if layout is None else builder.redistribute(op.value, layout)
        op.out.replace_all_uses_with(value)
    erase(op)


def settle_all(block: Block, mesh: Mesh | None) -> None:
    """The same of all that there are; without a mesh there are no layouts either."""
    cursor: list[Operation] = []
    builder = Builder(mesh, lambda new: block.insert_op_before(new, cursor[0]))
    for op in list(block.ops):
        if isinstance(op, PropagationBarrierOp | ShardingGroupOp):
            cursor[:] = [op]
            builder.location = op.location
            settle(op, builder)


def ties(f: FuncOp, block: Block) -> dict[SSAValue, SSAValue]:
    """The returned values that become arguments of the next step."""
    names: dict[str, SSAValue] = {}
    for arg, attrs in zip(block.args, arg_attrs(f), strict=True):
        for key in ("train.parameter", "train.state"):
            if isinstance(name := attrs.get(key), StringAttr):
                names[name.data] = arg
    found: dict[SSAValue, SSAValue] = {}
    end = block.last_op
    assert isinstance(end, ReturnOp)
    for v, marks in zip(end.operands, result_attrs(f), strict=True):
        if isinstance(name := marks.get("train.updates"), StringAttr) and name.data in names:
            found[v] = names[name.data]
    return found


def set_type(value: SSAValue, type: Attribute) -> None:
    """Another type for a value, in place: building ops anew costs twenty times as much."""
    value._type = type


def erase(op: Operation) -> None:
    """Take an op that nobody uses out of its block, for good."""
    op.detach()
    op.erase()


def update_signature(f: FuncOp) -> None:
    """The function's type from its arguments and what it returns."""
    block = f.body.block
    last = block.last_op
    outs = [v.type for v in last.operands] if isinstance(last, ReturnOp) else []
    f.properties["function_type"] = FunctionType.from_lists([a.type for a in block.args], outs)


def unlaid(block: Block) -> Operation | None:
    """An op (or, for an argument, the function) of which a tensor has no layout."""
    for v in values(block):
        if isinstance(v.type, TensorType) and layout_of(v) is None:
            return v.owner if isinstance(v.owner, Operation) else block.parent_op()
    return None


def name_of(f: FuncOp) -> str:
    name = f.sym_name
    assert isinstance(name, StringAttr)
    return name.data


def named(v: SSAValue) -> str:
    """A value, as messages call it."""
    if v.name_hint:
        return f"%{v.name_hint}"
    if isinstance(v, BlockArgument):
        return f"argument {v.index}"
    assert isinstance(v, OpResult)
    return f"a result of {v.op.name}"
