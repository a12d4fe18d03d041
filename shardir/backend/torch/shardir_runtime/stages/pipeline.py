"""Steps in stages: a rank runs the functions of its stages in the order of its schedule.

A value of a microbatch has one name on all stages. When the parts, sends and receives happen is in
`order.py`; a value is dropped after its last reader, and after its sends.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from ..collectives import position
from ..collectives.mesh import Mesh
from .loop import LoopResult, LoopRun, RankLoop
from .order import Event, StageMessage, StepValue
from .tables import StagePart, StageTables, StageValue
from .transfers import STAGE, StageTransfer, hold, peer_rank, receive, send, zeros

__all__ = ["Pipeline", "StageValue", "add_product", "hold", "receive", "send", "zeros"]


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Add the product of two matrices, or of two batches of matrices, in place to the sum of the
    earlier microbatches. Return the product itself if there is no sum yet."""
    if total is None:
        return a @ b
    return total.addmm_(a, b) if a.ndim == 2 else total.baddbmm_(a, b)


class Pipeline(StageTables):
    """A step in stages that ranks run."""

    _loop: RankLoop | None = None
    recorder: Any = None
    """The recorder of the times of parts and transfers, if any (run/trace.py)."""

    def span(self, *labels: Any) -> Any:
        """Return the context of a part or transfer, which the recorder times if there is one."""
        return nullcontext() if self.recorder is None else self.recorder.span(*labels)

    def run(self, mesh: Mesh, **arguments: Tensor | None) -> list[Tensor | None]:
        """Run a step. Return its results, as far as this rank has them."""
        if self._loop is None:
            self._loop = RankLoop(self, mesh.index((STAGE,)))
        return _StepRun(self, self._loop, mesh, arguments).run()


class _StepRun:
    """One run of a step on this rank."""

    def __init__(
        self, step: Pipeline, loop: RankLoop, mesh: Mesh, arguments: Mapping[str, Tensor | None]
    ):
        self.step, self.loop, self.mesh = step, loop, mesh
        self.rank = mesh.index((STAGE,))
        self.values: dict[StepValue, Any] = {
            StepValue(name, None): x for name, x in arguments.items() if x is not None
        }
        """The values that are still read: arguments, sums, results of parts. A sum is None before
        its first addend."""
        self.owned: set[StepValue] = set()
        """The sums that have memory of their own."""
        self.addresses: Counter[int] | None = None
        """The number of values at each address, if it was counted since the last part."""
        self.transfers: dict[StageMessage, StageTransfer] = {}
        """The sends and receives that are not waited for yet."""
        self.doing, self.line = "", 0

    def run(self) -> list[Tensor | None]:
        self._run_events(self.loop.before)
        self.values.update((StepValue(name, None), None) for name in self.loop.sums)
        for name, argument in self.loop.slices.items():
            batch = self.values[StepValue(argument, None)].unbind()
            self.values.update((StepValue(name, k), x) for k, x in enumerate(batch))
        for run in self.loop.runs:
            self._run_in_loop(run)
        self._run_events(self.loop.end)
        for name, value in self.loop.states.items():
            self.values[StepValue(name, None)] = self.values[value]
        self._run_events(self.loop.after)
        hold(self.mesh, *self.transfers.values())
        return [self._result(name) for name in self.step.results]

    def _run_events(self, events: Iterable[Event]) -> None:
        """Run the transfers around a part, or the parts and transfers outside the loop."""
        for kind, of in events:
            match kind:
                case "run":
                    self._run_outside(of[0])
                case "send":
                    self._send(of)
                case "receive":
                    type = self.step.transfers[of.value.name]
                    self.transfers[of] = receive(self.mesh, type, of.source)
                case "wait" if of.target == self.rank:
                    self._receive(of)
                case "wait":
                    self._wait(self.transfers.pop(of), f"until {of.value.name} is sent")

    def _run_outside(self, part: StagePart) -> None:
        self._begin(part, f"{part.kind} of stage {part.stage}")
        arguments = [self.values[StepValue(name, None)] for name in part.inputs]
        with self.step.span("part", part.kind, part.stage, 0):
            results = self._call(part, arguments)
        names = (StepValue(name, None) for name in part.outputs)
        self.values.update(zip(names, results, strict=True))

    def _run_in_loop(self, run: LoopRun) -> None:
        part, k = run.part, run.microbatch
        self._run_events(run.before)
        self._begin(part, f"{part.stage}{part.kind}{k}")
        arguments = [self.values[value] for value in run.reads]
        for value in run.drops:
            del self.values[value]
        with self.step.span("part", part.kind, part.stage, k):
            results = self._call(part, arguments)
        del arguments
        self.addresses = None
        self.values.update((r.value, x) for r, x in zip(run.results, results, strict=True))
        self._run_events(run.after)
        for result, x in zip(run.results, results, strict=True):
            for name in result.sums:
                total = StepValue(name, None)
                self._add(total, x, self.values[total] is None and self._is_free(result, x))
            for name in result.collected:
                self._collect(StepValue(name, None), k, x)
        for value in run.unread:
            del self.values[value]

    def _call(self, part: StagePart, arguments: Sequence[Tensor | None]) -> Sequence[Tensor]:
        assert part.function is not None, f"{part.name} is not defined"
        results = part.function(self.mesh, *arguments)
        return [results] if isinstance(results, Tensor) else results

    # ---- sums over the microbatches ----

    def _add(self, total: StepValue, x: Tensor, is_free: bool) -> None:
        """Add a result to a sum over the microbatches. The sum takes over the memory of the first
        addend if it is free."""
        sum_before = self.values[total]
        if sum_before is None:
            self.values[total] = x
            if is_free:
                self.owned.add(total)
        elif x is sum_before:  # the part has added to it
            pass
        elif total in self.owned:
            sum_before.add_(x)
        else:
            self.values[total] = sum_before + x
            self.owned.add(total)

    def _is_free(self, result: LoopResult, x: Tensor) -> bool:
        """Whether a sum may be written into the memory of a result: no other value has it, and its
        elements do not overlap."""
        if result.is_read or len(result.sums) > 1:
            return False
        if any(n > 1 and not step for n, step in zip(x.shape, x.stride(), strict=True)):
            return False
        if self.addresses is None:
            held = (y for y in self.values.values() if y is not None)
            self.addresses = Counter(map(_address, held))
        return self.addresses[_address(x)] == 1

    def _collect(self, total: StepValue, k: int, x: Tensor) -> None:
        if total not in self.values:
            self.values[total] = x.new_empty((self.step.microbatches, *x.shape))
        self.values[total][k] = x

    # ---- between ranks ----

    def _send(self, message: StageMessage) -> None:
        (name, k), peer = message.value, peer_rank(self.mesh, message.target)
        with self.step.span("send", name, peer, k or 0):
            x = self.values[message.value]
            self.transfers[message] = send(self.mesh, x, message.target)

    def _receive(self, message: StageMessage) -> None:
        """Wait for a value whose receive is posted."""
        (name, k), transfer = message.value, self.transfers.pop(message)
        with self.step.span("arrival", name, transfer.peer, k or 0):
            self.values[message.value] = self._wait(transfer, f"for {name}")

    def _wait(self, transfer: StageTransfer, reason: str) -> Tensor:
        """Wait for a transfer, and record the wait."""
        position.note(f"{self.doing} {reason}")
        x = transfer.wait(self.line)
        position.note(self.doing)
        return x

    def _begin(self, part: StagePart, doing: str) -> None:
        """Record the part that this rank runs: `1F0`."""
        assert part.function is not None, f"{part.name} is not defined"
        self.doing = doing
        self.line = part.function.__code__.co_firstlineno + 1  # the first one is the decorator's
        position.note(doing)

    def _result(self, name: str) -> Tensor | None:
        if (value := StepValue(name, None)) in self.values:
            return self.values[value]
        return zeros(self.mesh, self.step.shapes[name]) if name in self.step.shapes else None


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
