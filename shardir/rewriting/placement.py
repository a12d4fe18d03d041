"""How an op is placed: the layouts that its operands must have, and those of its results."""

from shardir.algebra.factors import Placement
from shardir.algebra.mesh import Mesh
from shardir.dialects.nn.base import TensorOp, strategy_factors


def strategy_placement(op: TensorOp, mesh: Mesh) -> Placement:
    """The placement that an op's strategy specifies.

    Raises:
        ShardirError: the strategy does not fit the op or the mesh.
    """
    assert op.strategy is not None
    return op.strategy.data.placement(strategy_factors(op), mesh)
