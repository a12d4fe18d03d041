"""The search for the first value that is not finite: steps before such a loss run again.

1. All ranks see the loss in one step, so they go back together: to the last checkpoint of the run,
   or to its beginning. Steps and their inputs are deterministic.
2. Each op of the last two steps is checked (`Watch`), since a NaN may come from the backward part
   or the update of the previous step. If a state has a NaN before these steps, ops are checked from
   an earlier step on.
3. A rank reports its error and ends the run; the launcher shows the first report.

Steps that run again write, evaluate and report nothing.
"""

import math
import time
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoints.saving import Beginning, Saving
from ..collectives import position
from ..data.inputs import Inputs
from ..plan.program import PlanFunction
from .anomalies import NotFiniteError, Watch
from .states import States

MAX_SECONDS = 600.0
"""The longest time that steps may take again, estimated by their first run; a longer search is
refused, since a user waits for it."""

SIGN_SECONDS = 5.0
"""The time between two signs of life, in seconds."""

FINDS = "--detect-anomaly finds the first such value"


class Replay:
    """A search for the first value that is not finite.

    Args:
        runner: a `main.Runner`, which runs steps.
        saved: has the beginnings from which steps can run again.
        step: the step with the loss, counted from 1.
    """

    def __init__(self, runner: Any, function: PlanFunction, saved: Saving, step: int, loss: float):
        self.runner, self.function, self.saved = runner, function, saved
        self.step, self.loss, self.mesh = step, loss, runner.mesh
        self.inputs: Inputs = runner.inputs[function.name]
        self.states: States = runner.states
        self._begun, self._signed = 0, 0.0

    def search(self, seconds: float, skips: bool) -> NoReturn:
        """Run steps again.

        Args:
            seconds: the time of a step.
            skips: whether a step whose gradients are not finite changes no state.

        Raises:
            NotFiniteError: always; it names the first value if the search finds it.
        """
        if any(isinstance(arg.source, int) for arg in self.function.args):
            self._fail(f"batches of Python come once; {FINDS}")
        seconds = self._all_reduce(seconds, dist.ReduceOp.MAX)
        first = self._first_with_nan(self.step if skips else max(1, self.step - 1), seconds)
        program = self.states.plan.directory / "program.py"
        # A NaN does not cause an infinite loss.
        watch = Watch(program, self.mesh.rank, fails=math.isnan(self.loss))
        self.runner.functions = self.runner.eager
        outputs: list[Tensor] = []
        for step in range(first - 1, self.step):
            inputs = self.inputs.at(step)
            try:
                with watch.of_step(step):
                    watch.look_at(self.function, inputs)
                    outputs = self.runner.train_step(self.function, step, inputs)
            except NotFiniteError as error:
                self._fail(str(error))
            self._live(step + 1)
        loss = self.runner.loss(self.function, outputs)
        if math.isfinite(loss):
            self._fail(f"it is {loss:g} when the steps run again")
        self.conclude(watch)

    def _first_with_nan(self, first: int, seconds: float) -> int:
        """Run to the step `first`, or to the first step after which a state of a rank has a NaN.
        Return the number of the step before which the run has stopped."""
        beginnings = self.saved.beginnings()
        while beginnings:
            at = next((b for b in beginnings if b.step < first), beginnings[-1])
            first = max(first, at.step + 1)
            self._restore(at, seconds)
            if self._has_nan():
                beginnings = [b for b in beginnings if b.step < at.step]
                first = at.step
                if not beginnings:
                    self._fail_with_state(at)
                continue
            before = self._run_to(at.step, first)
            if before is None:
                return first
            first = before
        self._fail(f"the checkpoint with which the run began is gone; {FINDS}")

    def conclude(self, watch: Watch) -> NoReturn:
        """Raise the error of the rank with the first infinite value, after a step without a NaN.

        Raises:
            NotFiniteError: on that rank; on all ranks if none has an infinite value.
        """
        first = self._all_reduce(watch.infinite_step, dist.ReduceOp.MIN)
        if watch.infinite and watch.infinite_step == first:
            self._fail(watch.infinite)
        if first < math.inf:
            self._all_reduce(0.0, dist.ReduceOp.MAX)  # until that rank ends the run
        self._fail(watch.nan or "no op of a rank makes such a value of finite ones")

    def _restore(self, at: Beginning, seconds: float) -> None:
        """Restore a beginning, unless its steps would take too long."""
        count = self.step - at.step
        if count * seconds > MAX_SECONDS:
            since = "the start" if at.path is None else str(at.path)
            resume = "" if at.path is None else f" with --resume {at.path}"
            self._fail(f"{count} steps since {since} take too long to run again; {FINDS}{resume}")
        self._report(at.step, at.step)
        self._begun = at.step
        at.restore()

    def _run_to(self, done: int, first: int) -> int | None:
        """Run the steps after `done` and before `first`. Return the first of these steps after
        which a state of a rank has a NaN; None without such a step."""
        found = math.inf
        steps = range(done, first - 1)
        for step, inputs in zip(steps, self.inputs.ahead(steps), strict=True):
            self.runner.train_step(self.function, step, inputs)
            if found == math.inf and self._state_with_nan():
                found = step + 1.0
            self._live(step + 1)
        found = self._all_reduce(found, dist.ReduceOp.MIN)
        return None if found == math.inf else int(found)

    def _state_with_nan(self) -> str:
        values = self.states.values.items()
        return next((k for k, x in values if x.is_floating_point() and bool(x.isnan().any())), "")

    def _has_nan(self) -> bool:
        """Whether a state of any rank has a NaN."""
        return bool(self._all_reduce(float(bool(self._state_with_nan())), dist.ReduceOp.MAX))

    def _fail_with_state(self, at: Beginning) -> NoReturn:
        """Raise the error of a rank with a NaN in a state of a beginning."""
        found = self._state_with_nan()
        if not found:
            self._all_reduce(0.0, dist.ReduceOp.MAX)  # until a rank that has one ends the run
        of = "the initial values" if at.path is None else str(at.path)
        self._fail(f"rank {self.mesh.rank}: nan in {found} of {of}")

    def _live(self, done: int) -> None:
        """Send a sign of life after a step; end the run if a signal requests it."""
        if self.saved.asked():
            self._fail(FINDS)
        if time.monotonic() - self._signed > SIGN_SECONDS:
            self._report(self._begun, done)

    def _report(self, begun: int, done: int) -> None:
        self._signed = time.monotonic()
        self.runner.events.send(
            event="repeat", function=self.function.name, step=self.step, loss=self.loss,
            first=begun + 1, done=done,
        )  # fmt: skip

    def _all_reduce(self, value: float, op: Any) -> float:
        """Return the minimum or maximum of a number over all ranks."""
        x = torch.tensor([value], dtype=torch.float64, device=self.mesh.device)
        if self.mesh.size > 1:
            position.begin()
            dist.all_reduce(x, op)
            position.complete()
        return float(x)

    def _fail(self, cause: str) -> NoReturn:
        raise NotFiniteError(
            f"{self.function.name}: expected a finite loss, got {self.loss:g} in step {self.step}\n"
            f"  {cause}\n"
            "  help: use a lower learning rate, or --allow-nan"
        )
