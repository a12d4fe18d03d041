"""Steps in stages: the functions of a rank's stages, in the order of its schedule.

A value of a microbatch has one name on all stages. It is sent as soon as it is made, to each other
rank that reads it; a rank receives the values of another one in the order in which that one makes
them, and posts the receives of an action before the action before it runs. It is dropped after its
last reader, and after a message has proven that its receivers have it. The compiler proves that
steps end which run so (`stage_order.py`). A part of the runtime; needs only torch.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import runtime_position as position
from runtime_mesh import Mesh
from runtime_stage_order import LoopOrder, LoopValue, StagePart, StageTables, StageValue
from runtime_stage_transfers import (
    STAGE,
    StageTransfer,
    hold,
    receive,
    send,
    start_receive,
    start_send,
    zeros,
)
from torch import Tensor

__all__ = ["Pipeline", "StageValue", "add_product", "hold", "receive", "send", "zeros"]


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Add the product of two matrices, or of batches of them, to the sum of the microbatches
    before, in place; without one return the product."""
    if total is None:
        return a @ b
    return total.addmm_(a, b) if a.ndim == 2 else total.baddbmm_(a, b)


class Pipeline(StageTables):
    """A step in stages, which ranks can run."""

    _order: LoopOrder | None = None
    recorder: Any = None
    """Of the times of parts and transfers, if any (runtime_trace.py)."""

    def span(self, *what: Any) -> Any:
        """Return the context of a part of the step, which is recorded if that is asked for."""
        return nullcontext() if self.recorder is None else self.recorder.span(*what)

    def run(self, mesh: Mesh, **arguments: Tensor | None) -> list[Tensor | None]:
        """Run a step. Return its results, as far as this rank has them."""
        if self._order is None:
            self._order = LoopOrder(self, mesh.index((STAGE,)))
        return _StepRun(self, self._order, mesh, arguments).run()


class _Send(NamedTuple):
    """A send that is not waited for yet."""

    name: str
    received_at: float
    transfer: StageTransfer


class _StepRun:
    """One run of a step on this rank."""

    def __init__(
        self, step: Pipeline, order: LoopOrder, mesh: Mesh, arguments: Mapping[str, Tensor | None]
    ):
        self.step, self.order, self.mesh = step, order, mesh
        self.rank = mesh.index((STAGE,))
        self.peers = mesh.members((STAGE,), mesh.rank)
        """The ranks of the mesh that differ from this one in the stage alone, in order."""
        self.stages = {stage for stage, rank in step.rank_of.items() if rank == self.rank}
        self.values: dict[str, Tensor] = {n: x for n, x in arguments.items() if x is not None}
        """The values outside the loop: arguments, sums, what parts before and after it make."""
        self.batches: dict[int, dict[str, Tensor]] = {}
        """The values of each microbatch that parts of this rank are to read."""
        self.left: dict[tuple[int, str], int] = {}
        """The number of parts that are to read each of them."""
        self.owned: set[str] = set()
        """The sums that are in memory of their own."""
        self.addresses: Counter[int] | None = None
        """How many values are at each address, if that was asked for since a part has run."""
        self.pending: dict[LoopValue, StageTransfer] = {}
        self.sends: dict[int, deque[_Send]] = defaultdict(deque)
        """By target, the sends of the loop that are not waited for yet, in order."""
        self.doing, self.line = "", 0

    def run(self) -> list[Tensor | None]:
        self._outside("begin")
        for i, (part, k) in enumerate(self.order.loop):
            self._post(i)
            self._run_part(part, k)
        self._post(-1)
        for name in self.step.kept_states(self.rank):
            self.values[self.step.states[name].last] = self._state(name, self.step.microbatches)
        for sends in self.sends.values():
            hold(self.mesh, *(send.transfer for send in sends))
        for name, of in (*self.step.sums.items(), *self.step.collected.items()):
            self._pass_on(name, self.step.maker[of].stage)
        self._outside("update")
        return [self._result(name) for name in self.step.results]

    def _outside(self, kind: str) -> None:
        """Run the parts before or after the loop."""
        for part in self.step.parts:
            if part.kind == kind:
                if part.stage in self.stages:
                    self._begin(part, f"{kind} of stage {part.stage}")
                    with self.step.span("part", part.kind, part.stage, 0):
                        made = self._called(part, [self.values[n] for n in part.inputs])
                    self.values |= zip(part.outputs, made, strict=True)
                for name in part.outputs:
                    self._pass_on(name, part.stage)

    def _called(self, part: StagePart, values: Sequence[Tensor | None]) -> Sequence[Tensor]:
        assert part.function is not None, f"{part.name} is not defined"
        made = part.function(self.mesh, *values)
        return [made] if isinstance(made, Tensor) else made

    def _pass_on(self, name: str, stage: int) -> None:
        """Send a value outside the loop, or receive it, where other ranks read it."""
        source = self.step.rank_of[stage]
        targets = self.step.targets(name)
        if source == self.rank:
            for target in targets:
                hold(self.mesh, self._sent(name, 0, self.values[name], target))
        elif self.rank in targets:
            self.values[name] = self._received(name, 0, self._receive(name, source))

    # ---- the loop over microbatches ----

    def _run_part(self, part: StagePart, k: int) -> None:
        self._begin(part, f"{part.stage}{part.kind}{k}")
        values = [self._value(name, k) for name in part.inputs]
        with self.step.span("part", part.kind, part.stage, k):
            made = self._called(part, values)
        del values
        named, self.addresses = dict(zip(part.outputs, made, strict=True)), None
        for name, x in named.items():
            for target in self.order.targets.get(name, ()):
                self._send(name, k, x, target)
            self._keep(name, k, x)
            if name in self.step.state_after:
                self._keep(self.step.state_after[name], k + 1, x)
            for total in self.order.sums[name]:
                self._add(total, x, total not in self.values and self._is_free(name, x, made))
            for total in self.order.collected[name]:
                self._collect(total, k, x)

    def _keep(self, name: str, k: int, x: Tensor) -> None:
        """Hold a value until all parts of this rank have read it; a state after the last microbatch
        for the step."""
        if self.order.readers[name] or k == self.step.microbatches:
            self.batches.setdefault(k, {})[name] = x
            self.left[k, name] = self.order.readers[name]

    def _value(self, name: str, k: int) -> Tensor | None:
        """Return what a part reads for a microbatch; None of a sum before the first addend."""
        if name in self.step.sums:
            return self.values.get(name)
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

    def _add(self, name: str, x: Tensor, is_free: bool) -> None:
        """Add a part's value to a sum over the microbatches, which is in the memory of the first
        one if that is free."""
        if name not in self.values:
            self.values[name] = x
            if is_free:
                self.owned.add(name)
        elif x is self.values[name]:  # the part has added to it
            pass
        elif name in self.owned:
            self.values[name].add_(x)
        else:
            self.values[name] = self.values[name] + x
            self.owned.add(name)

    def _is_free(self, name: str, x: Tensor, made: Sequence[Tensor]) -> bool:
        """Whether nothing else reads the memory of what a part has made, and its elements are
        apart."""
        order = self.order
        if order.targets.get(name) or order.readers[name] or len(order.sums[name]) > 1:
            return False
        if any(n > 1 and not step for n, step in zip(x.shape, x.stride(), strict=True)):
            return False
        if self.addresses is None:
            held = (y for batch in self.batches.values() for y in batch.values())
            self.addresses = Counter(map(_address, (*made, *self.values.values(), *held)))
        return self.addresses[_address(x)] == 1

    def _collect(self, name: str, k: int, x: Tensor) -> None:
        if name not in self.values:
            self.values[name] = x.new_empty((self.step.microbatches, *x.shape))
        self.values[name][k] = x

    # ---- between ranks ----

    def _post(self, at: int) -> None:
        """Post the receives before a part of the loop."""
        for message in self.order.posts[at]:
            self.pending[message] = self._receive(message[0], self._source(message))

    def _source(self, message: LoopValue) -> int:
        return self.step.rank_of[self.step.transfers[message[0]].source]

    def _arrived(self, name: str, k: int) -> Tensor:
        """Return a value that another rank has sent. It proves that this one has received what its
        parts have read until it made the value: the sends of that are over."""
        message = name, k
        x = self._received(name, k, self.pending.pop(message))
        source, made_at = self._source(message), self.order.made_at[message]
        sends = self.sends[source]
        while sends and sends[0].received_at <= made_at:
            self._end(sends.popleft())
        return x

    def _send(self, name: str, k: int, x: Tensor, target: int) -> None:
        """Send a value of the loop, when no more than `in_flight` sends of it are in flight."""
        sends = self.sends[target]
        if sum(send.name == name for send in sends) >= self.step.in_flight:
            oldest = next(i for i, send in enumerate(sends) if send.name == name)
            for _ in range(oldest + 1):
                self._end(sends.popleft())
        at = self.order.received_at[(name, k), target]
        sends.append(_Send(name, at, self._sent(name, k, x, target)))

    def _sent(self, name: str, k: int, x: Tensor, target: int) -> StageTransfer:
        """Start to send a value."""
        peer = self.peers[target]
        with self.step.span("send", name, peer, k):
            return start_send(self.mesh, x, peer)

    def _receive(self, name: str, source: int) -> StageTransfer:
        return start_receive(self.mesh, self.step.transfers[name], self.peers[source])

    def _received(self, name: str, k: int, transfer: StageTransfer) -> Tensor:
        """Return a value that is being received."""
        with self.step.span("arrival", name, transfer.peer, k):
            return self._wait(transfer, f"for {name}")

    def _end(self, send: _Send) -> None:
        self._wait(send.transfer, f"until {send.name} is sent")

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
