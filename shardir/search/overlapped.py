"""The time of a plan with overlap, estimated without its lowered program.

The ops of the function are computed in their order, and each redistribution of the plan is in
flight from the op that makes the value to the first one that needs it. fuse-communication moves
casts of gradients to the update, and so does the estimate. What the estimate leaves out: memory
that keeps collectives from being started, buckets that start when their last value is there, and
collectives that later passes remove.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from xdsl.ir import Block, Operation, SSAValue

from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.algebra.redistribution import plan
from shardir.algebra.steps import step_form
from shardir.analysis.loops import Loops
from shardir.analysis.updates import after_update, update_position
from shardir.cost.schedule import Flight, level_of, seconds_at_best
from shardir.dialects.blocks import ops_of
from shardir.dialects.dist import RedistributeOp
from shardir.dialects.nn import ConvertOp
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import itemsize
from shardir.search.candidates import Candidate
from shardir.search.latency_shares import LatencyShares
from shardir.search.pins import pins
from shardir.search.transfer_costs import ValueTransfer, bucket_price, transfer_seconds
from shardir.search.value_moves import MovedValue


class TimedMove(NamedTuple):
    """A collective of a redistribution.

    Attributes:
        way: the layout in which the value is redistributed, and the steps up to this one.
        level: of the links.
        seconds, latency: how long it takes, and how much of that is latency.
    """

    way: tuple[Layout | CollectiveStep, ...]
    level: str
    seconds: float
    latency: float


class TimedTransfer(NamedTuple):
    """A redistribution of a plan.

    Attributes:
        after, before: the positions of the ops between which it is in flight.
        value: what is redistributed.
        late: whether it is for ops after the update only.
        may_share: whether its first moves may be those of others from the same layout, made once.
    """

    after: int
    before: int
    value: SSAValue
    of: ValueTransfer
    late: bool
    may_share: bool = False


class _TimedUse(NamedTuple):
    """An op that uses a value, at which operands, the position at which it is computed, and whether
    it is late."""

    op: TensorOp
    operands: tuple[int, ...]
    at: int
    late: bool


class _TimedValue(NamedTuple):
    """A value, the op that makes it, with its position and the number of the result, or None and -1
    for an argument; what is redistributed for it, whether all ops that use it are late, and those
    that have candidates."""

    value: SSAValue
    maker: Operation | None
    at: int
    index: int
    moved: MovedValue
    late: bool
    uses: list[_TimedUse]


class StepTimeline:
    """The ops of a block in their order, and how they use its values."""

    def __init__(self, block: Block, mesh: Mesh):
        self.block, self.mesh = block, mesh
        self._ops = ops_of(block)
        self._at = {op: i for i, op in enumerate(self._ops)}
        self._late, self._loops = after_update(self._ops), Loops(self._ops)
        self._pins = pins(block, mesh)
        self._computed = self._positions()
        self._made = [*self._values()]
        self._moves: dict[tuple, tuple[TimedMove, ...]] = {}

    def _positions(self) -> list[int]:
        """Return the position at which each op is computed: its own; of a cast that is only used
        after the update, the first use."""
        found = list(range(len(self._ops)))
        for i in reversed(range(update_position(self._ops))):
            op = self._ops[i]
            if isinstance(op, ConvertOp) and self._late([op]):
                found[i] = min(found[self._at[use.operation]] for use in op.out.uses)
        return found

    def _values(self) -> Iterator[_TimedValue]:
        """Yield the arguments, and the results of ops that have candidates and of pins."""
        uses: dict[SSAValue, list[_TimedUse]] = {}
        for op in self._ops:
            if isinstance(op, TensorOp):
                at, late = self._computed[self._at[op]], self._late([op])
                for v in dict.fromkeys(op.operands):
                    operands = tuple([i for i, w in enumerate(op.operands) if w is v])
                    uses.setdefault(v, []).append(_TimedUse(op, operands, at, late))

        def made(v: SSAValue, maker: Operation | None, at: int, index: int) -> _TimedValue:
            late = self._late([use.operation for use in v.uses])  # func.return is one
            return _TimedValue(v, maker, at, index, MovedValue.of(v), late, uses.get(v, []))

        yield from (made(v, None, -1, 0) for v in self.block.args)
        for at, op in enumerate(self._ops):
            if isinstance(op, TensorOp) or op in self._pins:
                yield from (made(v, op, at, i) for i, v in enumerate(op.results))

    def seconds(
        self,
        candidates: Mapping[TensorOp, Candidate],
        layouts: Mapping[SSAValue, Layout],
        shares: LatencyShares,
    ) -> float:
        """Return the time of a plan: of candidates and layouts, with shares of buckets."""
        computing = [0.0] * len(self._ops)
        for op, c in candidates.items():
            seconds = self._loops.runs(op) * c.seconds * c.times
            computing[self._computed[self._at[op]]] += seconds
        flights, made = list[Flight](), set[tuple]()
        for after, before, v, transfer, late, may_share in self._transfers(candidates, layouts):
            moves, n = self._moves_of(transfer, shares if late else None), self._loops.changes(v)
            if may_share:
                moves = tuple([m for m in moves if (v, m.way) not in made])
                made.update((v, m.way) for m in moves)
            if moves and n:
                of = tuple((m.level, n * m.seconds, n * m.latency) for m in moves)
                flights.append(Flight(after, before, of))
        return seconds_at_best(computing, flights, self.mesh)

    def _transfers(
        self, candidates: Mapping[TensorOp, Candidate], layouts: Mapping[SSAValue, Layout]
    ) -> Iterator[TimedTransfer]:
        """Yield the redistributions."""
        for v, maker, at, index, moved, is_late, uses in self._made:
            if (layout := layouts.get(v)) is None:
                continue
            source = layout
            if isinstance(maker, TensorOp):
                source = candidates[maker].results[index]
            elif isinstance(maker, RedistributeOp):
                yield from self._pinned(maker, uses)
                source = self._pins[maker].transfer.target
            if source != layout:
                transfer = moved.transfer(source, layout)
                yield TimedTransfer(at, self._first(uses), v, transfer, is_late)
            needs: dict[Layout, list[_TimedUse]] = {}
            for use in uses:
                operands = candidates[use.op].operands
                for need in dict.fromkeys([operands[k] for k in use.operands]):
                    if need != layout:
                        needs.setdefault(need, []).append(use)
            for need, those in needs.items():
                is_late, transfer = all(use.late for use in those), moved.transfer(layout, need)
                yield TimedTransfer(at, self._first(those), v, transfer, is_late, may_share=True)

    def _pinned(self, op: RedistributeOp, uses: Sequence[_TimedUse]) -> Iterator[TimedTransfer]:
        """Yield the redistributions of a pin."""
        pin, maker = self._pins[op], op.value.owner
        start = self._at[maker] if isinstance(maker, Operation) else -1
        yield TimedTransfer(start, self._first(uses), op.out, pin.transfer, False)
        if pin.again is not None and pin.unsaved is not None:
            yield TimedTransfer(pin.unsaved.start - 1, pin.again, op.out, pin.transfer, False)

    def _first(self, uses: Sequence[_TimedUse]) -> int:
        """Return the position of the first use."""
        return min([use.at for use in uses], default=len(self._ops))

    def _moves_of(
        self, transfer: ValueTransfer, shares: LatencyShares | None
    ) -> tuple[TimedMove, ...]:
        """Return the collectives of a redistribution; none if nothing is sent."""
        key = transfer, shares
        if key not in self._moves:
            self._moves[key] = tuple(self._priced(transfer, shares))
        return self._moves[key]

    def _priced(self, transfer: ValueTransfer, shares: LatencyShares | None) -> Iterator[TimedMove]:
        t, source, target = transfer
        shape, size, mesh = t.get_shape(), itemsize(t), self.mesh
        steps = plan(shape, mesh, source, target, size)
        before = [source, *(step.layout for step in steps)]
        sent = [i for i, step in enumerate(steps) if step.communicates(mesh)]
        forms = [step_form(mesh, shape, before[i], steps[i], size) for i in sent]
        alone = [form.seconds(prod(shape) * size) for form in forms]
        latency = sum(form.latency for form in forms)
        if shares is None:
            total = float(transfer_seconds(mesh, t, [source], [target])[0, 0])
        else:
            total, buckets = bucket_price(mesh, transfer, shares)
            if buckets:
                latency = sum(shares.of(b) * seconds for b, seconds in buckets.items())
        for i, seconds in zip(sent, alone, strict=True):
            part = seconds / sum(alone) if seconds else 0.0  # no latency, and nothing to send
            way, level = (source, *steps[: i + 1]), level_of(mesh, steps[i].axes)
            yield TimedMove(way, level, total * part, min(latency, total) * part)
