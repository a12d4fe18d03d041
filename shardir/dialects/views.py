"""Which results lie in the memory of an operand: what is a view need not be calculated or stored.

The answer is on the safe side for whoever writes into memory: two values that may share it do.
"""

from collections.abc import Iterator

from xdsl.dialects.builtin import TensorType
from xdsl.ir import Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.dialects import dist, nn

VIEWS: tuple[type[Operation], ...] = (
    nn.ReshapeOp,
    nn.TransposeOp,
    nn.BroadcastOp,
    nn.StopGradientOp,
    nn.SliceOp,
    nn.SplitOp,
    nn.UnfoldOp,
    nn.FoldOp,
    dist.SliceOp,
    dist.ContributeOp,
    dist.BroadcastOp,
    dist.PermuteOp,
    dist.UnfoldOp,
)
"""Ops whose result may be their operand, or a view of it."""


def views(op: Operation, mesh: Mesh | None) -> Iterator[tuple[SSAValue, SSAValue]]:
    """The results that may be views, each with its operand."""
    if isinstance(op, VIEWS) or moves_nothing(op, mesh):
        operands = tuple(op.operands) * (len(op.results) if len(op.operands) == 1 else 1)
        yield from zip(op.results, operands, strict=True)


def moves_nothing(op: Operation, mesh: Mesh | None) -> bool:
    """Whether an op gives its operands as they are, because of its types or its properties."""
    match op:
        case dist.Collective():
            return mesh is None or mesh.extent(op.axes.data) == 1
        case nn.ConvertOp():
            return _element(op.x) == _element(op.out)
        case nn.ReduceOp():
            return not op.dims.data
        case _:
            return False


def _element(v: SSAValue) -> object:
    assert isinstance(v.type, TensorType)
    return v.type.element_type
