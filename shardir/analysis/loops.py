"""The loops of a block: how often each op runs, and between which ops a value can be moved.

train.microbatches 4       runs once
%y = nn.matmul %x, %w      runs 4 times
train.end_microbatches
"""

from collections.abc import Iterable, Iterator

from xdsl.ir import Operation, SSAValue

from shardir.dialects.train import (
    AccumulateOp,
    CarriedOp,
    EndMicrobatchesOp,
    MicrobatchesOp,
)


class Loops:
    """The loops over some ops of a block, in their order."""

    def __init__(self, ops: Iterable[Operation]):
        self._loop: dict[Operation, MicrobatchesOp | None] = {}
        self.ends: dict[MicrobatchesOp, EndMicrobatchesOp] = {}
        """The end of each loop."""
        loop: MicrobatchesOp | None = None
        for op in ops:
            if isinstance(op, MicrobatchesOp):
                self._loop[op], loop = None, op
                continue
            self._loop[op] = loop
            if loop is not None and isinstance(op, EndMicrobatchesOp):
                self.ends[loop], loop = op, None

    def around(self, op: Operation) -> MicrobatchesOp | None:
        """Return the loop that an op is in, or ends; the op may be a new one."""
        if op not in self._loop:
            self._loop[op] = self._after(op.prev_op)
        return self._loop[op]

    def _after(self, op: Operation | None) -> MicrobatchesOp | None:
        """Return the loop that an op after this one is in."""
        while op is not None and not isinstance(op, MicrobatchesOp | EndMicrobatchesOp):
            if op in self._loop:
                return self._loop[op]
            op = op.prev_op
        return op if isinstance(op, MicrobatchesOp) else None

    def forget(self, op: Operation) -> None:
        """Forget the loop of an op that was moved."""
        del self._loop[op]

    def runs(self, op: Operation) -> int:
        """Return how often an op runs."""
        loop = self.around(op)
        return 1 if loop is None or isinstance(op, EndMicrobatchesOp) else loop.runs

    def changes(self, v: SSAValue) -> int:
        """Return how often a value changes: the sum of train.accumulate once, a value that a loop
        carries in each run of it."""
        op = v.owner
        if isinstance(op, CarriedOp):
            return max((self.runs(use.operation) for use in v.uses), default=1)
        return self.runs(op) if isinstance(op, Operation) and not _accumulates(op) else 1

    def needed_at(self, user: Operation, op: Operation) -> Operation:
        """Return the op before which a result of `op` is needed for `user`: the beginning of the
        loop around that, if `op` is not in it."""
        loop = self.around(user)
        return user if loop is None or loop is self.around(op) else loop

    def available_after(self, op: Operation, user: Operation) -> Operation:
        """Return the op after which the results of `op` can be used where `user` is: the end of its
        loop, if `user` is not in it."""
        loop = self.around(op)
        if loop is None or (loop is self.around(user) and not _accumulates(op)):
            return op
        return self.ends[loop]


def _accumulates(op: Operation) -> bool:
    return isinstance(op, AccumulateOp)


def executed(ops: Iterable[Operation]) -> Iterator[tuple[Operation, int]]:
    """Yield the ops in the order in which they run, each with the index of its microbatch; 0
    outside of loops."""
    body: list[Operation] | None = None
    runs = 0
    for op in ops:
        if isinstance(op, MicrobatchesOp):
            body, runs = [], op.runs
        elif isinstance(op, EndMicrobatchesOp) and body is not None:
            for index in range(runs):
                yield from ((repeated, index) for repeated in body)
            body = None
        elif body is not None:
            body.append(op)
        else:
            yield op, 0
