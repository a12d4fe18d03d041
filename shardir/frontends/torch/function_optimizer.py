"""An optimizer of torch whose update is a function.

lion(parameter, gradient, state, *, lr, beta1, beta2) -> parameter, {"exp_avg": ...}
shardir.optimizer(lion, states={"exp_avg": 0.0}, lr=1e-4, beta1=0.9, beta2=0.99)
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from shardir.diagnostics import ShardirError, check_arguments, describe

UpdateFunction = Callable[..., Any]
FirstState = float | Callable[[torch.Tensor], torch.Tensor]

STEP = "step"
GIVEN = ("parameter", "gradient", "state")


class FunctionOptimizer(torch.optim.Optimizer):
    """Updates each parameter by a function; `step` runs it as torch does, on one device."""

    def __init__(
        self, params: Any, function: UpdateFunction, states: Mapping[str, FirstState],
        defaults: dict[str, Any],
    ):  # fmt: skip
        super().__init__(params, defaults)
        self.function, self.first = function, dict(states)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "function": self.function, "first": self.first}

    def first_states(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the states of a parameter before step 1."""
        return {name: first(parameter) if callable(first) else torch.full_like(parameter, first)
                for name, first in self.first.items()}  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have gradients; return what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: torch.Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state[STEP] = torch.zeros((), dtype=torch.float64)
            state.update(self.first_states(p))
        state[STEP] += 1
        numbers = {STEP: state[STEP], **group}
        taken = {n: numbers[n] for n in names_taken(self.function, numbers)}
        old = {n: state[n] for n in self.first}
        new = self.function(p.detach(), p.grad, dict(old), **taken)
        parameter, states = new if isinstance(new, tuple) and len(new) == 2 else (new, {})
        if not isinstance(parameter, torch.Tensor) or not isinstance(states, Mapping):
            wanted = "a new parameter and a dict of new states" if old else "a new parameter"
            raise ShardirError(f"expected {wanted} of {self._name}, got {describe(new)}")
        if states.keys() != old.keys():
            wanted, got = (", ".join(x) or "none" for x in (old, states))
            raise ShardirError(f"expected the new states {wanted} of {self._name}, got {got}")
        for name, before, after in (
            ("parameter", p, parameter), *((n, old[n], states[n]) for n in old),
        ):  # fmt: skip
            if not isinstance(after, torch.Tensor) or after.shape != before.shape:
                got = list(after.shape) if isinstance(after, torch.Tensor) else describe(after)
                raise ShardirError(
                    f"expected the new {name} of {self._name} of {list(before.shape)}, got {got}"
                )
            before.copy_(after)

    @property
    def _name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)


@check_arguments("optimizer")
def optimizer(
    update: UpdateFunction,
    params: Iterable[Any] | None = None,
    *,
    lr: float | torch.Tensor,
    states: Mapping[str, FirstState] | None = None,
    whole: bool = False,
    **hyperparameters: float,
) -> Any:
    """Return an optimizer of torch whose update of each parameter is a function.

    `update(parameter, gradient, state, ...)` returns the new parameter and a dict of the new
    states, or without states the new parameter alone. It changes none of its arguments. It gets
    further arguments by their names: `lr`, `step` (the number of this step, from 1), and its
    hyperparameters. In a program `lr` and `step` are scalar tensors of f64: use torch.where and
    torch.sqrt, not `if` and math.sqrt. It may depend on the parameter's shape.

    Args:
        params: the parameters, or groups with numbers of their own, as for torch.optim. Without
            them the result is a function of them, and `shardir.compile` passes all parameters.
        states: for each state the number that its elements are before step 1; or a function from
            the parameter to a tensor of its shape, or to a scalar.
        whole: whether the function may use ops that are not elementwise. It then sees whole
            parameters and gradients, at the cost of communication. A key of groups, too.
        hyperparameters: numbers for the function, which groups may replace.

    Raises:
        ShardirError: the function does not take these arguments.
    """
    if STEP in {**(states or {}), **hyperparameters}:
        raise ShardirError(
            f"expected names of states and hyperparameters other than {STEP}, the number of the "
            "step; rename it"
        )
    defaults = {"lr": lr, "whole": whole, **hyperparameters}
    for name in ("lr", *hyperparameters):
        if name not in names_taken(update, {**defaults, STEP: 0}):
            function = getattr(update, "__name__", type(update).__name__)
            raise ShardirError(
                f"expected an update with an argument {name}, got "
                f"{function}{inspect.signature(update)}; add it: {function}(..., {name})"
            )
    bound = partial(FunctionOptimizer, function=update, states=states or {}, defaults=defaults)
    return bound if params is None else bound(params)


def names_taken(update: UpdateFunction, names: Iterable[str]) -> list[str]:
    """Return which of these names an update has as arguments, after its first three."""
    parameters = list(inspect.signature(update).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return [n for n in names if n not in ("params", "initial_lr", "whole")]
    own = {p.name for p in parameters[len(GIVEN) :]}
    return [n for n in names if n in own]
