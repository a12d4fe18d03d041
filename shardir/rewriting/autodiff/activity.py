"""Activity: which values depend on those that are differentiated.

A value is active if it is of floats and an op computes it from an active one. What is received is
computed from what was sent.
"""

from collections.abc import Iterable, Sequence

from xdsl.dialects.builtin import AnyFloat, TensorType
from xdsl.ir import Operation, SSAValue

from shardir.algebra.collectives import AxisState
from shardir.dialects.dist import SAME_VALUE, CollectiveOp, RecvOp, SendOp, WaitOp, matching_sends
from shardir.dialects.nn import StopGradientOp


class Activity:
    """The active values of the ops that are marked so far."""

    def __init__(self, active: Iterable[SSAValue]):
        self.active = set(active)
        self.sends: dict[RecvOp, SendOp] = {}

    def match(self, ops: Iterable[Operation]) -> None:
        """Match sends and receives."""
        self.sends |= matching_sends(ops)

    def mark(self, ops: Iterable[Operation]) -> None:
        """Mark the results of ops, which stand in order."""
        for op in ops:
            if isinstance(op, StopGradientOp):
                continue
            if any(v in self.active for v in self.operands(op)):
                self.active.update(v for v in op.results if is_float(v))

    def operands(self, op: Operation) -> Sequence[SSAValue]:
        """The values that an op computes with."""
        if isinstance(op, RecvOp) and op in self.sends:
            return [self.sends[op].value]
        return op.operands

    def communicated(self, op: Operation) -> list[tuple[SSAValue, SSAValue]] | None:
        """Each value that communication moves, with its result; None of any other op."""
        if isinstance(op, SAME_VALUE):
            return [(op.value, op.out)]
        if isinstance(op, CollectiveOp | WaitOp):
            return list(zip(op.values, op.outs, strict=True))
        if isinstance(op, RecvOp) and op in self.sends:
            return [(self.sends[op].value, op.out)]
        return None

    def dependent(
        self, ops: Iterable[Operation], values: Iterable[SSAValue]
    ) -> list[Operation]:  # fmt: skip
        """The ops that compute with any of these values."""
        reached, found = set(values), []
        for op in ops:
            if any(v in reached for v in self.operands(op)):
                reached.update(op.results)
                found.append(op)
        return found


def relocates(op: Operation) -> bool:
    """Whether an op gives its value another layout, whatever single devices hold of it: it needs no
    root, and brings no addends about."""
    if isinstance(op, CollectiveOp):
        record = op.record
        return (
            record.planned
            and record.start is not AxisState.ROOT
            and record.end is not AxisState.PARTIAL
        )
    return isinstance(op, (*SAME_VALUE, WaitOp))


def is_float(v: SSAValue) -> bool:
    """Whether a value can have a cotangent."""
    return isinstance(v.type, TensorType) and isinstance(v.type.element_type, AnyFloat)
