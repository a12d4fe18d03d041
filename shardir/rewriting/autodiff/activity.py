"""Activity: the values that depend on differentiated arguments.

A float value is active if an op computes it from an active value. A received value is computed from
the value that was sent, and each result of a collective from the value of its index.
"""

from collections.abc import Iterable, Sequence

from xdsl.dialects.builtin import AnyFloat, TensorType
from xdsl.ir import Operation, SSAValue

from shardir.algebra.collectives import AxisState
from shardir.compat.xdsl import operands_of
from shardir.dialects.dist import SAME_VALUE, CollectiveOp, RecvOp, SendOp, WaitOp, matching_sends
from shardir.dialects.nn import StopGradientOp


class Activity:
    """The active values among the marked ops."""

    def __init__(self, active: Iterable[SSAValue]):
        self.active = set(active)
        self.sends: dict[RecvOp, SendOp] = {}

    def match(self, ops: Iterable[Operation]) -> None:
        """Match sends and receives."""
        self.sends |= matching_sends(ops)

    def mark(self, ops: Iterable[Operation]) -> None:
        """Mark the active results of ops, in program order."""
        for op in ops:
            if isinstance(op, StopGradientOp):
                continue
            if (moved := self.communicated(op)) is not None:
                self.active.update(out for v, out in moved if v in self.active and is_float(out))
            elif not self.active.isdisjoint(operands_of(op)):
                self.active.update([v for v in op.results if is_float(v)])

    def operands(self, op: Operation) -> Sequence[SSAValue]:
        """Return the values that an op reads; a recv reads its send's value."""
        if isinstance(op, RecvOp) and op in self.sends:
            return [self.sends[op].value]
        return op.operands

    def communicated(self, op: Operation) -> list[tuple[SSAValue, SSAValue]] | None:
        """Return each value that an op communicates, with its result; None if the op does not
        communicate."""
        if isinstance(op, SAME_VALUE):
            return [(op.value, op.out)]
        if isinstance(op, (CollectiveOp, WaitOp)):
            return list(zip(op.values, op.outs, strict=True))
        if isinstance(op, RecvOp) and op in self.sends:
            return [(self.sends[op].value, op.out)]
        return None

    def dependent_ops(
        self, ops: Iterable[Operation], values: Iterable[SSAValue]
    ) -> list[Operation]:  # fmt: skip
        """Return the ops that depend on any of these values."""
        dependent_values, dependents = set(values), []
        for op in ops:
            if any(v in dependent_values for v in self.operands(op)):
                dependent_values.update(op.results)
                dependents.append(op)
        return dependents


def relocates(op: Operation) -> bool:
    """Whether an op only changes the layout of its value: it has no root, and makes no partial
    value."""
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
