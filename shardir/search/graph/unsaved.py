"""The values that the forward part may leave to the backward part to compute again, as the search
for strategies counts them.

    segments of the forward part      %a -> %b -> %c  |  %d -> %e -> %f
    backward part                     again %e, gradients of %f, %e, %d  |  again %b, ...

1. A segment is one of the equal blocks of the forward part, such as layers, or what is between
   them; without such blocks, one of about as many parts as each has ops.
2. A value may be computed again if only ops of its segment read it in the forward part, and all
   that this takes is there when the backward part first reads a value of the segment: arguments,
   what is live then anyway, and other values that may be computed again.
3. It is not live from after its last read in the forward part to that moment. A program computes it
   again at that moment or later, and so needs no more than is counted.

Which values a program computes again is decided by `choose-recompute`, on the lowered program.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import isqrt
from typing import NamedTuple

from xdsl.dialects.func import ReturnOp
from xdsl.ir import Block, Operation, SSAValue

from shardir.analysis.loops import Loops
from shardir.analysis.repeats import equal_blocks
from shardir.analysis.storages import Span, Storages
from shardir.dialects.blocks import ops_of
from shardir.dialects.train import BackwardOp, CarryOp
from shardir.search.graph.live_bytes import LONG_LIVED_OPS
from shardir.search.recompute.activations import is_repeatable
from shardir.search.recompute.repetition_policies import FEWEST_BLOCKS, FEWEST_SAVED


class _ForwardValue(NamedTuple):
    """A storage that an op of the forward part makes: its segment, the last op there that reads it,
    and the first later one; None if none does, or it may not be computed again itself."""

    segment: int
    last: int
    first: int | None
    may: bool


class UnsavedValues:
    """The values of a block that may be computed again; none without its storages.

    Attributes:
        gaps: of each, the ops at which it is not live then.
        needs: of an op, those that are computed again with it, since the backward part does not
            read what they make.
        repeated: all ops that may be.
    """

    def __init__(self, block: Block, storages: Storages | None):
        self.gaps: dict[SSAValue, Span] = {}
        self.needs: dict[Operation, list[Operation]] = {}
        self.repeated = set[Operation]()
        ops = ops_of(block)
        border = next((i for i, op in enumerate(ops) if isinstance(op, BackwardOp)), 0)
        if storages is None or not border:
            return
        spans = storages.spans()
        self._storages, self._spans, self._border = storages, spans, border
        self._at, self._loops = {op: i for i, op in enumerate(ops)}, Loops(ops)
        self._segment = list(_segments(ops[:border]))
        self._around = self._loops.around(ops[border])
        self._values: dict[SSAValue, _ForwardValue] = {
            v: self._forward_value(v) for op in ops[:border] for v in op.results
            if storages.root(v) is v and v in spans
        }  # fmt: skip
        begins: dict[int, int] = {}
        for x in self._values.values():
            if x.may and x.first is not None:
                begins[x.segment] = min(begins.get(x.segment, x.first), x.first)
        self._find(ops[:border], begins)

    def _forward_value(self, v: SSAValue) -> _ForwardValue:
        members, at = self._storages.members(v), self._at
        makers = [m.owner for m in members if isinstance(m.owner, Operation)]
        users = [use.operation for m in members for use in m.uses]
        within = [at[op] for op in [*makers, *users] if at[op] < self._border]
        later = [at[op] for op in users if at[op] > self._border]
        segments = {self._segment[i] for i in within}
        may = (
            len(segments) == 1
            and all(map(is_repeatable, makers))
            and all(self._loops.around(op) is self._around for op in makers)
            and not any(isinstance(op, ReturnOp | CarryOp) for op in users)
        )
        segment = self._segment[min(within)]
        return _ForwardValue(segment, max(within), min(later, default=None), may)

    def _find(self, forward: Sequence[Operation], begins: Mapping[int, int]) -> None:
        """Find what may be computed again, an op after those that it reads."""
        again: dict[Operation, list[Operation]] = {}
        for op in forward:
            found = {v: self._values[v] for v in op.results if v in self._values}
            if not op.operands or not found or not all(x.may for x in found.values()):
                continue
            segment = self._segment[self._at[op]]
            begin = begins.get(segment)
            needs = None if begin is None else self._needs(op, segment, begin, again)
            if begin is None or needs is None:
                continue
            again[op] = needs
            for v, x in found.items():
                if x.first is not None and begin - x.last > LONG_LIVED_OPS:
                    self.gaps[v] = Span(x.last + 1, begin - 1)
        todo = [v.owner for v in self.gaps]
        while todo:
            op = todo.pop()
            assert isinstance(op, Operation)
            if op not in self.repeated:
                self.repeated.add(op)
                self.needs[op] = again[op]
                todo += again[op]

    def _needs(
        self, op: Operation, segment: int, begin: int, again: Mapping[Operation, object]
    ) -> list[Operation] | None:
        """Return the ops that are computed again with an op; None if something is not there."""
        found: dict[Operation, None] = {}
        for operand in op.operands:
            root = self._storages.root(operand)
            maker = root.owner
            if not isinstance(maker, Operation) or not maker.operands:
                continue
            x = self._values.get(root)
            if x is not None and x.segment == segment and x.first is None and maker in again:
                found[maker] = None
            elif root not in self._spans or self._spans[root].end < begin:
                return None
        return [*found]


def _segments(forward: Sequence[Operation]) -> Iterator[int]:
    """Yield the number of the segment of each op of the forward part."""
    at = {op: i for i, op in enumerate(forward)}
    found = equal_blocks(forward, FEWEST_BLOCKS, FEWEST_SAVED)
    begins = {at[block[0]] for each in found for block in each.blocks}
    begins |= {at[each.blocks[-1][-1]] + 1 for each in found}
    if not found:
        begins = {*range(0, len(forward), max(1, isqrt(len(forward))))}
    ends = sorted({0, *begins, len(forward)})
    for number, (begin, end) in enumerate(pairwise(ends)):
        yield from [number] * (end - begin)
