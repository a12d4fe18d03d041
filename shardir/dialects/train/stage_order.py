"""The order in which each rank does a step in stages: runs, sends and receives.

The rules, which `stages/loop.py` of the runtime follows:

1. A rank runs its functions before the loop, those of its line of the schedule, and those after it.
2. A value is sent directly after the run that makes it, to each other rank that reads it, as a
   message; a sum over microbatches before the functions after the loop.
3. Before a run in the loop, the receives of what it and the next one read are posted, and those of
   all earlier messages of the same rank. The run waits for what it reads. Outside the loop a
   message is received before the first run of its receiver that reads it or a later one of the
   same rank, else after all of these: no rank waits to update what it has.
4. A send is waited for when a message has arrived from its receiver which proves that it was
   received: a gradient comes back. And of a value at most a number of sends are in flight to one
   rank, `in_flight`: the first of them is waited for before the next. So what is not answered is
   not held for all microbatches. The number is the lowest that is proven: `stage_proof.py`.
5. A directed pair of ranks is a channel, which moves a message at a time, without buffers: the k-th
   send meets the k-th receive.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from xdsl.dialects.func import CallOp
from xdsl.ir import SSAValue

from shardir.dialects.train.loops import CarriedOp
from shardir.dialects.train.stage_runs import Made, Read, StageRun, StepRuns

NEVER = 1 << 62


class StageMessage(NamedTuple):
    """A value that a rank sends to another one."""

    made: Made
    source: int
    target: int

    def __str__(self) -> str:
        name = f"%{self.made.value.name_hint}"
        which = "" if self.made.microbatch is None else f" of microbatch {self.made.microbatch}"
        return f"{name}{which} to rank {self.target}"


class Event(NamedTuple):
    """A step of a rank: a run, or the start of a send or of a receive, or the wait for one."""

    kind: Literal["run", "send", "receive", "wait"]
    of: StageRun | StageMessage


class StageOrder:
    """The events of each rank of a step in stages, in the order in which it does them."""

    def __init__(self, runs: StepRuns, in_flight: int):
        self.runs, self.ranks = runs, range(runs.schedule.ranks)
        self.in_flight = in_flight
        self.loops = [runs.loop(rank) for rank in self.ranks]
        self._reads: dict[StageRun, list[Read]] = {}
        self.channels: dict[tuple[int, int], list[StageMessage]] = defaultdict(list)
        """The messages in the loop of each directed pair of ranks, in the order of the sends."""
        self.position: dict[StageMessage, int] = {}
        """The position of each of them in its channel."""
        self.made_at: dict[StageMessage, int] = {}
        """The position in the loop of its sender of the run that makes it."""
        for loop in self.loops:
            for i, run in enumerate(loop):
                for message in self.sent(run):
                    channel = self.channels[message.source, message.target]
                    self.position[message], self.made_at[message] = len(channel), i
                    channel.append(message)
        self.received_at = self._receipts()
        """The position in the loop of its receiver by which a message has arrived."""

    @cached_property
    def events(self) -> list[list[Event]]:
        """The events of each rank, in order; each message that is awaited has a sender."""
        return [list(self._events(rank)) for rank in self.ranks]

    def reads(self, run: StageRun) -> list[Read]:
        """Return what a run reads of other runs."""
        if run not in self._reads:
            self._reads[run] = self.runs.reads(run)
        return self._reads[run]

    def targets(self, v: SSAValue) -> list[int]:
        """Return the other ranks that read a value."""
        placement = self.runs.schedule.placement
        transfers = self.runs.transfers.get(v, ())
        ranks = {placement[stage] for op in transfers for stage in op.targets.data}
        return sorted(ranks - {placement[op.source.value.data] for op in transfers})

    def edges(self) -> list[tuple[int, int]]:
        """Return the directed pairs of ranks between which values pass."""
        makers = {v: self.runs.makers(v) for v in self.runs.transfers}
        sources = {v: self.runs.rank(ops[0]) for v, ops in makers.items() if ops}
        return sorted({(rank, t) for v, rank in sources.items() for t in self.targets(v)})

    def messages(self, v: SSAValue, microbatch: int | None) -> list[StageMessage]:
        """Return the messages with a value that a run makes, or with a sum of such values."""
        targets = self.targets(v)
        makers = self.runs.makers(v) if targets else []
        if not makers:
            return []
        return [StageMessage(Made(v, microbatch), self.runs.rank(makers[0]), t) for t in targets]

    def awaited(self, reads: Iterable[Read], rank: int) -> list[StageMessage]:
        """Return the messages with values of the loop that a rank reads."""
        found = []
        for made, runs, _ in reads:
            source = self.runs.rank(runs[0].op)
            if source != rank and made.microbatch is not None:
                found.append(StageMessage(made, source, rank))
        return found

    def sent(self, run: StageRun) -> list[StageMessage]:
        """Return the messages with what a run in the loop makes."""
        return [m for v in self.runs.results(run.op) for m in self.messages(v, run.microbatch)]

    def states(self, rank: int) -> list[Read]:
        """Return what a rank has after the loop of the states that the loop carries, as the last
        microbatch leaves them: of those that its functions read."""
        mine = {v for op in self.runs.callees if self.runs.rank(op) == rank for v in op.operands}
        found = []
        for carried, carry in self.runs.carries.items():
            first = carried.owner
            argument = first.x if isinstance(first, CarriedOp) else carried
            if not mine.isdisjoint((carried, argument, carry.out)):
                found.append(self.runs.read(carry.out, None))
        return [read for read in found if read is not None]

    def _receipts(self) -> dict[StageMessage, int]:
        """Return by which run of its receiver each message has arrived: by the first that reads it,
        or a later message of the same rank."""
        first: dict[StageMessage, int] = {}
        for rank, loop in enumerate(self.loops):
            for i, run in enumerate(loop):
                for message in self.awaited(self.reads(run), rank):
                    first.setdefault(message, i)
            for message in self.awaited(self.states(rank), rank):
                first.setdefault(message, len(loop))
        found = {}
        for messages in self.channels.values():
            at = NEVER
            for message in reversed(messages):
                at = found[message] = min(at, first.get(message, NEVER))
        return found

    # ---- the events of a rank ----

    def _events(self, rank: int) -> Iterator[Event]:
        yield from self._outside((), self.runs.before, rank)
        yield from _LoopEvents(self, rank).events()
        totals = [op.out for op in self.runs.sums]
        yield from self._outside(totals, self.runs.after, rank)

    def _outside(
        self, totals: Sequence[SSAValue], calls: Sequence[CallOp], rank: int
    ) -> Iterator[Event]:
        """Yield the events before or after the loop. `totals`: the sums that it leaves."""
        coming: dict[int, deque[StageMessage]] = {}
        for v in totals:
            yield from self._passed_on(v, rank, coming)
        for op in calls:
            if self.runs.rank(op) == rank:
                run = StageRun(op, None)
                read = {made.value for made, *_ in self.reads(run)}
                for messages in coming.values():
                    while any(m.made.value in read for m in messages):
                        yield from self._received(messages)
                yield Event("run", run)
            for v in op.results:
                yield from self._passed_on(v, rank, coming)
        for messages in coming.values():
            while messages:
                yield from self._received(messages)

    def _passed_on(
        self, v: SSAValue, rank: int, coming: dict[int, deque[StageMessage]]
    ) -> Iterator[Event]:
        """Yield the sends of a value by a rank, or add those to it to what is coming."""
        for message in self.messages(v, None):
            if message.source == rank:
                yield Event("send", message)
            elif message.target == rank:
                coming.setdefault(message.source, deque()).append(message)

    @staticmethod
    def _received(messages: deque[StageMessage]) -> Iterator[Event]:
        """Yield the events of the first of a rank's messages."""
        message = messages.popleft()
        yield Event("receive", message)
        yield Event("wait", message)


class _LoopEvents:
    """The events of a rank in the loop over the microbatches, and after it those of states."""

    def __init__(self, order: StageOrder, rank: int):
        self.order, self.rank = order, rank
        self.posted: dict[int, int] = Counter()
        self.arrived: set[StageMessage] = set()
        self.sends: dict[int, deque[StageMessage]] = defaultdict(deque)
        """By target, the sends that are not waited for yet."""

    def events(self) -> Iterator[Event]:
        order, loop = self.order, self.order.loops[self.rank]
        for i, run in enumerate(loop):
            for ahead in loop[i : i + 2]:
                for message in order.awaited(order.reads(ahead), self.rank):
                    yield from self._post(message)
            for message in order.awaited(order.reads(run), self.rank):
                yield from self._wait(message)
            yield Event("run", run)
            for message in order.sent(run):
                yield from self._send(message)
        for message in order.awaited(order.states(self.rank), self.rank):
            yield from self._post(message)
            yield from self._wait(message)

    def _post(self, message: StageMessage) -> Iterator[Event]:
        """Post the receive of a message, and of those that are sent before it."""
        coming, last = self.order.channels[message.source, self.rank], self.order.position[message]
        while self.posted[message.source] <= last:
            yield Event("receive", coming[self.posted[message.source]])
            self.posted[message.source] += 1

    def _wait(self, message: StageMessage) -> Iterator[Event]:
        if message in self.arrived:
            return
        self.arrived.add(message)
        yield Event("wait", message)
        sends = self.sends[message.source]
        made_at = self.order.made_at[message]
        while sends and self.order.received_at[sends[0]] <= made_at:
            yield Event("wait", sends.popleft())

    def _send(self, message: StageMessage) -> Iterator[Event]:
        sends = self.sends[message.target]
        same = [m for m in sends if m.made.value is message.made.value]
        if len(same) >= self.order.in_flight:
            while same[0] in sends:
                yield Event("wait", sends.popleft())
        yield Event("send", message)
        sends.append(message)
