"""The tables of a step in stages: its parts, their values, and the schedule of each rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..collectives.mesh import Axes
from .order import PartRun, StepOrder, StepValue, part_kinds

OUTSIDE = "begin", "update"
"""The parts that run once, before and after the loop over microbatches."""


class StageAction(NamedTuple):
    """A part that runs on a microbatch: `2F0`."""

    stage: int
    kind: str
    microbatch: int

    @classmethod
    def of(cls, text: str) -> "StageAction":
        at = next(i for i, c in enumerate(text) if not c.isdigit())
        return cls(int(text[:at]), text[at], int(text[at + 1 :]))


class StagePart(NamedTuple):
    """A function of a stage, with the names of its operands and results; `function` is set once it
    is defined (`StageTables.part`)."""

    kind: str
    stage: int
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    function: Callable[..., Any] | None = None


class StageValue(NamedTuple):
    """A value that passes from a stage to other stages: its global shape, and the axes that split
    each dimension."""

    source: int
    targets: tuple[int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    dims: tuple[Axes, ...]


class CarriedState(NamedTuple):
    """A state that passes from one microbatch to the next, by the names of its values."""

    first: str
    next: str
    last: str


class StageTables:
    """The parts of a step in stages, their values, and the schedule of each rank.

    Args:
        schedule: the actions of each rank, in order.
        slices: the arguments by the names of their microbatches.
        carried: the states that pass from one microbatch to the next. Each has four names: that
            parts read, of the argument for the first microbatch, of the result for the next
            microbatch, and after the last.
        parts: (kind, stage, function, operands, results), in an order in which they can run. "F" is
            a forward part, "B" a backward part, or "I", the gradients of inputs, and "W", the
            gradients of weights. Parts of the kinds OUTSIDE run once.
        transfers: the types of the values that pass between stages, by name.
        sums: the addends of sums over all microbatches, by the names of the sums.
        in_flight: the most sends of a value to a rank that are in flight at once.
        results: the names of the results; a value that no part makes is an argument.
        shapes: the types of results that are not states, which are zeros on ranks without them.
        collected: the values whose microbatches are stacked in a new dimension 0, by the names of
            the stacks.
    """

    def __init__(
        self,
        schedule: Sequence[str],
        slices: Mapping[str, str],
        carried: Sequence[tuple[str, str, str, str]],
        parts: Sequence[tuple[str, int, str, str, str]],
        transfers: Mapping[str, StageValue],
        sums: Mapping[str, str],
        in_flight: int,
        results: str,
        shapes: Mapping[str, StageValue],
        collected: Mapping[str, str] | None = None,
    ):
        self.orders = [[StageAction.of(text) for text in line.split()] for line in schedule]
        self.microbatches = 1 + max(a.microbatch for line in self.orders for a in line)
        self.rank_of = {a.stage: rank for rank, line in enumerate(self.orders) for a in line}
        self.slices = slices
        self.states = {name: CarriedState(*names) for name, *names in carried}
        self.parts = [
            StagePart(k, s, name, tuple(i.split()), tuple(o.split())) for k, s, name, i, o in parts
        ]
        self.transfers, self.sums, self.in_flight = transfers, sums, in_flight
        self.collected = collected or {}
        self.results, self.shapes = results.split(), shapes
        self.index()

    def index(self) -> None:
        """Find parts by their actions and by their results."""
        self.by_action = {(p.stage, p.kind): p for p in self.parts}
        self.maker = {name: part for part in self.parts for name in part.outputs}
        made = (name for name, part in self.maker.items() if part.kind not in OUTSIDE)
        self.inside = {*self.slices, *made}
        """The names of the values of microbatches."""

    def part(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Define the function of the parts with its name: a decorator."""
        named = function.__name__
        self.parts = [p._replace(function=function) if p.name == named else p for p in self.parts]
        self.index()
        return function

    def loop(self, rank: int) -> Iterator[tuple[StagePart, int]]:
        """Yield the parts that a rank runs in the loop, each with its microbatch."""
        for stage, action, k in self.orders[rank]:
            for kind in part_kinds(stage, action, self.by_action):
                yield self.by_action[stage, kind], k

    def order(self) -> StepOrder:
        """Return the events of all ranks. The name of a run is its part with the microbatch."""
        ranks = range(len(self.orders))
        before, after = (
            [self._run(part, None) for part in self.parts if part.kind == kind] for kind in OUTSIDE
        )
        totals = [
            (StepValue(name, None), self.rank_of[self.maker[addend].stage])
            for name, addend in (*self.sums.items(), *self.collected.items())
        ]
        return StepOrder(
            before,
            [[self._run(part, k) for part, k in self.loop(rank)] for rank in ranks],
            after,
            totals,
            [[*self.kept_states(rank).values()] for rank in ranks],
            {name: self.targets(name) for name in self.transfers},
            self.in_flight,
        )

    def _run(self, part: StagePart, k: int | None) -> PartRun:
        reads = [self.key(name, k) for name in part.inputs]
        makes = [StepValue(name, k) for name in part.outputs]
        return PartRun((part, k), self.rank_of[part.stage], reads, makes)

    def targets(self, name: str) -> list[int]:
        """Return the other ranks that read a value that is transferred."""
        value = self.transfers[name]
        ranks = {self.rank_of[stage] for stage in value.targets}
        return sorted(ranks - {self.rank_of[value.source]})

    def key(self, name: str, k: int | None) -> StepValue:
        """Return the value that a part reads for a microbatch, or outside the loop, by a name."""
        if k is None:
            return StepValue(name, None)
        if name in self.states:
            state = self.states[name]
            return StepValue(state.next, k - 1) if k else StepValue(state.first, None)
        return StepValue(name, k if name in self.inside else None)

    def kept_states(self, rank: int) -> dict[str, StepValue]:
        """Return the states that a rank has after the loop, as the last microbatch leaves them, by
        their names there: the states that its parts read."""
        inputs = {n for p in self.parts if self.rank_of[p.stage] == rank for n in p.inputs}
        return {
            s.last: StepValue(s.next, self.microbatches - 1)
            for n, s in self.states.items() if not inputs.isdisjoint((n, s.first, s.last))
        }  # fmt: skip
