"""Steps in stages: the functions of a rank's stages, in the order of its schedule.

A value of a microbatch has one name on all stages. It is sent as soon as it is made, to each other
rank that reads it; a rank receives the values of another one in the order in which that one makes
them, and posts the receives of an action before the action before it runs. It is dropped after its
last reader. A part of the runtime; needs only torch.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import runtime as rt
import runtime_buffers as buffers
import torch
import torch.distributed as dist
from runtime_mesh import Axes, Mesh
from torch import Tensor

STAGE = "stage"
"""The axis of the mesh over which the ranks of different stages differ."""

HALVES = {"B": "IW"}
"""The actions that one is, of a stage without a part of its own for it."""


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
    """A function of a stage, with the names of what it reads and makes."""

    kind: str
    stage: int
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class StageValue(NamedTuple):
    """A value that other stages read than the one that makes it: its global shape, and the axes
    that split each dimension."""

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


class Pipeline:
    """A step in stages.

    Args:
        schedule: the actions of each rank, in their order.
        slices: the microbatch's slices, by name, of arguments.
        carried: the states that pass from one microbatch to the next: of each the name that parts
            read, the argument that it is for the first microbatch, what parts make that it is for
            the next one, and its name after the last.
        parts: kind, stage, function, names of what it reads, of what it makes; in an order in which
            they can run. "F" is the forward part, "B" the backward part, which may be two: "I", the
            gradients of inputs, and "W", those of weights; "begin" (before the loop over
            microbatches) and "update" (after it) run once.
        sums: over all microbatches, by name, of what parts make.
        results: the names of what the step returns; a value that no function makes is an argument.
        shapes: of the results that are not states, the type: that of other ranks are zeros.
    """

    def __init__(
        self,
        schedule: Sequence[str],
        slices: Mapping[str, str],
        carried: Sequence[tuple[str, str, str, str]],
        parts: Sequence[tuple[str, int, Callable[..., Any], str, str]],
        transfers: Mapping[str, StageValue],
        sums: Mapping[str, str],
        results: str,
        shapes: Mapping[str, StageValue],
    ):
        self.orders = [[StageAction.of(text) for text in line.split()] for line in schedule]
        self.microbatches = 1 + max(a.microbatch for line in self.orders for a in line)
        self.rank_of = {a.stage: rank for rank, line in enumerate(self.orders) for a in line}
        self.slices = slices
        self.states = {name: CarriedState(*names) for name, *names in carried}
        self.state_after = {state.next: name for name, state in self.states.items()}
        self.parts = [
            StagePart(k, s, f, tuple(i.split()), tuple(o.split())) for k, s, f, i, o in parts
        ]
        self.by_action = {(p.kind, p.stage): p for p in self.parts}
        self.transfers, self.sums = transfers, sums
        self.results, self.shapes = results.split(), shapes
        self.maker = {name: part for part in self.parts for name in part.outputs}

    def run(self, mesh: Mesh, **arguments: Tensor | None) -> list[Tensor | None]:
        """Run a step. Return its results, as far as this rank has them."""
        return _StepRun(self, mesh, arguments).run()

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


class _StepRun:
    """One run of a step on this rank."""

    def __init__(self, step: Pipeline, mesh: Mesh, arguments: Mapping[str, Tensor | None]):
        self.step, self.mesh = step, mesh
        self.rank = mesh.index((STAGE,))
        self.peers = mesh.peers()
        self.stages = {stage for stage, rank in step.rank_of.items() if rank == self.rank}
        self.values: dict[str, Tensor] = {n: x for n, x in arguments.items() if x is not None}
        """The values outside the loop: arguments, sums, what parts before and after it make."""
        self.batches: dict[int, dict[str, Tensor]] = {}
        """The values of each microbatch that parts of this rank are to read."""
        self.left: dict[tuple[int, str], int] = {}
        """The number of parts that are to read each of them."""
        self.owned: set[str] = set()
        """The sums that are in memory of their own."""
        self.loop = list(step.loop(self.rank))
        parts = {(part.kind, part.stage): part for part, _ in self.loop}
        self.readers = Counter(name for part in parts.values() for name in part.inputs)
        self.coming = {
            rank: [(name, k) for part, k in step.loop(rank) for name in part.outputs
                   if self.rank in step.targets(name)]
            for rank in range(len(step.orders)) if rank != self.rank
        }  # fmt: skip
        """What each other rank sends, in the order in which it does."""
        self.position = {key: i for keys in self.coming.values() for i, key in enumerate(keys)}
        self.posted = dict.fromkeys(self.coming, 0)
        self.pending: dict[tuple[str, int], tuple[Any, Tensor]] = {}

    def run(self) -> list[Tensor | None]:
        self._outside("begin")
        for i, (part, k) in enumerate(self.loop):
            for ahead in self.loop[i : i + 2]:
                self._post(*ahead)
            self._run_part(part, k)
        for name, state in self.step.states.items():
            if state.first in self.values:
                self.values[state.last] = self._state(name, self.step.microbatches)
        for name, of in self.step.sums.items():
            self._pass_on(name, self.step.maker[of].stage)
        self._outside("update")
        return [self._result(name) for name in self.step.results]

    def _outside(self, kind: str) -> None:
        """Run the parts before or after the loop."""
        for part in self.step.parts:
            if part.kind == kind:
                if part.stage in self.stages:
                    made = self._called(part, [self.values[n] for n in part.inputs])
                    self.values |= zip(part.outputs, made, strict=True)
                for name in part.outputs:
                    self._pass_on(name, part.stage)

    def _called(self, part: StagePart, values: Sequence[Tensor]) -> Sequence[Tensor]:
        made = part.function(self.mesh, *values)
        return [made] if isinstance(made, Tensor) else made

    def _pass_on(self, name: str, stage: int) -> None:
        """Send a value outside the loop, or receive it, where other ranks read it."""
        source = self.step.rank_of[stage]
        targets = self.step.targets(name)
        if source == self.rank:
            for target in targets:
                self._send(self.values[name], target)
        elif self.rank in targets:
            self.values[name] = self._completed(*self._receive(name, source))

    # ---- the loop over microbatches ----

    def _run_part(self, part: StagePart, k: int) -> None:
        made = self._called(part, [self._value(name, k) for name in part.inputs])
        named = dict(zip(part.outputs, made, strict=True))
        for name, x in named.items():
            for target in self.step.targets(name):
                self._send(x, target)
            self._keep(name, k, x)
            if name in self.step.state_after:
                self._keep(self.step.state_after[name], k + 1, x)
        for name, of in self.step.sums.items():
            if of in named:
                self._add(name, named[of])

    def _keep(self, name: str, k: int, x: Tensor) -> None:
        """Hold a value until all parts of this rank have read it; a state after the last microbatch
        for the step."""
        if self.readers[name] or k == self.step.microbatches:
            self.batches.setdefault(k, {})[name] = x
            self.left[k, name] = self.readers[name]

    def _value(self, name: str, k: int) -> Tensor:
        """Return what a part reads for a microbatch."""
        if name in self.step.slices:
            return self.values[self.step.slices[name]][k]
        if name in self.values:
            return self.values[name]
        if name in self.step.states:
            x = self._state(name, k)
        elif name in self.batches.get(k, ()):
            x = self.batches[k][name]
        else:
            x = self._arrived(name, k)
            self._keep(name, k, x)
        self.left[k, name] -= 1
        if not self.left[k, name]:
            del self.batches[k][name], self.left[k, name]
        return x

    def _state(self, name: str, k: int) -> Tensor:
        """Return a state before a microbatch: what the one before it has made of it."""
        if name not in self.batches.get(k, ()):
            state = self.step.states[name]
            self._keep(name, k, self._arrived(state.next, k - 1) if k else self.values[state.first])
        return self.batches[k][name]

    def _add(self, name: str, x: Tensor) -> None:
        if name not in self.values:
            self.values[name] = x
        elif name in self.owned:
            self.values[name].add_(x)
        else:
            self.values[name] = self.values[name] + x
            self.owned.add(name)

    # ---- between ranks ----

    def _post(self, part: StagePart, k: int) -> None:
        """Post the receives of what a part reads of other ranks."""
        for name in part.inputs:
            if name not in self.step.states:
                self._post_until(name, k)
            elif k:
                self._post_until(self.step.states[name].next, k - 1)

    def _post_until(self, name: str, k: int) -> None:
        """Post the receive of a value, and of those that are sent before it."""
        if (name, k) not in self.position:
            return
        source = self.step.rank_of[self.step.transfers[name].source]
        coming = self.coming[source]
        while self.posted[source] <= self.position[name, k]:
            first = coming[self.posted[source]]
            self.pending[first] = self._receive(first[0], source)
            self.posted[source] += 1

    def _arrived(self, name: str, k: int) -> Tensor:
        """Return a value that another rank has sent."""
        self._post_until(name, k)
        return self._completed(*self.pending.pop((name, k)))

    def _peer(self, rank: int) -> int:
        """Return the rank of the mesh that differs from this one in the stage alone."""
        return self.mesh.members((STAGE,), self.mesh.rank)[rank]

    def _send(self, x: Tensor, target: int) -> None:
        x = x.contiguous()
        if x.numel():
            view = buffers.in_transport_dtype(x)
            work = dist.isend(view, self._peer(target), group=self.peers)
            self.mesh._sends.append((work, x))

    def _receive(self, name: str, source: int) -> tuple[Any, Tensor]:
        out = self._empty(self.step.transfers[name])
        if not out.numel():
            return None, out
        view = buffers.in_transport_dtype(out)
        return dist.irecv(view, self._peer(source), group=self.peers), out

    @staticmethod
    def _completed(work: Any, x: Tensor) -> Tensor:
        if work is not None:
            work.wait()
        return x

    def _empty(self, type: StageValue) -> Tensor:
        shape = [b - a for a, b in rt.local_bounds(self.mesh, type.shape, type.dims)]
        return torch.zeros(shape, dtype=type.dtype, device=self.mesh.device)

    def _result(self, name: str) -> Tensor | None:
        if name in self.values:
            return self.values[name]
        return self._empty(self.step.shapes[name]) if name in self.step.shapes else None
