"""The loops of a block: how often each op runs, and how far a value can move.

train.microbatches 4       runs once
%y = nn.matmul %x, %w      runs 4 times
train.repeat 3             runs 4 times
%z = nn.relu %y            runs 12 times
train.end_repeat
train.end_microbatches
"""

from collections.abc import Iterable, Iterator, Sequence

from xdsl.ir import Operation, SSAValue

from shardir.dialects.train import AfterLoop, CarriedOp, EndLoop, Loop


class Loops:
    """The loops over some ops of a block, in their order."""

    def __init__(self, ops: Iterable[Operation]):
        self._loop: dict[Operation, Loop | None] = {}
        self.ends: dict[Loop, EndLoop] = {}
        """The end of each loop, inner loops first."""
        ops = list(ops)
        self._any = any(issubclass(kind, Loop) for kind in {*map(type, ops)})
        """Whether there is a loop; this makes queries fast in programs without loops."""
        loop: Loop | None = None
        for op in ops if self._any else ():
            self._loop[op] = loop
            if isinstance(op, Loop):
                loop = op
            elif loop is not None and isinstance(op, EndLoop):
                self.ends[loop], loop = op, self._loop[loop]

    def __bool__(self) -> bool:
        """Whether there is a loop."""
        return self._any

    def around(self, op: Operation) -> Loop | None:
        """Return the innermost loop that contains or ends at an op; the op may be new."""
        if not self._any:
            return None
        if op not in self._loop:
            self._loop[op] = self._loop_after(op.prev_op)
        return self._loop[op]

    def _loop_after(self, op: Operation | None) -> Loop | None:
        """Return the loop of an op inserted after this one."""
        while op is not None and op not in self._loop:
            op = op.prev_op
        if op is None or isinstance(op, Loop):
            return op
        loop = self._loop[op]
        return self._loop[loop] if isinstance(op, EndLoop) and loop is not None else loop

    def _enclosing_loops(self, op: Operation) -> Iterator[Loop]:
        """Yield the loops around an op, innermost first."""
        loop = self.around(op)
        while loop is not None:
            yield loop
            loop = self._loop[loop]

    def forget(self, op: Operation) -> None:
        """Drop the cached loop of an op that was moved."""
        self._loop.pop(op, None)

    def runs(self, op: Operation) -> int:
        """Return how often an op runs."""
        if not self._any:
            return 1
        runs = 1
        for loop in self._enclosing_loops(op):
            runs *= 1 if self.ends.get(loop) is op else loop.runs
        return runs

    def changes(self, v: SSAValue) -> int:
        """Return how often a value changes: a carried value once in each run of its loop, a result
        of a loop as often as the loop runs."""
        op = v.owner
        if isinstance(op, CarriedOp):
            return max((self.runs(use.operation) for use in v.uses), default=1)
        if isinstance(op, AfterLoop) and (loop := self.around(op)) is not None:
            return self.runs(self.ends[loop])
        return self.runs(op) if isinstance(op, Operation) else 1

    def needed_at(self, user: Operation, op: Operation) -> Operation:
        """Return the op before which `user` needs a result of `op`: the start of the outermost loop
        around `user` that does not contain `op`, or `user`."""
        if not self._any:
            return user
        around_op = {*self._enclosing_loops(op)}
        for loop in self._enclosing_loops(user):
            if loop in around_op:
                break
            user = loop
        return user

    def available_after(self, op: Operation, user: Operation) -> Operation:
        """Return the op after which `user` can read the results of `op`: the end of the outermost
        loop around `op` that does not contain `user`, or `op`."""
        if not self._any:
            return op
        around_user = {*self._enclosing_loops(user)}
        if isinstance(op, AfterLoop) and (loop := self.around(op)) is not None:
            op = self.ends[loop]
        for loop in self._enclosing_loops(op):
            if loop in around_user and self.ends[loop] is not op:
                break
            op = self.ends[loop]
        return op


def execution_order(
    ops: Iterable[Operation], kind: type[Loop] = Loop
) -> Iterator[tuple[Operation, int]]:
    """Yield the ops in the order in which they run, each with the run of its innermost loop; 0
    outside of loops. Loops that are not of `kind` count as ops that run once."""
    sequence = list(ops)
    loops = Loops(sequence)
    at = {op: i for i, op in enumerate(sequence)}
    return _execution_order(sequence, 0, len(sequence), 0, loops, at, kind)


def _execution_order(
    ops: Sequence[Operation],
    i: int,
    stop: int,
    run: int,
    loops: Loops,
    at: dict[Operation, int],
    kind: type[Loop],
) -> Iterator[tuple[Operation, int]]:
    while i < stop:
        op = ops[i]
        if isinstance(op, kind):
            end = at[loops.ends[op]]
            for number in range(op.runs):
                yield from _execution_order(ops, i + 1, end, number, loops, at, kind)
            i = end
        else:
            yield op, run
        i += 1
