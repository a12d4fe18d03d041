"""Steps in stages: the functions of a rank's stages, in the order of its schedule.

A value of a microbatch has one name on all stages. It is sent as soon as it is made, to each other
rank that reads it; a rank receives the values of another one in the order in which that one makes
them, and posts the receives of an action before the action before it runs. It is dropped after its
last reader, and after a message has proven that its receivers have it. The compiler proves that
steps end which run so (`stage_order.py`).
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from ..collectives import position
from ..collectives.mesh import Mesh
from .loop import LoopReceive, LoopResult, LoopRun, LoopTransfer, RankLoop
from .tables import LoopValue, StagePart, StageTables, StageValue, ValueKey
from .transfers import (
    STAGE,
    StageTransfer,
    hold,
    receive,
    send,
    start_receive,
    start_send,
    zeros,
)

__all__ = ["Pipeline", "StageValue", "add_product", "hold", "receive", "send", "zeros"]


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Add the product of two matrices, or of batches of them, to the sum of the microbatches
    before, in place; without one return the product."""
    if total is None:
        return a @ b
    return total.addmm_(a, b) if a.ndim == 2 else total.baddbmm_(a, b)


class Pipeline(StageTables):
    """A step in stages, which ranks can run."""

    _loop: RankLoop | None = None
    recorder: Any = None
    """Of the times of parts and transfers, if any (run/trace.py)."""

    def span(self, *what: Any) -> Any:
        """Return the context of a part of the step, which is recorded if that is asked for."""
        return nullcontext() if self.recorder is None else self.recorder.span(*what)

    def run(self, mesh: Mesh, **arguments: Tensor | None) -> list[Tensor | None]:
        """Run a step. Return its results, as far as this rank has them."""
        if self._loop is None:
            self._loop = RankLoop(self, mesh)
        return _StepRun(self, self._loop, mesh, arguments).run()


class _StepRun:
    """One run of a step on this rank."""

    def __init__(
        self, step: Pipeline, loop: RankLoop, mesh: Mesh, arguments: Mapping[str, Tensor | None]
    ):
        self.step, self.loop, self.mesh = step, loop, mesh
        self.rank = mesh.index((STAGE,))
        self.peers = mesh.members((STAGE,), mesh.rank)
        """The ranks of the mesh that differ from this one in the stage alone, in order."""
        self.stages = {stage for stage, rank in step.rank_of.items() if rank == self.rank}
        self.values: dict[ValueKey, Any] = {}
        """The values that are to be read: arguments, sums, what parts make. A sum is None before
        its first addend."""
        self.values.update((name, x) for name, x in arguments.items() if x is not None)
        self.owned: set[str] = set()
        """The sums that are in memory of their own."""
        self.addresses: Counter[int] | None = None
        """How many values are at each address, if that was asked for since a part has run."""
        self.pending: dict[LoopValue, StageTransfer] = {}
        self.sends: dict[int, deque[tuple[str, StageTransfer]]] = defaultdict(deque)
        """By target, the sends of the loop that are not waited for yet, in order, with names."""
        self.coming: dict[int, deque[str]] = defaultdict(deque)
        """By source, the values outside the loop that are not received yet, in order."""
        self.doing, self.line = "", 0

    def run(self) -> list[Tensor | None]:
        self._outside("begin")
        self.values.update(dict.fromkeys(self.loop.sums))
        for name, argument in self.loop.slices.items():
            batch = self.values[argument].unbind()
            self.values.update(((name, k), x) for k, x in enumerate(batch))
        for run in self.loop.runs:
            self._run_part(run)
        self._post(self.loop.posts)
        self._arrive(self.loop.arrivals)
        for name, key in self.loop.states.items():
            self.values[name] = self.values[key]
        for sends in self.sends.values():
            hold(self.mesh, *(transfer for _, transfer in sends))
        for name, of in (*self.step.sums.items(), *self.step.collected.items()):
            self._pass_on(name, self.step.maker[of].stage)
        self._outside("update")
        return [self._result(name) for name in self.step.results]

    def _outside(self, kind: str) -> None:
        """Run the parts before or after the loop. A value of another rank is received before a part
        that reads it, or a later one of that rank; or else at the end."""
        for part in self.step.parts:
            if part.kind == kind:
                if part.stage in self.stages:
                    for source, names in self.coming.items():
                        while any(name in part.inputs for name in names):
                            self._receive_next(source)
                    self._begin(part, f"{kind} of stage {part.stage}")
                    with self.step.span("part", part.kind, part.stage, 0):
                        made = self._called(part, [self.values[n] for n in part.inputs])
                    self.values |= zip(part.outputs, made, strict=True)
                for name in part.outputs:
                    self._pass_on(name, part.stage)
        for source, names in self.coming.items():
            while names:
                self._receive_next(source)

    def _called(self, part: StagePart, values: Sequence[Tensor | None]) -> Sequence[Tensor]:
        assert part.function is not None, f"{part.name} is not defined"
        made = part.function(self.mesh, *values)
        return [made] if isinstance(made, Tensor) else made

    def _pass_on(self, name: str, stage: int) -> None:
        """Send a value outside the loop, or note that it is coming, where other ranks read it."""
        source = self.step.rank_of[stage]
        targets = self.step.targets(name)
        if source == self.rank:
            for target in targets:
                hold(self.mesh, self._sent(name, 0, self.values[name], self.peers[target]))
        elif self.rank in targets:
            self.coming[source].append(name)

    def _receive_next(self, source: int) -> None:
        """Receive the next value outside the loop of a rank."""
        name = self.coming[source].popleft()
        transfer = receive(self.mesh, self.step.transfers[name], source)
        self.values[name] = self._received(name, 0, transfer)

    # ---- the loop over microbatches ----

    def _run_part(self, run: LoopRun) -> None:
        part, k, values = run.part, run.microbatch, self.values
        self._post(run.posts)
        self._begin(part, f"{part.stage}{part.kind}{k}")
        self._arrive(run.arrivals)
        given = [values[key] for key in run.reads]
        for key in run.drops:
            del values[key]
        with self.step.span("part", part.kind, part.stage, k):
            made = self._called(part, given)
        del given
        self.addresses = None
        for result, x in zip(run.results, made, strict=True):
            for transfer in result.sends:
                self._send(transfer, x)
            if result.kept is not None:
                values[result.kept] = x
            for total in result.sums:
                self._add(total, x, values[total] is None and self._is_free(result, x, made))
            for total in result.collected:
                self._collect(total, k, x)

    def _add(self, name: str, x: Tensor, is_free: bool) -> None:
        """Add a part's value to a sum over the microbatches, which is in the memory of the first
        one if that is free."""
        total = self.values[name]
        if total is None:
            self.values[name] = x
            if is_free:
                self.owned.add(name)
        elif x is total:  # the part has added to it
            pass
        elif name in self.owned:
            total.add_(x)
        else:
            self.values[name] = total + x
            self.owned.add(name)

    def _is_free(self, result: LoopResult, x: Tensor, made: Sequence[Tensor]) -> bool:
        """Whether nothing else reads the memory of what a part has made, and its elements are
        apart."""
        if result.sends or result.kept is not None or len(result.sums) > 1:
            return False
        if any(n > 1 and not step for n, step in zip(x.shape, x.stride(), strict=True)):
            return False
        if self.addresses is None:
            held = (y for y in self.values.values() if y is not None)
            self.addresses = Counter(map(_address, (*made, *held)))
        return self.addresses[_address(x)] == 1

    def _collect(self, name: str, k: int, x: Tensor) -> None:
        if name not in self.values:
            self.values[name] = x.new_empty((self.step.microbatches, *x.shape))
        self.values[name][k] = x

    # ---- between ranks ----

    def _post(self, receives: Sequence[LoopReceive]) -> None:
        for value, shape, dtype, peer in receives:
            self.pending[value] = start_receive(self.mesh, shape, dtype, peer)

    def _arrive(self, arrivals: Sequence[LoopTransfer]) -> None:
        """Wait for values that other ranks have sent, and for the sends that are over then."""
        for value, peer, over in arrivals:
            self.values[value] = self._received(*value, self.pending.pop(value))
            self._end(peer, over)

    def _send(self, transfer: LoopTransfer, x: Tensor) -> None:
        (name, k), peer, over = transfer
        self._end(peer, over)
        self.sends[peer].append((name, self._sent(name, k, x, peer)))

    def _end(self, peer: int, count: int) -> None:
        """Wait for the first sends to a rank."""
        for _ in range(count):
            name, transfer = self.sends[peer].popleft()
            self._wait(transfer, f"until {name} is sent")

    def _sent(self, name: str, k: int, x: Tensor, peer: int) -> StageTransfer:
        """Start to send a value."""
        with self.step.span("send", name, peer, k):
            return start_send(self.mesh, x, peer)

    def _received(self, name: str, k: int, transfer: StageTransfer) -> Tensor:
        """Return a value that is being received."""
        with self.step.span("arrival", name, transfer.peer, k):
            return self._wait(transfer, f"for {name}")

    def _wait(self, transfer: StageTransfer, why: str) -> Tensor:
        """Wait for a transfer, and record it."""
        position.note(f"{self.doing} {why}")
        x = transfer.wait(self.line)
        position.note(self.doing)
        return x

    def _begin(self, part: StagePart, doing: str) -> None:
        """Record what this rank does now: `1F0`."""
        assert part.function is not None, f"{part.name} is not defined"
        self.doing = doing
        self.line = part.function.__code__.co_firstlineno + 1  # the first one is the decorator's
        position.note(doing)

    def _result(self, name: str) -> Tensor | None:
        if name in self.values:
            return self.values[name]
        return zeros(self.mesh, self.step.shapes[name]) if name in self.step.shapes else None


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
