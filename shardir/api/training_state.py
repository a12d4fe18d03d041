"""The values with which the next run of a compiled model begins."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from shardir.backend.runs import Report
from shardir.dialects.nn.base import Array
from shardir.frontends.torch import weights


class TrainingState:
    """The values of a program between its runs: a run begins with the values after the last
    completed run.

    Args:
        values: the initial values of parameters and buffers, by their names in the module.
        states: by key, the initial values of other states, where they differ from the program's.

    Attributes:
        values: the current values of parameters and buffers.
        states: the current values of other states, such as moments, numbers of steps and random
            keys; a missing state has the program's initial value.
        steps: the number of completed steps.
    """

    def __init__(self, values: Mapping[str, torch.Tensor], states: Mapping[str, Array]):
        # copies: a module that is trained in torch changes its tensors in place
        self._first = {name: _copy(x) for name, x in values.items()}, dict(states)
        self.reset()

    def reset(self) -> None:
        """Reset to the initial values."""
        values, states = self._first
        self.values, self.states, self.steps = dict(values), dict(states), 0

    def fresh(self) -> "TrainingState":
        """Return a new state with the same initial values."""
        return TrainingState(*self._first)

    def replace(self, values: Mapping[str, torch.Tensor], copies: Iterable[str]) -> None:
        """Replace the values of parameters and buffers. The states `copies`, which begin as copies
        of them, are copied again; other states stay."""
        self.values.update(values)
        for key in copies:
            self.states.pop(key, None)

    def go_on(
        self, values: Mapping[str, torch.Tensor], states: Mapping[str, Array], steps: int
    ) -> None:
        """Replace all values and states, and the number of completed steps."""
        self.values, self.states, self.steps = dict(values), dict(states), steps

    def take(self, dump: Path, report: Report | None = None) -> None:
        """Load the values that a run has written, and the number of its last step."""
        self.values.update(weights.read_dump(dump, self.values))
        self.states = weights.read_states(dump, self.values)
        if report is not None:
            for function, losses in report.losses.items():
                self.steps = report.first[function] - 1 + len(losses)


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_meta else x.detach().to("cpu", copy=True)
