"""data-parallel: no layouts -> inputs split along dimension 0, parameters replicated.

    func.func @loss(%x: tensor<8x4xf32>, %w: tensor<4x6xf32> {train.parameter = "w"})
 -> func.func @loss(%x: tensor<8x4xf32, #dist.layout<@m, [{dp, tp}, {}]>>,
                    %w: tensor<4x6xf32, #dist.layout<@m, [{}, {}]>> {train.parameter = "w"})

Runs before propagate-strategies, which spreads these layouts to the other values.

1. Parameters and states are replicated; any other argument is an input, and is split along
   dimension 0 over all axes of the mesh, in their order.
2. An annotation that contradicts these layouts (a layout, a strategy or a redistribution) is an
   error. Each is reported, with the data parallel layout or strategy.
3. With `hybrid` annotations are allowed. Parameters and states are replicated if they have no
   layout and their users no strategy. Inputs are left to propagate-strategies, which splits inputs
   that no annotation reaches along dimension 0 over the unused axes. Functions in the local view
   are not changed.
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
from shardir.analysis.functions import is_local_body, mesh_among, name_of, named, values
from shardir.compat.xdsl import set_type
from shardir.diagnostics import Failure, Located, ShardirError, coded
from shardir.dialects.dist import (
    MeshOp,
    RedistributeOp,
    layout_of,
    meshes_of,
    sharding_of,
    with_layout,
)
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import arguments
from shardir.rewriting.bases import Function, FunctionPass
from shardir.rewriting.copying import copied
from shardir.rewriting.functions import bodies, ops_of_bodies, update_signature
from shardir.rewriting.placement import strategy_op_sharding
from shardir.rewriting.registry import run_pipeline


@dataclass(frozen=True)
class DataParallel(FunctionPass):
    """Splits inputs along dimension 0 over all devices and replicates parameters."""

    name = "data-parallel"
    hybrid: bool = False
    """Whether annotated values keep their layouts."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        functions = self.concerned_functions(op)
        if not self.hybrid and (errors := list(_contradictions(ctx, op))):
            raise Failure(errors)
        self.rewrite_all(functions)

    def check(self, f: Function) -> Iterator[Located]:
        if f.mesh is None:
            yield f.op, coded("A1", f"expected a mesh to split the inputs of @{f.name}, got none")
        elif is_local_body(f.block) and not self.hybrid:
            message = f"expected @{f.name} in the global view, got the local view"
            yield f.op, coded("A2", message)

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
            if hybrid and _is_annotated(arg):
                continue
        elif hybrid:
            continue
        else:
            rows = (mesh.simplify(mesh.names), *[()] * (rank - 1)) if rank else ()
            layout = Layout(mesh.name, rows)
        set_type(arg, with_layout(unsharded_type(arg), layout))
    update_signature(f)


def _is_annotated(arg: SSAValue) -> bool:
    """Whether an argument has a layout, or an op that uses it has a strategy."""
    return sharding_of(arg) is not None or any(
        isinstance(use.operation, TensorOp) and use.operation.strategy is not None
        for use in arg.uses
    )


def _contradictions(ctx: Context, module: ModuleOp) -> Iterator[Located]:
    """Yield an error for each annotation that contradicts the data parallel layouts."""
    if not any(_annotates(op) for op in module.walk()):
        return
    twins: dict[SSAValue, SSAValue] = {}
    trial = module.clone(twins)
    run_pipeline("strip-layouts", ctx, trial)
    for op in module.body.ops:
        if isinstance(op, MeshOp):
            trial.body.block.add_op(copied(op))
    declared = meshes_of(module)
    meshes = [mesh_among(f, ops, declared) for f, ops in ops_of_bodies(module)]
    for (f, block), mesh in zip(bodies(trial), meshes, strict=True):
        assert mesh is not None
        _lay_out(f, block, mesh, hybrid=False)
    run_pipeline("propagate-strategies", ctx, trial)
    for (f, block), mesh in zip(bodies(module), meshes, strict=True):
        assert mesh is not None
        for v in values(block):
            annotated, layout = sharding_of(v), layout_of(twins[v])
            if annotated is None or layout is None or annotated.allows(layout, mesh):
                continue
            op = f if isinstance(v.owner, Block) else v.owner
            where = f"{named(v)} in @{name_of(f)}"
            yield op, coded("A3", f"expected the layout [{layout}] of {where}, got [{annotated}]")
        for op in block.ops:
            if isinstance(op, RedistributeOp):
                yield op, coded("A3", f"expected no redistribution in @{name_of(f)}, got {op.name}")
            elif isinstance(op, TensorOp) and op.strategy is not None:
                yield from _strategy_error(op, twins, mesh, name_of(f))


def _annotates(op: Operation) -> bool:
    """Whether an op, or an argument of its blocks, has an annotation."""
    if isinstance(op, RedistributeOp) or (isinstance(op, TensorOp) and op.strategy is not None):
        return True
    args = [arg for region in op.regions for block in region.blocks for arg in block.args]
    return any(sharding_of(v) is not None for v in (*op.results, *args))


def _strategy_error(
    op: TensorOp, twins: Mapping[SSAValue, SSAValue], mesh: Mesh, function: str
) -> Iterator[Located]:
    assert op.strategy is not None
    operands, results = ([layout_of(twins[v]) for v in side] for side in (op.operands, op.results))
    if None in operands:  # of a redistribution in the source
        return
    try:
        annotated = strategy_op_sharding(op, mesh)
    except ShardirError as e:
        yield op, f"{op.name} in @{function}: {e}"
        return
    if [*annotated.operands] != operands or [r.complete for r in annotated.results] != results:
        expected = Strategy(None, tuple(o.dims for o in operands if o is not None))
        where = f"{op.name} in @{function}"
        message = f"expected the strategy {expected} of {where}, got {op.strategy.data}"
        yield op, coded("A3", message)
