"""lower-to-spmd: global view -> local view: local shapes, and redistributions as collectives.

    %z = dist.redistribute %y : (tensor<8x6xf32, #dist.layout<@m, [{d}, {}]>>)
                              -> tensor<8x6xf32, #dist.layout<@m, [{}, {}]>>
 -> %z = dist.all_gather %y dim 0 over <d> : (tensor<2x6xf32, #dist.local<@m, [{d}, {}]>>)
                                           -> tensor<8x6xf32, #dist.local<@m, [{}, {}]>>

1. Every op is computable where its operands lie; otherwise each that is not gets an error.
2. A local type keeps over which axes the value is split or partial, and the global shape where
   shards are uneven.
3. An op for which devices need rows that others hold becomes the exchange that fetches them.
4. The collectives of a redistribution have its `fusion` index, and its mark for `recompute`.
5. Functions without layouts stay as they are, but for groups and barriers, which go away in all.
6. A custom op without a rule, which every device calculates whole, is warned of, once for each
   name.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import Attribute, Block, Operation, SSAValue
from xdsl.passes import ModulePass

from shardir.algebra.cluster import BYTES
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.algebra.redistribution import plan
from shardir.analysis.functions import has_layouts, is_local_body, mesh_of, name_of, unlaid, values
from shardir.dialects import dist
from shardir.dialects.nn.base import TensorOp, agreement
from shardir.dialects.nn.custom import CustomOp
from shardir.passes.functions import bodies, erase, set_type, settle_all, update_signature
from shardir.syntax.diagnostics import Failure, warn


@dataclass(frozen=True)
class LowerToSpmd(ModulePass):
    """Turns global values into one device's shards, and redistributions into collectives."""

    name = "lower-to-spmd"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        faults: list[tuple[Operation | None, str]] = []
        todo: list[tuple[Block, Mesh]] = []
        for f, block in bodies(op):
            mesh = mesh_of(f, op)
            if is_local_body(block):
                continue
            if mesh is None or not has_layouts(block):
                settle_all(block, None)
                continue
            if (lacking := unlaid(block)) is not None:
                faults.append(
                    (lacking, f"a value in @{name_of(f)} has no layout; run propagate-strategies")
                )
                continue
            settle_all(block, mesh)
            faults += _not_computable(block, mesh)
            todo.append((block, mesh))
        if faults:
            raise Failure(faults)
        _warn_of_replicated([op for block, mesh in todo if mesh.size > 1 for op in block.ops])
        for block, mesh in todo:
            lower(block, mesh)
        for f, _ in bodies(op):
            update_signature(f)


def _layout(v: SSAValue) -> Layout:
    layout = dist.layout_of(v)
    assert layout is not None
    return layout


def _not_computable(block: Block, mesh: Mesh) -> list[tuple[Operation | None, str]]:
    faults: list[tuple[Operation | None, str]] = []
    for op in block.ops:
        if isinstance(op, TensorOp):
            operands = tuple([_layout(v) for v in op.operands])
            results = tuple([_layout(v) for v in op.results])
            message = agreement(op.factors(), operands, results, mesh, op.MULTILINEAR)
            if message:
                faults.append((op, f"[T3] {op.name}: {message}"))
    return faults


def _warn_of_replicated(ops: Sequence[Operation]) -> None:
    first: dict[str, CustomOp] = {}
    for op in ops:
        if isinstance(op, CustomOp) and op.custom.rule is None:
            first.setdefault(op.callee.data, op)
    for name, op in first.items():
        warn(
            op,
            f'no rule is registered of the op "{name}", so every device gathers its operands and '
            f'calculates all of it; shardir.register_custom_op("{name}", rule=...) mends it',
        )


def lift(block: Block, mesh: Mesh) -> dict[SSAValue, Attribute]:
    """The way back, of types alone: local values become global ones with the same layout, between
    collectives that stay. The local types that they had."""
    types = {v: v.type for v in values(block) if dist.is_local(v.type)}
    for v, t in types.items():
        assert isinstance(t, TensorType)
        set_type(v, dist.laid_out(t.element_type, dist.global_shape(t, mesh), _layout(v)))
    return types


def lower(block: Block, mesh: Mesh) -> None:
    """Redistributions become collectives, global values local ones."""
    locals: dict[int, tuple[Attribute, Attribute]] = {}

    def localise(v: SSAValue) -> None:
        t = v.type
        found = locals.get(id(t))
        if found is None:
            assert isinstance(t, TensorType)
            found = locals[id(t)] = t, dist.local(t.element_type, t.get_shape(), _layout(v), mesh)
        set_type(v, found[1])

    for op in list(block.ops):
        if isinstance(op, dist.RedistributeOp):
            _plan(op, block, mesh)
        elif isinstance(op, TensorOp):
            _exchange(op, block, mesh)
    for v in values(block):
        if not dist.is_local(v.type):
            localise(v)


def _exchange(op: TensorOp, block: Block, mesh: Mesh) -> None:
    """Replace an op by the exchange that it is, where devices need rows that others hold."""
    if (found := op.exchange(mesh)) is None:
        return
    kind, properties = found
    new = kind.create(
        operands=list(op.operands), result_types=[v.type for v in op.results],
        properties=dict(properties), attributes=dict(op.attributes), location=op.location,
    )  # fmt: skip
    block.insert_op_before(new, op)
    for old, result in zip(op.results, new.results, strict=True):
        result.name_hint = old.name_hint
        old.replace_all_uses_with(result)
    erase(op)


def _plan(op: dist.RedistributeOp, block: Block, mesh: Mesh) -> None:
    """Replace a redistribution by its steps; global types still, but where a step makes a local
    value."""
    t = op.out.type
    assert isinstance(t, TensorType)
    shape, target = t.get_shape(), _layout(op.out)
    itemsize = BYTES.get(str(t.element_type), 4)
    steps = plan(shape, mesh, _layout(op.value), target, itemsize)
    value = op.value
    for i, step in enumerate(steps):
        layout = target if i == len(steps) - 1 else step.layout
        type = dist.local(t.element_type, shape, layout, mesh)
        new = dist.step_op(step, value, type)
        if op.fusion is not None and isinstance(new, dist.FusibleOp):
            new.properties["fusion"] = op.fusion
        new.attributes.update(op.attributes)
        new.location = op.location
        new.results[0].name_hint = op.out.name_hint
        block.insert_op_before(new, op)
        value = new.results[0]
    op.out.replace_all_uses_with(value)
    erase(op)
