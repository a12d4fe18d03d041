"""data-parallel: no layouts -> inputs split by rows over all devices, parameters whole on each.

    func.func @loss(%x: tensor<8x4xf32>, %w: tensor<4x6xf32> {train.parameter = "w"})
 -> func.func @loss(%x: tensor<8x4xf32, #dist.layout<@m, [{dp, tp}, {}]>>,
                    %w: tensor<4x6xf32, #dist.layout<@m, [{}, {}]>> {train.parameter = "w"})

Before propagate-strategies, which spreads it over the rest.

1. Parameters and states are replicated; any other argument is an input, and is split by rows over
   all axes of the mesh, in their order.
2. What the text states otherwise, of an argument, of a value, by a strategy or by a redistribution,
   is an error: each of them, with what data parallel training has in its place.
3. With `hybrid` nothing that is stated is an error. Parameters and states are replicated where
   neither a layout nor a strategy of an op that takes them places them; inputs are left to
   propagate-strategies, which splits those that nothing reaches by rows over the axes that nothing
   uses; functions in the local view stay as they are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, Operation, SSAValue

from shardir.algebra.layout import Layout, replicated
from shardir.algebra.mesh import Mesh
from shardir.algebra.strategy import Strategy
from shardir.analysis.functions import is_local_body, mesh_of, name_of, named, values
from shardir.diagnostics import Failure, Located, ShardirError
from shardir.dialects.dist import MeshOp, RedistributeOp, layout_of, sharding_of, with_layout
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import arguments
from shardir.rewriting import nested
from shardir.rewriting.bases import Function, FunctionPass
from shardir.rewriting.functions import bodies, update_signature
from shardir.rewriting.placement import strategy_op_sharding
from shardir.rewriting.rewriter import set_type

MEND = "leave it out, or choose the mode hybrid"


@dataclass(frozen=True)
class DataParallel(FunctionPass):
    """Splits inputs by rows over all devices and keeps parameters whole on each."""

    name = "data-parallel"
    hybrid: bool = False
    """Whether what the text places stays as it is."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        functions = self.functions(op)
        self.check_all(functions)
        if not self.hybrid and (errors := list(_contradictions(ctx, op))):
            raise Failure(errors)
        self.rewrite_all(functions)

    def check(self, f: Function) -> Iterator[Located]:
        if f.mesh is None:
            message = "has no mesh to split its inputs over; declare one: dist.mesh @m <dp = 4>"
            yield f.op, f"[A1] @{f.name} {message}"
        elif is_local_body(f.block) and not self.hybrid:
            message = "is in the local view, so it is laid out by hand; choose the mode manual"
            yield f.op, f"[A2] @{f.name} {message}"

    def rewrite(self, f: Function) -> None:
        if f.mesh is not None and not is_local_body(f.block):
            _lay_out(f.op, f.block, f.mesh, self.hybrid)


def _lay_out(f: FuncOp, block: Block, mesh: Mesh, hybrid: bool) -> None:
    for arg, argument in zip(block.args, arguments(f), strict=True):
        if not isinstance(arg.type, TensorType):
            continue
        rank = len(arg.type.get_shape())
        if argument.is_retained:
            layout = replicated(mesh.name, rank)
            if hybrid and _placed(arg):
                continue
        elif hybrid:
            continue
        else:
            rows = (mesh.simplify(mesh.names), *[()] * (rank - 1)) if rank else ()
            layout = Layout(mesh.name, rows)
        set_type(arg, with_layout(unsharded_type(arg), layout))
    update_signature(f)


def _placed(arg: SSAValue) -> bool:
    """Whether the text says where an argument lies."""
    return sharding_of(arg) is not None or any(
        isinstance(use.operation, TensorOp) and use.operation.strategy is not None
        for use in arg.uses
    )


def _contradictions(ctx: Context, module: ModuleOp) -> Iterator[Located]:
    """What is stated and not data parallel: held against the program of which nothing is stated."""
    if not any(_states(op) for op in module.walk()):
        return
    twins: dict[SSAValue, SSAValue] = {}
    trial = module.clone(twins)
    nested.run("strip-layouts", ctx, trial)
    for op in module.body.ops:
        if isinstance(op, MeshOp):
            trial.body.block.add_op(op.clone())
    meshes = [mesh_of(f, module) for f, _ in bodies(module)]
    for (f, block), mesh in zip(bodies(trial), meshes, strict=True):
        assert mesh is not None
        _lay_out(f, block, mesh, hybrid=False)
    nested.run("propagate-strategies", ctx, trial)
    for (f, block), mesh in zip(bodies(module), meshes, strict=True):
        assert mesh is not None
        for v in values(block):
            stated, layout = sharding_of(v), layout_of(twins[v])
            if stated is not None and layout is not None and not stated.allows(layout, mesh):
                yield (
                    f if isinstance(v.owner, Block) else v.owner,
                    f"[A3] {named(v)} in @{name_of(f)} is to lie as [{stated}]; data parallel "
                    f"it lies as [{layout}]; {MEND}",
                )
        for op in block.ops:
            if isinstance(op, RedistributeOp):
                message = "data parallel nothing is redistributed by hand"
                yield op, f"[A3] {op.name} in @{name_of(f)}: {message}; {MEND}"
            elif isinstance(op, TensorOp) and op.strategy is not None:
                yield from _strategy_error(op, twins, mesh, name_of(f))


def _states(op: Operation) -> bool:
    """Whether something is stated of where the values of an op or of its blocks lie."""
    if isinstance(op, RedistributeOp) or (isinstance(op, TensorOp) and op.strategy is not None):
        return True
    args = [arg for region in op.regions for block in region.blocks for arg in block.args]
    return any(sharding_of(v) is not None for v in (*op.results, *args))


def _strategy_error(
    op: TensorOp, twins: Mapping[SSAValue, SSAValue], mesh: Mesh, function: str
) -> Iterator[Located]:
    assert op.strategy is not None
    operands, results = ([layout_of(twins[v]) for v in side] for side in (op.operands, op.results))
    if None in operands:  # what is redistributed by hand
        return
    try:
        stated = strategy_op_sharding(op, mesh)
    except ShardirError as e:
        yield op, f"{op.name} in @{function}: {e}"
        return
    if [*stated.operands] != operands or [r.complete for r in stated.results] != results:
        there = Strategy(None, tuple(o.dims for o in operands if o is not None))
        yield (
            op,
            f"[A3] {op.name} in @{function} has the strategy {op.strategy.data}; data parallel "
            f"it is {there}; {MEND}",
        )
