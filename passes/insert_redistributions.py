"""insert-redistributions: where layouts differ across an edge, a `dist.redistribute`.

    %z = nn.matmul %y, %v : (y over [{d}, {}], v over [{}, {d}]) -> z over [{}, {d}]
 -> %y_0 = dist.redistribute %y : [{d}, {}] -> [{}, {}]
    %z   = nn.matmul %y_0, %v

1. Every value has a layout before (propagate-strategies gives it).
2. Afterwards every op is computable where its operands lie: their layouts agree with its factors.
3. An op with a strategy is placed by it; any other at least cost (`algebra.factors.place`).
4. An op whose results come out partial, or otherwise than wanted, is followed by a redistribution.
5. A softmax, loss or norm whose row is split becomes the ops that calculate it in parts; a
   composite always does.
6. The same redistribution of a value is made once; an op that is placed at least cost takes what
   others need anyway for free.
7. The mark `recompute` of an argument goes to its redistributions, that of a search to those that
   gather: a parameter that is gathered for the forward part is gathered again for the backward
   part, and not kept in between.
8. Sharding groups and propagation barriers have had their effect: they go away, and a barrier
   between two layouts is a redistribution.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

from xdsl.context import Context
from xdsl.dialects.builtin import DictionaryAttr, ModuleOp, UnitAttr
from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass

from shardir.algebra.errors import ShardirError
from shardir.algebra.factors import Placement, place
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.analysis.functions import has_layouts, is_local_body, mesh_of, name_of, unlaid
from shardir.dialects.builder import Builder
from shardir.dialects.composites import replace_by_parts
from shardir.dialects.dist import (
    PropagationBarrierOp,
    RedistributeOp,
    ShardingGroupOp,
    layout_of,
    with_layout,
)
from shardir.dialects.nn.base import Composite, TensorOp, has_parts, plain, splits_whole
from shardir.dialects.train import BackwardOp, arg_attrs
from shardir.passes.functions import FOUND, bodies, set_type, settle, settle_all
from shardir.passes.recompute import MARK
from shardir.rewriting.placement import strategy_placement
from shardir.syntax.diagnostics import Failure


@dataclass(frozen=True)
class InsertRedistributions(ModulePass):
    """Puts a redistribution on each edge whose layouts differ."""

    name = "insert-redistributions"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for f, block in bodies(op):
            mesh = mesh_of(f, op)
            if is_local_body(block):
                continue
            if mesh is None or not has_layouts(block):
                settle_all(block, None)
                continue
            if (lacking := unlaid(block)) is not None:
                raise Failure(
                    [(lacking, f"a value in @{name_of(f)} has no layout; run propagate-strategies")]
                )
            _insert(block, mesh)
            _mark(f, block, mesh)


def _mark(f: FuncOp, block: Block, mesh: Mesh) -> None:
    """What is made of an argument that says `recompute` is not kept for the backward part; nor,
    where a search found that memory needs it, what is larger than that of which it is made."""
    marks: dict[SSAValue, dict[str, Any]] = dict(zip(block.args, arg_attrs(f), strict=True))
    found = f.attributes.get(FOUND)
    tight = isinstance(found, DictionaryAttr) and MARK in found.data
    ops = list(block.ops)
    last = max((i for i, op in enumerate(ops) if isinstance(op, BackwardOp)), default=len(ops))
    for op in ops[:last]:
        if not isinstance(op, RedistributeOp):
            continue
        shape = plain(op.value).get_shape()
        before, after = (prod(_layout(v).local_shape(mesh, shape)) for v in (op.value, op.out))
        if MARK in marks.get(op.value, ()) or (tight and after > before):
            op.attributes[MARK] = UnitAttr()


def _insert(block: Block, mesh: Mesh) -> None:
    needs = _needs(block, mesh)
    cursor: list[Operation] = []
    builder = Builder(mesh, lambda new: block.insert_op_before(new, cursor[0]))
    faults: list[tuple[Operation | None, str]] = []
    for op in list(block.ops):
        cursor[:] = [op]
        builder.location = op.location
        if isinstance(op, PropagationBarrierOp | ShardingGroupOp):
            settle(op, builder)
        if not isinstance(op, TensorOp):
            continue
        try:
            if in_parts(op, mesh):
                _decompose(op, builder, needs)
            else:
                _place(op, builder, mesh, needs)
        except ShardirError as e:
            faults.append((op, str(e)))
    if faults:
        raise Failure(faults)


Needs = dict[SSAValue, dict[Operation, Layout]]
"""In which other layouts than its own each value is needed, by which ops."""


def _needs(block: Block, mesh: Mesh) -> Needs:
    """What ops need that are placed each on its own."""
    needs: Needs = {}
    for op in block.ops:
        if isinstance(op, TensorOp) and not in_parts(op, mesh):
            try:
                _note(needs, op, wanted(op, mesh))
            except ShardirError:
                continue  # it is said where the op is placed
    return needs


def _note(needs: Needs, op: TensorOp, placement: Placement) -> None:
    for v, want in zip(op.operands, placement.operands, strict=True):
        if _layout(v) != want:
            needs.setdefault(v, {})[op] = want
        elif v in needs:
            needs[v].pop(op, None)


def wanted(op: TensorOp, mesh: Mesh, needs: Needs | None = None) -> Placement:
    """How an op is to be placed: by its strategy, or at least cost; what others need too, and is
    made once, counts nothing."""
    if op.strategy is not None:
        return strategy_placement(op, mesh)
    operands = tuple([_layout(v) for v in op.operands])
    results = tuple([_layout(v) for v in op.results])
    shared: tuple[tuple[Layout, ...], ...] = ()
    if needs and any(v in needs for v in op.operands):
        others = ({o: l for o, l in needs.get(v, {}).items() if o is not op} for v in op.operands)
        shared = tuple(tuple(dict.fromkeys(by.values())) for by in others)
    return place(op.factors(), operands, results, mesh, op.shapes(), shared if any(shared) else ())


def _layout(v: SSAValue) -> Layout:
    layout = layout_of(v)
    assert layout is not None
    return layout


def _place(op: TensorOp, builder: Builder, mesh: Mesh, needs: Needs) -> None:
    placement = wanted(op, mesh, needs)
    _note(needs, op, placement)
    op.properties.pop("strategy", None)
    for i, want in enumerate(placement.operands):
        operand = op.operands[i]
        if layout_of(operand) != want:
            op.operands[i] = builder.redistribute(operand, want)
    for v, natural in zip(op.results, placement.results, strict=True):
        if (assigned := _layout(v)) != natural:
            set_type(v, with_layout(plain(v), natural))
            new = _redistribute_after(op, v, assigned)
            needs[new] = needs.pop(v, {})


def _redistribute_after(op: TensorOp, v: SSAValue, layout: Layout) -> SSAValue:
    block = op.parent
    assert block is not None
    after = Builder(None, lambda new: block.insert_op_after(new, op))
    after.location = op.location
    new = after.redistribution(v, layout)
    if MARK in op.attributes and isinstance(new.owner, Operation):
        new.owner.attributes[MARK] = UnitAttr()  # what it makes is what others use
    v.replace_uses_with_if(new, lambda use: use.operation is not new.owner)
    return new


def in_parts(op: TensorOp, mesh: Mesh) -> bool:
    """Whether an op is to be calculated by others: a composite, or one that wants a dimension whole
    which is split."""
    if isinstance(op, Composite):
        return True
    if not has_parts(type(op)):
        return False
    if op.strategy is not None:
        return splits_whole(op.factors(), strategy_placement(op, mesh).operands)
    return splits_whole(op.factors(), [_layout(v) for v in op.operands])


def _decompose(op: TensorOp, builder: Builder, needs: Needs) -> None:
    if op.strategy is not None:
        assert builder.mesh is not None
        for i, want in enumerate(strategy_placement(op, builder.mesh).operands):
            op.operands[i] = builder.redistribute(op.operands[i], want)
    results = list(op.results)
    for v, new in zip(results, replace_by_parts(op, builder), strict=True):
        needs[new] = needs.pop(v, {})
