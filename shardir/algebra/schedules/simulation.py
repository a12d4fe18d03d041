"""The time of a schedule: when each rank runs each action, and what it holds.

A rank runs an action when the one before it has ended and the results of adjacent stages have
arrived. A result arrives at the end of what computes it, or the seconds of the transfer later on
another rank. Transfers take no time of ranks, and any number of them can be in flight.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardir.algebra.schedules.actions import COMPUTE, Action
from shardir.algebra.schedules.checking import check
from shardir.algebra.schedules.costs import PipelineCosts
from shardir.algebra.schedules.gantt import as_svg
from shardir.algebra.schedules.schedule import Schedule
from shardir.diagnostics import ShardirError


class RunAction(NamedTuple):
    """An action on a rank, with its begin and end in seconds."""

    begin: float
    end: float
    action: Action


@dataclass(frozen=True)
class PipelineTimeline:
    """The actions of each rank, with their times."""

    schedule: Schedule
    costs: PipelineCosts
    ranks: tuple[tuple[RunAction, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """The time at which the last rank ends, in seconds."""
        return max(run.end for rank in self.ranks for run in rank)

    @property
    def busy(self) -> list[float]:
        """The time in which each rank computes, in seconds."""
        return [sum(run.end - run.begin for run in rank) for rank in self.ranks]

    @property
    def bubbles(self) -> list[float]:
        """The share of the makespan in which each rank waits."""
        return [1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy]

    @property
    def bubble(self) -> float:
        """The share of the makespan in which ranks wait."""
        return sum(self.bubbles) / len(self.ranks)

    @property
    def peak_in_flight(self) -> list[int]:
        """The largest number of microbatches of stages that each rank holds at a time: from the
        begin of F to the end of B or W."""
        return [int(each) for each in self._peaks([1.0] * self.schedule.stages)]

    @property
    def peak_bytes(self) -> list[float]:
        """The largest number of bytes that each rank holds of microbatches at a time."""
        return self._peaks(self.costs.memory)

    def svg(self) -> str:
        """Return a drawing: a row for each rank, time to the right."""
        return as_svg(self.ranks)

    def _peaks(self, size: Sequence[float]) -> list[float]:
        return [peak(order, size) for order in self.schedule.orders]


def peak(order: Sequence[Action], size: Sequence[float]) -> float:
    """Return the largest sum of what a rank holds of microbatches, where each stage has a size."""
    found = now = 0.0
    for a in order:
        if a.kind == "F":
            now += size[a.stage]
            found = max(found, now)
        elif a.kind != "I":
            now -= size[a.stage]
    return found


def simulate(schedule: Schedule, costs: PipelineCosts) -> PipelineTimeline:
    """Return the times of a schedule.

    Raises:
        ShardirError: the costs are of another number of stages, or the schedule cannot run.
    """
    if costs.stages != schedule.stages:
        raise ShardirError(
            f"expected costs of {schedule.stages} stages, got those of {costs.stages}; use costs "
            "of as many stages"
        )
    check(schedule)
    model = PipelineModel(schedule.placement, schedule.microbatches, costs)
    coded = [[model.code(a) for a in o] for o in schedule.orders]
    ends = model.ends(coded)
    assert ends is not None, "a schedule that was checked does not end"
    return PipelineTimeline(
        schedule,
        costs,
        tuple(
            tuple(
                RunAction(end - model.seconds[code], end, a)
                for a, code, end in zip(order, codes, times, strict=True)
            )
            for order, codes, times in zip(schedule.orders, coded, ends, strict=True)
        ),
    )


class PipelineModel:
    """Stages on ranks with costs, and the times of orders, whose actions are numbers: `code`.

    Lists are by code: `seconds`; `needs`, the result of an adjacent stage that an action takes, and
    `makes`, the one that it computes, each the index of a result or -1; and `delay`, the seconds
    that what it needs is in transfer.
    """

    def __init__(self, placement: Sequence[int], microbatches: int, costs: PipelineCosts):
        self.placement, self.microbatches, self.costs = placement, microbatches, costs
        self.stages = len(placement)
        self.seconds: list[float] = []
        self.needs: list[int] = []
        self.makes: list[int] = []
        self.delay: list[float] = []
        pairs = zip(costs.input, costs.weight, costs.saved, strict=True)
        both = tuple(i + w - saved for i, w, saved in pairs)
        for kind, seconds in zip(
            COMPUTE, (costs.forward, costs.input, costs.weight, both), strict=True
        ):
            for stage in range(self.stages):
                self._add(kind, stage, seconds[stage])

    def _add(self, kind: str, stage: int, seconds: float) -> None:
        """Add the action of a stage for each microbatch."""
        m, count = self.microbatches, self.stages * self.microbatches
        forward = kind == "F"
        other = stage - 1 if forward else stage + 1
        taken = kind != "W" and 0 <= other < self.stages
        delays = self.costs.delays(self.placement)[0 if forward else 1]
        base = 0 if forward else count
        for k in range(m):
            self.seconds.append(seconds)
            self.needs.append(base + other * m + k if taken else -1)
            self.makes.append(base + stage * m + k if kind != "W" else -1)
            self.delay.append(delays[min(stage, other)] if taken else 0.0)

    def code(self, action: Action) -> int:
        stage, kind, microbatch = action
        assert microbatch is not None
        return (COMPUTE.index(kind) * self.stages + stage) * self.microbatches + microbatch

    def action(self, code: int) -> Action:
        rest, microbatch = divmod(code, self.microbatches)
        kind, stage = divmod(rest, self.stages)
        return Action(stage, COMPUTE[kind], microbatch)

    def ends(self, orders: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """Return the end of each action of each rank, in seconds; None if some wait for each
        other. On its rank an action must be after those of its own stage that it needs."""
        seconds, needs, makes, delay = self.seconds, self.needs, self.makes, self.delay
        arrived: list[float | None] = [None] * (2 * self.stages * self.microbatches)
        waiting: dict[int, int] = {}
        found: list[list[float]] = [[] for _ in orders]
        ready = list(range(len(orders)))
        while ready:
            rank = ready.pop()
            times = found[rank]
            now = times[-1] if times else 0.0
            order = orders[rank]
            for position in range(len(times), len(order)):
                code = order[position]
                needed = needs[code]
                if needed >= 0:
                    at = arrived[needed]
                    if at is None:
                        waiting[needed] = rank
                        break
                    now = max(now, at + delay[code])
                now += seconds[code]
                times.append(now)
                made = makes[code]
                if made >= 0:
                    arrived[made] = now
                    if made in waiting:
                        ready.append(waiting.pop(made))
        if any(len(t) < len(o) for t, o in zip(found, orders, strict=True)):
            return None
        return found
