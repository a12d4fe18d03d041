"""Which ops need not be calculated, and which results lie in the memory of an operand.

The latter is on the safe side for whoever writes into memory: two values that may share it do.
"""

from collections.abc import Iterator, Sequence

from xdsl.dialects.builtin import TensorType
from xdsl.ir import Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.dialects import dist, nn
from shardir.dialects.nn.base import TensorOp

VIEWS: tuple[type[Operation], ...] = (
    nn.ReshapeOp,
    nn.TransposeOp,
    nn.BroadcastOp,
    nn.StopGradientOp,
    nn.SliceOp,
    nn.SplitOp,
    nn.UnfoldOp,
    nn.FoldOp,
    dist.AllSliceOp,
    dist.ReplicatedToPartialOp,
    dist.BroadcastFromRootOp,
    dist.PermuteOp,
    dist.HaloUnfoldOp,
    dist.WaitOp,
)
"""Ops whose result may be their operand, or a view of it."""


def live_ops(ops: list[Operation]) -> list[Operation]:
    """The ops whose results somebody needs; sends, receives and collectives always are."""
    needed: set[SSAValue] = set()
    kept = []
    for op in reversed(ops):
        if isinstance(op, TensorOp) and not any(r in needed for r in op.results):
            continue
        kept.append(op)
        needed.update(op.operands)
    return kept[::-1]


def views(op: Operation, mesh: Mesh | None) -> Iterator[tuple[SSAValue, SSAValue]]:
    """The results that may be views, each with its operand."""
    if isinstance(op, VIEWS) or moves_nothing(op, mesh):
        operands = tuple(op.operands) * (len(op.results) if len(op.operands) == 1 else 1)
        yield from zip(op.results, operands, strict=True)


def waits(ops: Sequence[Operation]) -> dict[Operation, int]:
    """Of each collective that is started the index of its wait: until then it reads what it takes,
    and has its buffers."""
    return {op.started: i for i, op in enumerate(ops) if isinstance(op, dist.WaitOp)}


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
