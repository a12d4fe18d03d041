"""The tables of a step in stages: its parts, and what each rank runs and sends, in order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..collectives.mesh import Axes

HALVES = {"B": "IW"}
"""The actions that one is, of a stage without a part of its own for it."""


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
    """A function of a stage, with the names of what it reads and makes; the function itself is
    there once it is defined (`StageTables.part`)."""

    kind: str
    stage: int
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    function: Callable[..., Any] | None = None


class StageValue(NamedTuple):
    """A value that other stages read than the one that makes it: its global shape, and the axes
    that split each dimension."""

    source: int
    targets: tuple[int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    dims: tuple[Axes, ...]


LoopValue = tuple[str, int]
"""A value of the loop: its name, and the microbatch."""

ValueKey = str | LoopValue
"""A value of a step: one outside the loop, an argument or a sum, by its name."""


class CarriedState(NamedTuple):
    """A state that passes from one microbatch to the next, by the names of its values."""

    first: str
    next: str
    last: str


class StageTables:
    """The parts of a step in stages, what they read and make, and the order of each rank.

    Args:
        schedule: the actions of each rank, in their order.
        slices: the microbatch's slices, by name, of arguments.
        carried: the states that pass from one microbatch to the next: of each the name that parts
            read, the argument that it is for the first microbatch, what parts make that it is for
            the next one, and its name after the last.
        parts: kind, stage, names of the function, of what it reads, of what it makes; in an order
            in which they can run. "F" is the forward part, "B" the backward part, which may be two:
            "I", the gradients of inputs, and "W", those of weights; those of OUTSIDE run once.
        sums: over all microbatches, by name, of what parts make.
        collected: the values of all microbatches, in a new dimension 0, by name, of what parts
            make.
        in_flight: the most sends of a value to a rank that are in flight at once.
        results: the names of what the step returns; a value that no function makes is an argument.
        shapes: of the results that are not states, the type: that of other ranks are zeros.
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
        self.state_after = {state.next: name for name, state in self.states.items()}
        self.parts = [
            StagePart(k, s, name, tuple(i.split()), tuple(o.split())) for k, s, name, i, o in parts
        ]
        self.transfers, self.sums, self.in_flight = transfers, sums, in_flight
        self.collected = collected or {}
        self.results, self.shapes = results.split(), shapes
        self.index()

    def index(self) -> None:
        """Find parts by their actions, and by what they make."""
        self.by_action = {(p.kind, p.stage): p for p in self.parts}
        self.maker = {name: part for part in self.parts for name in part.outputs}
        made = (name for name, part in self.maker.items() if part.kind not in OUTSIDE)
        self.inside = {*self.slices, *made}
        """The names of the values of microbatches."""

    def part(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Let a function, which is returned, be that of the parts of its name: a decorator."""
        named = function.__name__
        self.parts = [p._replace(function=function) if p.name == named else p for p in self.parts]
        self.index()
        return function

    def loop(self, rank: int) -> Iterator[tuple[StagePart, int]]:
        """Yield the parts that a rank runs in the loop, each with its microbatch."""
        for action in self.orders[rank]:
            one = (action.kind, action.stage) in self.by_action
            for kind in action.kind if one else HALVES.get(action.kind, ""):
                if (part := self.by_action.get((kind, action.stage))) is not None:
                    yield part, action.microbatch

    def targets(self, name: str) -> list[int]:
        """Return the other ranks that read a value."""
        if (found := self.transfers.get(name)) is None:
            return []
        ranks = {self.rank_of[stage] for stage in found.targets}
        return sorted(ranks - {self.rank_of[found.source]})

    def sent(self, source: int, target: int) -> list[tuple[LoopValue, int]]:
        """Return what a rank sends to another one in the loop, in order, each with the position of
        the part that makes it."""
        return [
            ((name, k), i)
            for i, (part, k) in enumerate(self.loop(source))
            for name in part.outputs if target in self.targets(name)
        ]  # fmt: skip

    def key(self, name: str, k: int) -> ValueKey:
        """Return which value a part reads for a microbatch by a name."""
        if name in self.states:
            return (self.states[name].next, k - 1) if k else self.states[name].first
        return (name, k) if name in self.inside else name

    def first_reads(self, rank: int) -> dict[ValueKey, int]:
        """Return the position in a rank's loop of the first part that reads a value; of states
        after the loop, the number of parts."""
        found: dict[ValueKey, int] = {}
        loop = list(self.loop(rank))
        for i, (part, k) in enumerate(loop):
            for name in part.inputs:
                found.setdefault(self.key(name, k), i)
        for value in self.kept_states(rank).values():
            found.setdefault(value, len(loop))
        return found

    def kept_states(self, rank: int) -> dict[str, LoopValue]:
        """Return the states that a rank has after the loop, those that its parts read, by their
        names then, with what the last microbatch has made of them."""
        mine = {n for p in self.parts if self.rank_of[p.stage] == rank for n in p.inputs}
        return {
            s.last: (s.next, self.microbatches - 1)
            for n, s in self.states.items() if not mine.isdisjoint((n, s.first, s.last))
        }  # fmt: skip
