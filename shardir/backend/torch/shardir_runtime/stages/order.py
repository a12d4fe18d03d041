"""The order of a rank in a step in stages: runs of parts, sends, receives and waits.

The ranks execute these events (`pipeline.py`). The compiler proves with them that a step ends, and
counts the memory of each rank (`dialects/train/stage_proof.py`). This file needs only Python.

1. A rank runs its parts before the loop over the microbatches, then its line of the schedule, then
   its parts after the loop.
2. A value is sent directly after the run that makes it, to each other rank that reads it. A sum
   over the microbatches is sent before the parts after the loop.
3. Before a run in the loop, a rank posts the receives of the values that this run and the next one
   read, and of all earlier messages from their senders. Then the run waits for the values that it
   reads. Outside the loop, a rank receives a message before its first run that reads the value, or
   a later message of the sender; else after all its runs, so that no rank waits for another before
   it updates its own parameters.
4. A rank waits for a send when a message from the receiver proves that it has arrived: a gradient
   comes back. Of one value, at most `in_flight` sends to one rank are in flight: the rank waits for
   the oldest before it starts another. So a value without an answer is not held for all
   microbatches.
5. An ordered pair of ranks is a channel, which moves one message at a time, without buffers: its
   k-th send meets its k-th receive.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

HALVES = {"B": "IW"}
"""The two actions that do the work of one, on a stage without a part for that one."""


class StepValue(NamedTuple):
    """A value of a step: its name (text on the ranks, an SSA value in the compiler), and its
    microbatch; None outside the loop."""

    name: Any
    microbatch: int | None


class StageMessage(NamedTuple):
    """A value that one rank sends to another."""

    value: StepValue
    source: int
    target: int


class PartRun(NamedTuple):
    """A run of a part on a rank: how the caller names it, the values that it reads and makes."""

    name: Any
    rank: int
    reads: Sequence[StepValue]
    makes: Sequence[StepValue]


class Event(NamedTuple):
    """A run, by its name; or the start of a send or a receive, or the wait for one."""

    kind: Literal["run", "send", "receive", "wait"]
    of: Any


def part_kinds(stage: int, kind: str, parts: Container[tuple[int, str]]) -> list[str]:
    """Return the kinds of the parts that an action runs, of the parts that a stage has."""
    kinds = kind if (stage, kind) in parts else HALVES.get(kind, "")
    return [k for k in kinds if (stage, k) in parts]


class StepOrder:
    """The events of each rank of a step.

    Args:
        before, after: the runs of all ranks outside the loop, in the order of the program.
        loops: the runs of each rank in the loop, in order.
        totals: the sums over the microbatches, each with the rank that has it.
        last: the values of the loop that each rank reads after it: states of the last microbatch.
        targets: the receivers of a value, by its name, if any.
        in_flight: the most sends of one value to one rank that are in flight.
    """

    def __init__(
        self,
        before: Sequence[PartRun],
        loops: Sequence[Sequence[PartRun]],
        after: Sequence[PartRun],
        totals: Sequence[tuple[StepValue, int]],
        last: Sequence[Sequence[StepValue]],
        targets: Mapping[Any, Sequence[int]],
        in_flight: int,
    ):
        self.ranks = range(len(loops))
        self.in_flight = in_flight
        self._before, self._loops, self._after = before, loops, after
        self._totals, self._last, self._targets = totals, last, targets
        self._channels: dict[tuple[int, int], list[StageMessage]] = defaultdict(list)
        """The messages in the loop of each channel, in the order of the sends."""
        self._made_at: dict[StageMessage, int] = {}
        """The position in its sender's loop of the run that makes a message."""
        self._place: dict[tuple[StepValue, int], tuple[StageMessage, int]] = {}
        """A message, with its position in its channel, by value and receiver."""
        for loop in loops:
            for i, run in enumerate(loop):
                for message in (m for value in run.makes for m in self._messages(value, run.rank)):
                    channel = self._channels[message.source, message.target]
                    self._made_at[message] = i
                    self._place[message.value, message.target] = message, len(channel)
                    channel.append(message)
        self._received_at = self._receipts()
        """The position in its receiver's loop before which a message arrives."""

    @cached_property
    def events(self) -> list[list[Event]]:
        """The events of each rank, in order."""
        return [
            [*self.before_loop(rank), *self.loop(rank).events(), *self.after_loop(rank)]
            for rank in self.ranks
        ]

    def before_loop(self, rank: int) -> Iterator[Event]:
        return self._outside(self._before, (), rank)

    def loop(self, rank: int) -> "LoopEvents":
        return LoopEvents(self, rank, self._loops[rank], self._last[rank])

    def after_loop(self, rank: int) -> Iterator[Event]:
        return self._outside(self._after, self._totals, rank)

    def channel(self, source: int, target: int) -> Sequence[StageMessage]:
        """Return the messages from one rank to another in the loop, in the order of the sends."""
        return self._channels[source, target]

    def arrival(self, value: StepValue, rank: int) -> tuple[StageMessage, int] | None:
        """Return the message in the loop that brings a value to a rank, and its position in its
        channel; None if the rank receives no such value."""
        return self._place.get((value, rank))

    def sends(self, run: PartRun) -> list[StageMessage]:
        """Return the messages with the values that a run makes."""
        return [m for value in run.makes for m in self._messages(value, run.rank)]

    def is_received(self, message: StageMessage, answer: StageMessage) -> bool:
        """Whether a message in the loop has arrived before its receiver sends `answer`."""
        return self._received_at[message] <= self._made_at[answer]

    def _messages(self, value: StepValue, source: int) -> list[StageMessage]:
        return [StageMessage(value, source, t) for t in self._targets.get(value.name, ())]

    def _receipts(self) -> dict[StageMessage, float]:
        """Return the run of its receiver before which each message arrives: the first run that
        reads it, or a later message of its channel."""
        first: dict[StageMessage, int] = {}
        for rank, (loop, last) in enumerate(zip(self._loops, self._last, strict=True)):
            for i, values in enumerate([*(run.reads for run in loop), last]):
                for value in values:
                    if (place := self.arrival(value, rank)) is not None:
                        first.setdefault(place[0], i)
        receipts = {}
        for messages in self._channels.values():
            at = math.inf
            for message in reversed(messages):
                at = receipts[message] = min(at, first.get(message, math.inf))
        return receipts

    def _outside(
        self, runs: Sequence[PartRun], totals: Sequence[tuple[StepValue, int]], rank: int
    ) -> Iterator[Event]:
        """Yield the events before or after the loop. `totals`: the sums that the loop leaves."""
        coming: dict[int, deque[StageMessage]] = defaultdict(deque)

        def pass_on(value: StepValue, source: int) -> Iterator[Event]:
            for message in self._messages(value, source):
                if source == rank:
                    yield Event("send", message)
                elif message.target == rank:
                    coming[source].append(message)

        def receive(messages: deque[StageMessage]) -> Iterator[Event]:
            message = messages.popleft()
            yield Event("receive", message)
            yield Event("wait", message)

        for value, source in totals:
            yield from pass_on(value, source)
        for run in runs:
            if run.rank == rank:
                for messages in coming.values():
                    while any(message.value in run.reads for message in messages):
                        yield from receive(messages)
                yield Event("run", run.name)
            for value in run.makes:
                yield from pass_on(value, run.rank)
        for messages in coming.values():
            while messages:
                yield from receive(messages)


class LoopEvents:
    """The events of a rank in the loop over the microbatches, to be asked for in their order.

    Args:
        runs: the runs of the rank.
        last: the values that it reads after the loop.
    """

    def __init__(
        self, order: StepOrder, rank: int, runs: Sequence[PartRun], last: Sequence[StepValue]
    ):
        self.order, self.rank, self.runs, self._last = order, rank, runs, last
        self._posted: Counter[int] = Counter()
        """The number of receives that are posted, by sender."""
        self._arrived: set[StageMessage] = set()
        self._sends: dict[int, deque[StageMessage]] = defaultdict(deque)
        """The sends that the rank has not waited for, by receiver."""

    def events(self) -> Iterator[Event]:
        for i, run in enumerate(self.runs):
            yield from self.before_run(i)
            yield Event("run", run.name)
            yield from self.after_run(i)
        yield from self.end()

    def before_run(self, i: int) -> Iterator[Event]:
        """Yield the receives that are posted before a run, and its waits."""
        for run in self.runs[i : i + 2]:
            yield from self._post(run.reads)
        yield from self._wait(self.runs[i].reads)

    def after_run(self, i: int) -> Iterator[Event]:
        """Yield the sends of the values that a run makes."""
        for message in self.order.sends(self.runs[i]):
            yield from self._send(message)

    def end(self) -> Iterator[Event]:
        """Yield the arrivals of the values that are read after the loop."""
        yield from self._post(self._last)
        yield from self._wait(self._last)

    def _post(self, values: Sequence[StepValue]) -> Iterator[Event]:
        """Post the receives of values, and of earlier messages of their channels."""
        for message, position in self._arrivals(values):
            channel = self.order.channel(message.source, self.rank)
            while self._posted[message.source] <= position:
                yield Event("receive", channel[self._posted[message.source]])
                self._posted[message.source] += 1

    def _wait(self, values: Sequence[StepValue]) -> Iterator[Event]:
        """Wait for values, and for the sends that their messages prove to have arrived."""
        for message, _ in self._arrivals(values):
            if message not in self._arrived:
                self._arrived.add(message)
                yield Event("wait", message)
                sends = self._sends[message.source]
                while sends and self.order.is_received(sends[0], message):
                    yield Event("wait", sends.popleft())

    def _send(self, message: StageMessage) -> Iterator[Event]:
        sends = self._sends[message.target]
        same = [m for m in sends if m.value.name == message.value.name]
        if len(same) >= self.order.in_flight:
            while same[0] in sends:
                yield Event("wait", sends.popleft())
        yield Event("send", message)
        sends.append(message)

    def _arrivals(self, values: Sequence[StepValue]) -> Iterator[tuple[StageMessage, int]]:
        for value in values:
            if (place := self.order.arrival(value, self.rank)) is not None:
                yield place
