"""The placement of an op: the layouts of its operands and of its results."""

from xdsl.ir import Operation, SSAValue

from shardir.algebra.factors import OpSharding
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.algebra.op_sharding import choose_op_sharding
from shardir.compat.xdsl import operands_of
from shardir.dialects.dist import layout_of
from shardir.dialects.nn.base import (
    TensorOp,
    decomposes,
    is_in_parts,
    strategy_factors,
)
from shardir.dialects.nn.types import itemsize, unsharded_type
from shardir.dialects.signatures import SignatureMemo
from shardir.dialects.train import CarriedOp, CarryOp

Needs = dict[SSAValue, dict[Operation, Layout]]
"""For each value the layouts that users need and that differ from its own, by user."""


def layout_at(v: SSAValue) -> Layout:
    """Return the layout of a value with a layout."""
    layout = layout_of(v)
    assert layout is not None
    return layout


def strategy_op_sharding(op: TensorOp, mesh: Mesh) -> OpSharding:
    """Return the placement that an op's strategy specifies.

    Raises:
        ShardirError: the strategy does not fit the op or the mesh.
    """
    assert op.strategy is not None
    return op.strategy.data.op_sharding(strategy_factors(op), mesh)


def placement_of(op: TensorOp, mesh: Mesh, needs: Needs | None = None) -> OpSharding:
    """Return the placement of an op: by its strategy, or at minimum cost. A redistribution that a
    further user of the operand needs is made once, and costs nothing here.

    Raises:
        ShardirError: the strategy does not fit the op or the mesh.
    """
    if isinstance(op, CarriedOp | CarryOp):  # the values are one variable
        variable = op.out if isinstance(op, CarriedOp) else op.carried
        layout = layout_at(variable).complete
        return OpSharding({}, (layout,) * len(op.operands), (layout,))
    shared: tuple[tuple[Layout, ...], ...] = ()
    if needs and any(v in needs for v in operands_of(op)):
        needs_of_others = (
            {o: l for o, l in needs.get(v, {}).items() if o is not op} for v in op.operands
        )
        shared = tuple(tuple(dict.fromkeys(by.values())) for by in needs_of_others)
    if any(shared):
        return _choose_placement(op, mesh, shared)
    return _unshared.of_op(op, lambda: _choose_placement(op, mesh, ()), mesh)


_unshared = SignatureMemo()
"""The placements of ops that share no redistribution of an operand."""


def _choose_placement(
    op: TensorOp, mesh: Mesh, shared: tuple[tuple[Layout, ...], ...]
) -> OpSharding:
    """Return the placement of an op; further users need its operands in the layouts `shared`."""
    operands = tuple([layout_at(v) for v in op.operands])
    results = tuple([layout_at(v) for v in op.results])
    if op.strategy is not None:
        placement = strategy_op_sharding(op, mesh)
    else:
        placement = choose_op_sharding(
            op.factors(), operands, results, mesh, op.shapes(), itemsizes(op), shared, converts(op)
        )
    return placement.on_host if op.runs_on_host(operands, results) else placement


def itemsizes(op: TensorOp) -> tuple[int, ...]:
    """Return the bytes of an element of each operand, then of each result."""
    return tuple([itemsize(unsharded_type(v)) for v in (*op.operands, *op.results)])


def converts(op: TensorOp) -> bool:
    """Whether operands and results have different element types."""
    return len({unsharded_type(v).element_type for v in (*op.operands, *op.results)}) > 1


def is_decomposed(op: TensorOp, mesh: Mesh) -> bool:
    """Whether an op is replaced by its decomposition: it is a composite, or needs a dimension
    unsharded that is sharded.

    Raises:
        ShardirError: the strategy does not fit the op or the mesh.
    """
    if not decomposes(type(op)):
        return False
    if op.strategy is not None:
        operands = strategy_op_sharding(op, mesh).operands
    else:
        operands = tuple([layout_at(v) for v in op.operands])
    return is_in_parts(type(op), op.factors(), operands)
