"""The training steps of a program, as a trainer on a rank and one of local ranks call them.

trainer.step(x, labels); trainer.lr = 0.1           # of a program with one step
trainer["critic"].step(real, noise)                 # of one with several
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..plan.program import PlanError, PlanFunction, ProgramPlan

EMA, SUM = "ema", "gradient"
"""The names of the moving average of a parameter among its states, and of the sum of its gradients
since the last update."""


class TrainedSteps(ABC):
    """The steps of a trainer.

    Attributes:
        steps: the steps by name.
        steps_done: the number of completed steps, of all of them together.
        metrics_of: the metrics of the last call of each step by name.
        error: makes an error from its text.
    """

    error: Callable[[str], Exception]

    def __init__(self, plan: ProgramPlan, steps_done: int):
        self.steps = training_steps(plan)
        self.steps_done = steps_done
        self._with_gradients = set[str]()
        self.metrics_of: dict[str, dict[str, Tensor]] = {name: {} for name in self.steps}

    @property
    def first(self) -> PlanFunction:
        """The first step, which checkpoints name."""
        return next(iter(self.steps.values()))

    def note_gradients(self, name: str, are_there: bool) -> None:
        """Note whether the states of a step have gradients, which steps of one optimizer share."""
        states = self.steps[name].key_of("")
        (self._with_gradients.add if are_there else self._with_gradients.discard)(states)

    def note_loaded(self) -> None:
        """Note a checkpoint, which may have gradients."""
        self._with_gradients.update(f.key_of("") for f in self.steps.values())

    def check_gradients(self, name: str) -> None:
        """Raise PlanError if a step has no gradients for an update."""
        if self.steps[name].key_of("") not in self._with_gradients:
            raise PlanError(
                f"expected gradients for the update of {name}, got none since the last one; call "
                "backward before it"
            )

    @abstractmethod
    def call_step(
        self, name: str, batch: tuple[Any, ...], named: Mapping[str, Any], local: bool
    ) -> Tensor:
        """Train one step on a batch (`step`)."""

    @abstractmethod
    def call_backward(
        self, name: str, batch: tuple[Any, ...], named: Mapping[str, Any], local: bool,
        weight: float,
    ) -> Tensor:  # fmt: skip
        """Add the gradients of a batch to those of a step (`backward`)."""

    @abstractmethod
    def call_update(self, name: str) -> None:
        """Update the parameters of a step (`update`)."""

    @abstractmethod
    def gradients_of(self, name: str) -> dict[str, Tensor]:
        """Return the gradients of a step (`grads`)."""

    @abstractmethod
    def gradient_norm_of(self, name: str) -> float:
        """Return the norm of the gradients of a step (`grad_norm`)."""

    @abstractmethod
    def rate_of(self, name: str) -> float:
        """Return the learning rate of a step (`lr`)."""

    @abstractmethod
    def set_rate_of(self, name: str, rate: float | Tensor) -> None:
        """Set the learning rate of a step (`lr`)."""

    def __getitem__(self, name: str) -> "TrainedStep":
        """Return a step by its name."""
        if name not in self.steps:
            raise self.error(f"expected a step of {', '.join(self.steps)}, got {name!r:.60}")
        return TrainedStep(self, name)

    @property
    def _only(self) -> "TrainedStep":
        """The only step."""
        first, *others = self.steps
        if others:
            names = ", ".join(self.steps)
            raise self.error(
                f"expected the name of a step of {names}, got none; use trainer[{first!r}]"
            )
        return self[first]

    # ---- of a program with one step: those of TrainedStep ----

    def step(self, *batch: Any, local: bool = False, **named: Any) -> Tensor:
        """Train on a batch; return the loss (`TrainedStep.step`)."""
        return self._only.step(*batch, local=local, **named)

    def backward(
        self, *batch: Any, weight: float = 1.0, local: bool = False, **named: Any
    ) -> Tensor:
        """Add the gradients of a batch; return the loss (`TrainedStep.backward`)."""
        return self._only.backward(*batch, weight=weight, local=local, **named)

    def update(self) -> None:
        """Update the parameters by the gradients (`TrainedStep.update`)."""
        self._only.update()

    def grads(self) -> dict[str, Tensor]:
        """Return the gradients (`TrainedStep.grads`)."""
        return self._only.grads()

    @property
    def grad_norm(self) -> float:
        """The norm of all gradients (`TrainedStep.grad_norm`)."""
        return self._only.grad_norm

    @property
    def metrics(self) -> dict[str, Tensor]:
        """The metrics of the last call (`TrainedStep.metrics`)."""
        return self._only.metrics

    @property
    def lr(self) -> float:
        """The learning rate of the next step (`TrainedStep.lr`)."""
        return self._only.lr

    @lr.setter
    def lr(self, rate: float | Tensor) -> None:
        self._only.lr = rate


class TrainedStep:
    """One of the steps of a trainer, `trainer["critic"]`."""

    def __init__(self, trainer: TrainedSteps, name: str):
        self.trainer, self.name = trainer, name

    def __repr__(self) -> str:
        return f"<the step {self.name} of {self.trainer!r}>"

    def step(self, *batch: Any, local: bool = False, **named: Any) -> Tensor:
        """Train on a batch.

        Args:
            batch: the inputs of the step in their order, as tensors or trees of them: tuples,
                lists, and mappings, whose keys are names of inputs. Shapes and dtypes are those of
                the program's inputs: the global batch, the same on all ranks, which each rank takes
                its shard of. Of a step that accumulates, the rows of all microbatches.
            local: whether the tensors are this rank's shards; of local ranks, whether there is one
                argument, a list of the shards of each rank.
            named: inputs by name.

        Returns:
            The loss of the global batch: a scalar, equal on all ranks, on the rank's device.

        Raises:
            ShardirError: a tensor has another shape or dtype than the program's input, or inputs
                are missing or unknown; nothing has changed. Or the program has several steps.
            RunError: one of local ranks fails.
        """
        return self.trainer.call_step(self.name, batch, named, local)

    def backward(
        self, *batch: Any, weight: float = 1.0, local: bool = False, **named: Any
    ) -> Tensor:
        """Add the gradients of a batch to the gradients since the last update, as
        `(weight * loss).backward()` does in torch.

        Args:
            batch, local, named: as of `step`.
            weight: of the loss in the sum: 1 / 4 for the mean of four batches.

        Returns:
            The loss, without the weight.

        Raises:
            ShardirError: the program was compiled without separate_update=True.
        """
        return self.trainer.call_backward(self.name, batch, named, local, weight)

    def update(self) -> None:
        """Clip the gradients if the step does, update the parameters, and set the gradients to
        zero."""
        self.trainer.call_update(self.name)

    def grads(self) -> dict[str, Tensor]:
        """Return the gradients since the last update, whole, by the names of parameters as in
        `state_dict`, on the CPU, without the loss scale. Parameters that the loss does not depend
        on are left out."""
        return self.trainer.gradients_of(self.name)

    @property
    def grad_norm(self) -> float:
        """The norm of all gradients since the last update, before clipping."""
        return self.trainer.gradient_norm_of(self.name)

    @property
    def metrics(self) -> dict[str, Tensor]:
        """The metrics of the last call by name: scalars, equal on all ranks."""
        return self.trainer.metrics_of[self.name]

    @property
    def lr(self) -> float:
        """The learning rate of the next step: of a program whose optimizer has
        `lr = given<rate = 0.1>`, or a tensor as `lr` in torch.optim.

        Raises:
            ShardirError: the rate is a constant of the program, or a schedule.
        """
        return self.trainer.rate_of(self.name)

    @lr.setter
    def lr(self, rate: float | Tensor) -> None:
        self.trainer.set_rate_of(self.name, rate)


def training_steps(plan: ProgramPlan) -> dict[str, PlanFunction]:
    """Return the training steps of a program, whose inputs come from their caller, not from files.

    Raises:
        PlanError: there is none.
    """
    steps = {f.name: without_files(f) for f in plan.functions if f.kind == "step"}
    if not steps:
        raise PlanError(
            f"expected a program with a training step, got none among "
            f"{', '.join(f.name for f in plan.functions)}"
        )
    return steps


def without_files(f: PlanFunction) -> PlanFunction:
    """Return a function whose inputs come from its caller, not from files."""
    args = [replace(a, source=None) if a.role == "input" else a for a in f.args]
    return replace(f, args=tuple(args))


def check_weight_is_named(batch: tuple[Any, ...]) -> None:
    """Raise PlanError if the last input of a batch is a number, which is to be the weight."""
    if batch and isinstance(batch[-1], (int, float)):
        raise PlanError(
            f"expected tensors in order, got the number {batch[-1]!r:.60} behind them; write "
            f"weight={batch[-1]!r:.60}"
        )


def checked_rate(plan: ProgramPlan, step: PlanFunction, rate: Any = 0.0) -> tuple[str, float]:
    """Return the key of the learning rate of a step, and its value, which becomes `rate`.

    Raises:
        PlanError: it is no data of the program, or the rate is no number of at least 0.
    """
    functions = [f for f in plan.functions if step.name in (f.name, f.update_of)]
    if (key := step.key_of("lr")) not in {arg.key for f in functions for arg in f.args}:
        raise PlanError(
            "expected a program whose learning rate is data, got one with a constant or a "
            "schedule; compile with lr=torch.tensor(0.001) in the optimizer of torch.optim, or "
            'with the text "lr = given<rate = 0.001>"'
        )
    try:
        value = float(rate)
    except (TypeError, ValueError, RuntimeError):  # of a tensor with several elements
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise PlanError(
            f"expected a learning rate of at least 0, got {rate!r:.60}; give one number for all "
            "parameters, trainer.lr = 0.001"
        )
    return key, value


def averages(plan: ProgramPlan) -> dict[str, str]:
    """Return the keys of the moving averages of parameters, by the keys of parameters.

    Raises:
        PlanError: there are none.
    """
    known = {arg.key for f in plan.functions for arg in f.args}
    found = {
        arg.key: average for f in plan.functions if f.kind == "step"
        for arg in f.args
        if arg.role == "parameter" and (average := f.key_of_parameter(arg.key, EMA)) in known
    }  # fmt: skip
    if not found:
        raise PlanError("expected a program with moving averages, got none; compile with ema=0.999")
    return found


def with_aliases(plan: ProgramPlan, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by all names of their parameters and buffers: tied ones have several."""
    aliases = {name: tensors[key] for name, key in plan.aliases.items() if key in tensors}
    return {**tensors, **aliases}


def gradient_keys(f: PlanFunction) -> dict[str, str]:
    """Return the keys of the sums of gradients of a step, by the keys of parameters."""
    known = {arg.key for arg in f.args}
    return {
        arg.key: key for arg in f.args
        if arg.role == "parameter" and (key := f.key_of_parameter(arg.key, SUM)) in known
    }  # fmt: skip


def separate_update(plan: ProgramPlan, step: str) -> PlanFunction:
    """Return the function that updates the parameters of a step apart from its backward part.

    Raises:
        PlanError: there is none.
    """
    for f in plan.functions:
        if f.update_of == step:
            return f
    raise PlanError(
        f"expected a step whose update is separate, got {step}; compile with separate_update=True"
    )


def checked_weight(weight: Any) -> float:
    """Return the weight of a loss. Raises PlanError unless it is a finite number."""
    if isinstance(weight, int | float) and math.isfinite(weight):
        return float(weight)
    raise PlanError(f"expected a finite number as weight, got {weight!r:.60}")
