"""The loops of a block: how often each op runs, and between which ops a value can be moved.

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
        """Whether there is a loop; many programs have none, and ask for each op."""
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
        """Return the innermost loop that an op is in, or ends; the op may be a new one."""
        if not self._any:
            return None
        if op not in self._loop:
            self._loop[op] = self._after(op.prev_op)
        return self._loop[op]

    def _after(self, op: Operation | None) -> Loop | None:
        """Return the loop that an op after this one is in."""
        while op is not None and op not in self._loop:
            op = op.prev_op
        if op is None or isinstance(op, Loop):
            return op
        loop = self._loop[op]
        return self._loop[loop] if isinstance(op, EndLoop) and loop is not None else loop

    def _outwards(self, op: Operation) -> Iterator[Loop]:
        """Yield the loops around an op, the innermost first."""
        loop = self.around(op)
        while loop is not None:
            yield loop
            loop = self._loop[loop]

    def forget(self, op: Operation) -> None:
        """Forget the loop of an op that was moved."""
        self._loop.pop(op, None)

    def runs(self, op: Operation) -> int:
        """Return how often an op runs."""
        if not self._any:
            return 1
        runs = 1
        for loop in self._outwards(op):
            runs *= 1 if self.ends.get(loop) is op else loop.runs
        return runs

    def changes(self, v: SSAValue) -> int:
        """Return how often a value changes: one that is there after a loop as often as that runs, a
        value that a loop carries in each run of it."""
        op = v.owner
        if isinstance(op, CarriedOp):
            return max((self.runs(use.operation) for use in v.uses), default=1)
        if isinstance(op, AfterLoop) and (loop := self.around(op)) is not None:
            return self.runs(self.ends[loop])
        return self.runs(op) if isinstance(op, Operation) else 1

    def needed_at(self, user: Operation, op: Operation) -> Operation:
        """Return the op before which a result of `op` is needed for `user`: the beginning of the
        outermost loop around that in which `op` is not."""
        if not self._any:
            return user
        mine = {*self._outwards(op)}
        for loop in self._outwards(user):
            if loop in mine:
                break
            user = loop
        return user

    def available_after(self, op: Operation, user: Operation) -> Operation:
        """Return the op after which the results of `op` can be used where `user` is: the end of the
        outermost loop around it in which `user` is not."""
        if not self._any:
            return op
        around = {*self._outwards(user)}
        if isinstance(op, AfterLoop) and (loop := self.around(op)) is not None:
            op = self.ends[loop]
        for loop in self._outwards(op):
            if loop in around and self.ends[loop] is not op:
                break
            op = self.ends[loop]
        return op


def executed(ops: Iterable[Operation], kind: type[Loop] = Loop) -> Iterator[tuple[Operation, int]]:
    """Yield the ops in the order in which they run, each with the number of the run of its
    innermost loop; 0 outside of loops. Loops that are not of a kind are as ops that run once."""
    sequence = list(ops)
    loops = Loops(sequence)
    at = {op: i for i, op in enumerate(sequence)}
    return _executed(sequence, 0, len(sequence), 0, loops, at, kind)


def _executed(
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
            for inner in range(op.runs):
                yield from _executed(ops, i + 1, end, inner, loops, at, kind)
            i = end
        else:
            yield op, run
        i += 1
