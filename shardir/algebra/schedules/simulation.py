"""The time and memory of a schedule.

A rank runs an action once its previous action has ended and the results of adjacent stages have
arrived. A result arrives at the end of its computation; on another rank, the seconds of a transfer
later. Any number of transfers can be in flight; they take no time of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardir.algebra.schedules.checking import check
from shardir.algebra.schedules.costs import PipelineCosts
from shardir.algebra.schedules.gantt import as_svg
from shardir.algebra.schedules.schedule import COMPUTE, Action, Schedule, peak
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
        """The end of the last rank, in seconds."""
        return max(run.end for rank in self.ranks for run in rank)

    @property
    def busy(self) -> list[float]:
        """By rank, the seconds in which it computes."""
        return [sum(run.end - run.begin for run in rank) for rank in self.ranks]

    @property
    def bubbles(self) -> list[float]:
        """By rank, the share of the makespan in which it waits."""
        return [1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy]

    @property
    def bubble(self) -> float:
        """The mean of `bubbles`."""
        return sum(self.bubbles) / len(self.ranks)

    @property
    def peak_in_flight(self) -> list[int]:
        """By rank, the maximum number of microbatches of stages that it holds, from the begin of F
        to the end of B or W."""
        return [int(held) for held in self._peaks([1.0] * self.schedule.stages)]

    @property
    def peak_bytes(self) -> list[float]:
        """By rank, the maximum bytes that it holds of microbatches."""
        return self._peaks(self.costs.memory)

    def svg(self) -> str:
        """Return a drawing with a row for each rank."""
        return as_svg(self.ranks)

    def _peaks(self, size: Sequence[float]) -> list[float]:
        return [peak(order, size) for order in self.schedule.orders]


def simulate(schedule: Schedule, costs: PipelineCosts) -> PipelineTimeline:
    """Return the times of a schedule.

    Raises:
        ShardirError: the costs are of another number of stages, or the schedule cannot run.
    """
    if costs.stages != schedule.stages:
        raise ShardirError(
            f"expected costs of {schedule.stages} stages, got costs of {costs.stages}; use a cost "
            "for each stage"
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
    """Stages on ranks with costs, and the times of orders of action codes (`code`).

    Attributes:
        seconds: of each action, by code, as all lists.
        needs: the index of the result of an adjacent stage that the action takes; -1 if none.
        makes: the index of the action's result; -1 if none.
        delay: the seconds of the transfer of the needed result.
    """

    def __init__(self, placement: Sequence[int], microbatches: int, costs: PipelineCosts):
        self.placement, self.microbatches, self.costs = placement, microbatches, costs
        self.stages = len(placement)
        self.seconds: list[float] = []
        self.needs: list[int] = []
        self.makes: list[int] = []
        self.delay: list[float] = []
        pairs = zip(costs.input, costs.weight, costs.saved, strict=True)
        backward = tuple(i + w - saved for i, w, saved in pairs)
        for kind, seconds in zip(
            COMPUTE, (costs.forward, costs.input, costs.weight, backward), strict=True
        ):
            for stage in range(self.stages):
                self._add(kind, stage, seconds[stage])

    def _add(self, kind: str, stage: int, seconds: float) -> None:
        """Add the actions of a kind on a stage, for all microbatches."""
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
        """Return the code of an action: an index by kind, stage and microbatch."""
        stage, kind, microbatch = action
        assert microbatch is not None
        return (COMPUTE.index(kind) * self.stages + stage) * self.microbatches + microbatch

    def action(self, code: int) -> Action:
        """Return the action of a code."""
        rest, microbatch = divmod(code, self.microbatches)
        kind, stage = divmod(rest, self.stages)
        return Action(stage, COMPUTE[kind], microbatch)

    def ends(self, orders: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """Return the end of each action of each rank, in seconds; None if actions wait for each
        other in a cycle.

        Args:
            orders: codes; an action follows the actions of its own stage that it needs.
        """
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
