"""insert-redistributions: a `dist.redistribute` on each edge across which layouts differ.

    %z = nn.matmul %y, %v : (y over [{d}, {}], v over [{}, {d}]) -> z over [{}, {d}]
 -> %y_0 = dist.redistribute %y : [{d}, {}] -> [{}, {}]
    %z   = nn.matmul %y_0, %v

1. Requires a layout on every value (propagate-strategies infers them).
2. Afterwards every op is computable: the layouts of its operands agree with its factors.
3. An op with a strategy is placed by it; an op without one at minimum cost (`choose_op_sharding`).
4. A result that is partial, or not in its assigned layout, is redistributed after the op if it has
   uses.
5. A softmax, loss or norm whose row is split is decomposed; a composite always is.
6. Equal redistributions of a value are one. For an op placed at minimum cost, redistributions that
   further users of the value need are free.
7. The mark `recompute` of an argument goes to its redistributions, and the mark of a redistribution
   to redistributions of its result: a parameter that is gathered for the forward part is gathered
   again for the backward part, and not saved in between. After a search that needs the memory, all
   redistributions that gather get the mark, except those after an op to its result's assigned
   layout.
8. Sharding groups and propagation barriers are erased; a barrier between two layouts becomes a
   redistribution.
9. A broadcast (`nn.broadcast`) is redistributed by redistributing its smaller operand.
10. A redistribution of a value from before a loop over microbatches is before the loop, unless it
   has the mark `recompute`. A value that the loop carries has one layout.
11. Devices compute ops on values in device memory, hosts ops on values `on host`: a lookup where
    its table is, an update where its states are. All operands are redistributed there.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass

from xdsl.dialects.builtin import DictionaryAttr, UnitAttr
from xdsl.ir import Operation, SSAValue

from shardir.algebra.factors import OpSharding
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.compat.xdsl import operands_of, set_type
from shardir.diagnostics import Failure, Located, ShardirError
from shardir.dialects.blocks import of_kind, ops_of
from shardir.dialects.dist import (
    PropagationBarrierOp,
    RedistributeOp,
    ShardingGroupOp,
    layout_of,
    with_layout,
)
from shardir.dialects.nn import BroadcastOp
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import BackwardOp
from shardir.rewriting.bases import Function, GlobalPass
from shardir.rewriting.composites import decompose
from shardir.rewriting.hoisting import hoist_redistributions
from shardir.rewriting.hosts import place_on_hosts
from shardir.rewriting.marks import (
    RECOMPUTE,
    SEARCHED,
    RepeatedRedistributions,
    resolve_marker,
    resolve_markers,
)
from shardir.rewriting.placement import (
    Needs,
    is_decomposed,
    layout_at,
    placement_of,
    strategy_op_sharding,
)
from shardir.rewriting.rewriter import Rewriter, erase


@dataclass(frozen=True)
class InsertRedistributions(GlobalPass):
    """Inserts a redistribution on each edge whose layouts differ."""

    name = "insert-redistributions"

    def check(self, f: Function) -> Iterable[Located]:
        return f.without_layout() if f.has_layouts else ()

    def rewrite(self, f: Function) -> None:
        if f.mesh is None or not f.has_layouts:
            resolve_markers(f.block, None)
            return
        place_on_hosts(f.op, f.mesh)
        placement = _FunctionPlacement(f, f.mesh)
        placement.run()
        _mark_repeated(f, f.mesh, placement.own)
        hoist_redistributions(f.block)


def _mark_repeated(f: Function, mesh: Mesh, own: Container[SSAValue]) -> None:
    """Mark redistributions of values with the mark `recompute`. If a search found that memory needs
    it, also mark copies and redistributions to larger results, except to results in `own`, the
    values redistributed to their assigned layout."""
    searched = f.op.attributes.get(SEARCHED)
    tight = isinstance(searched, DictionaryAttr) and RECOMPUTE in searched.data
    is_repeated = RepeatedRedistributions(f.op, mesh)
    ops = ops_of(f.block)
    last = max((i for i, op in enumerate(ops) if isinstance(op, BackwardOp)), default=len(ops))
    for op in of_kind(ops[:last], RedistributeOp):
        if is_repeated(op, tight and op.out not in own):
            op.attributes[RECOMPUTE] = UnitAttr()


class _FunctionPlacement:
    """Places the ops of one function, one after another."""

    def __init__(self, f: Function, mesh: Mesh):
        self.block, self.mesh, self.rewriter = f.block, mesh, Rewriter(mesh)
        self.needs: Needs = {}
        self.own: set[SSAValue] = set()
        """Results that were redistributed to their assigned layout."""
        for op in self.block.ops:
            try:
                if isinstance(op, TensorOp) and not is_decomposed(op, mesh):
                    self.note(op, placement_of(op, mesh))
            except ShardirError:
                continue  # it is reported where the op is placed

    def run(self) -> None:
        errors: list[Located] = []
        for op in ops_of(self.block):
            self.rewriter.before(op)
            if isinstance(op, PropagationBarrierOp | ShardingGroupOp):
                resolve_marker(op, self.rewriter)
            if not isinstance(op, TensorOp):
                continue
            try:
                if is_decomposed(op, self.mesh):
                    self.decompose(op)
                else:
                    self.place(op)
            except ShardirError as e:
                errors.append((op, str(e)))
        if errors:
            raise Failure(errors)
        for op in reversed(of_kind(ops_of(self.block), BroadcastOp)):
            if op.out.first_use is None:  # its operand is redistributed instead
                erase(op)

    def note(self, op: TensorOp, placement: OpSharding) -> None:
        """Record the layouts in which an op needs its operands."""
        for v, layout in zip(operands_of(op), placement.operands, strict=True):
            if layout_at(v) != layout:
                self.needs.setdefault(v, {})[op] = layout
            elif v in self.needs:
                self.needs[v].pop(op, None)

    def place(self, op: TensorOp) -> None:
        placement = placement_of(op, self.mesh, self.needs)
        self.note(op, placement)
        if not op.KEEPS_STRATEGY:
            op.properties.pop("strategy", None)
        for i, layout in enumerate(placement.operands):
            operand = operands_of(op)[i]
            if layout_of(operand) != layout:
                op.operands[i] = self.rewriter.redistribute(operand, layout)
        for v, natural in zip(op.results, placement.results, strict=True):
            if (assigned := layout_at(v)) != natural:
                set_type(v, with_layout(unsharded_type(v), natural))
                if v.first_use is None:
                    continue
                new = _redistribute_after(op, v, assigned, self.mesh)
                self.own.add(new)
                self.needs[new] = self.needs.pop(v, {})

    def decompose(self, op: TensorOp) -> None:
        if op.strategy is not None:
            for i, layout in enumerate(strategy_op_sharding(op, self.mesh).operands):
                op.operands[i] = self.rewriter.redistribute(op.operands[i], layout)
        results = list(op.results)
        for v, new in zip(results, decompose(op, self.rewriter), strict=True):
            self.own.add(new)
            self.needs[new] = self.needs.pop(v, {})


def _redistribute_after(op: TensorOp, v: SSAValue, layout: Layout, mesh: Mesh) -> SSAValue:
    new = Rewriter(mesh).after(op).redistribution(v, layout)
    if RECOMPUTE in op.attributes and isinstance(new.owner, Operation):
        new.owner.attributes[RECOMPUTE] = UnitAttr()  # its result replaces the op's
    v.replace_uses_with_if(new, lambda use: use.operation is not new.owner)
    return new
