"""The placement of an op: the layouts that its operands must have, and those of its results."""

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
"""The layouts other than its own in which each value is needed, with the ops that need them."""


def layout_at(v: SSAValue) -> Layout:
    """Return the layout of a value that has one."""
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


def wanted(op: TensorOp, mesh: Mesh, needs: Needs | None = None) -> OpSharding:
    """Return the placement of an op: by its strategy, or at minimum cost. A redistribution that
    another op needs too is made once, and costs nothing here.

    Raises:
        ShardirError: the strategy does not fit the op or the mesh.
    """
    if isinstance(op, CarriedOp | CarryOp):  # the values are one variable
        of = op.out if isinstance(op, CarriedOp) else op.carried
        layout = layout_at(of).complete
        return OpSharding({}, (layout,) * len(op.operands), (layout,))
    shared: tuple[tuple[Layout, ...], ...] = ()
    if needs and any(v in needs for v in operands_of(op)):
        others = ({o: l for o, l in needs.get(v, {}).items() if o is not op} for v in op.operands)
        shared = tuple(tuple(dict.fromkeys(by.values())) for by in others)
    if any(shared):
        return _placed(op, mesh, shared)
    return _alone.of_op(op, lambda: _placed(op, mesh, ()), mesh)


_alone = SignatureMemo()
"""The placements of ops whose operands no other op needs in another layout."""


def _placed(op: TensorOp, mesh: Mesh, shared: tuple[tuple[Layout, ...], ...]) -> OpSharding:
    """Return the placement of an op whose operands others need in the layouts `shared`."""
    operands = tuple([layout_at(v) for v in op.operands])
    results = tuple([layout_at(v) for v in op.results])
    if op.strategy is not None:
        found = strategy_op_sharding(op, mesh)
    else:
        found = choose_op_sharding(
            op.factors(), operands, results, mesh, op.shapes(), itemsizes(op), shared, converts(op)
        )
    return found.on_host if op.runs_on_host(operands, results) else found


def itemsizes(op: TensorOp) -> tuple[int, ...]:
    """Return the bytes of an element of each operand, then of each result."""
    return tuple([itemsize(unsharded_type(v)) for v in (*op.operands, *op.results)])


def converts(op: TensorOp) -> bool:
    """Whether operands and results have several element types."""
    return len({unsharded_type(v).element_type for v in (*op.operands, *op.results)}) > 1


def is_decomposed(op: TensorOp, mesh: Mesh) -> bool:
    """Whether an op is computed by others: a composite, or one that needs a dimension unsharded
    which is sharded.

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
