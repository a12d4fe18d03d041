"""The values of a compiled module of torch, by their names in the module."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shardir.api.compiled import Compiled
from shardir.api.summary import Summary
from shardir.api.training_state import TrainingState
from shardir.diagnostics import ShardirError, check_arguments, several
from shardir.dialects.train import EMA, InitAttr, StateKeys, arguments
from shardir.frontends.torch import weight_files, weights
from shardir.frontends.torch.steps import named_tensors
from shardir.frontends.torch.weights import array_of
from shardir.rewriting.functions import bodies


@dataclass(frozen=True, eq=False, repr=False)
class ModelProgram(Compiled):
    """A compiled module of torch. Its `repr` has its mesh, plan, estimated time and memory."""

    state: TrainingState
    """The values with which the next run begins."""

    @property
    @abstractmethod
    def model(self) -> torch.nn.Module:
        """The module."""

    @property
    @abstractmethod
    def step_keys(self) -> list[StateKeys]:
        """The keys of the states of each step's optimizer."""

    @property
    def values(self) -> Mapping[str, torch.Tensor]:
        """The current values of parameters and buffers, by their names in the module."""
        return self.state.values

    @property
    def title(self) -> str:
        return type(self.model).__name__

    def summary(self) -> Summary:
        found = super().summary()
        steps = self.steps_done
        trained = [("trained", f"{steps} step{'s' * (steps != 1)}")] if steps else []
        return replace(found, rows=[*found.rows, *trained])

    @property
    def steps_done(self) -> int:
        """The number of steps of all runs since the compilation or the last reset."""
        return self.state.steps

    def reset(self) -> None:
        """Reset the program to step 0, and to the values and optimizer states at the
        compilation."""
        self.state.reset()

    def state_dict(self, ema: bool = False) -> dict[str, torch.Tensor]:
        """Return the current values of parameters and buffers for the module's
        `load_state_dict`.

        Args:
            ema: whether the parameters are their moving averages.

        Raises:
            ShardirError: the program has no averages.
        """
        values = dict(self.values)
        if ema:
            values.update(self._averages())
        return {name: values[known] for name, known in self._canonical_names().items()}

    def _averages(self) -> dict[str, torch.Tensor]:
        """Return the moving averages of parameters, by their names in the module."""
        keys = {a.key for f, _ in bodies(self.module) for a in arguments(f)}
        averages = {
            name: key for name in self.values for step in self.step_keys
            if (key := step.of_parameter(name, EMA)) in keys
        }  # fmt: skip
        if not averages:
            raise ShardirError(
                "expected a program with moving averages, got none; compile with ema=0.999"
            )
        states = self.state.states
        return {
            name: torch.from_numpy(states[key].copy()).to(self.values[name].dtype)
            if key in states else self.values[name]
            for name, key in averages.items()
        }  # fmt: skip

    @check_arguments("load_state_dict")
    def load_state_dict(self, states: Mapping[str, torch.Tensor]) -> None:
        """Replace the values of parameters and buffers. The states of the optimizer and the number
        of steps stay, as in torch.

        Args:
            states: the values by name, in the form of the module's `state_dict()`.

        Raises:
            ShardirError: names are missing or unknown, or shapes differ; no value is changed.
        """
        known = self._canonical_names()
        weights.check(states, {name: self.values[k] for name, k in known.items()}, known)
        values = {known[name]: x.detach().to("cpu", self.values[known[name]].dtype, copy=True)
                  for name, x in states.items()}  # fmt: skip
        self.state.replace(values, self._copies())

    @check_arguments("load_weights")
    def load_weights(self, path: str | Path) -> None:
        """Load the values of parameters and buffers from a file.

        Args:
            path: a `.safetensors` file, the index of several (`.safetensors.index.json`), a file of
                torch.save, a folder with one of these, or a checkpoint of a run.

        Raises:
            ShardirError: see `load_state_dict`; or the file can't be read.
        """
        values = weight_files.read(path)
        if weight_files.is_checkpoint(path):  # it has the states of the optimizer too
            values = {name: x for name, x in values.items() if name in self._canonical_names()}
        self.load_state_dict(values)

    @check_arguments("load_checkpoint")
    def load_checkpoint(self, path: str | Path) -> None:
        """Go on from a checkpoint of a run, or of a trainer, on any mesh: with its parameters,
        buffers, states of optimizers and number of steps. The next run begins there, and
        `optimizer_state_dict` has its states.

        Args:
            path: the checkpoint, or a folder whose last complete one counts.

        Raises:
            ShardirError: there is no checkpoint, it is damaged, or of another program; nothing has
                changed.
        """
        found, steps = weight_files.read_checkpoint(path)
        keys = {a.key for f, _ in bodies(self.module) for a in arguments(f) if a.key is not None}
        wrong = [
            f"{name} of {list(x.shape)}, got {list(found[name].shape)}"
            for name, x in self.values.items() if name in found and found[name].shape != x.shape
        ]  # fmt: skip
        if missing := sorted(keys - found.keys()):
            wrong.append(f"a checkpoint of this program, got one without {several(missing)}")
        if unknown := sorted(found.keys() - keys):
            wrong.append(f"a checkpoint of this program, got one with {several(unknown)} too")
        if wrong:
            raise ShardirError(f"{path}: expected {'; '.join(wrong[:5])}")
        values = {name: found[name].to(x.dtype) for name, x in self.values.items()}
        states = {key: array_of(x) for key, x in found.items() if key not in values}
        self.state.go_on(values, states, steps)

    @check_arguments("save_weights")
    def save_weights(self, path: str | Path, max_shard_size: str | int | None = None) -> None:
        """Write `state_dict` to a file, or to several files with an index, in the format of
        transformers.

        Args:
            path: a `.safetensors` file, an index `.safetensors.index.json`, a file for
                torch.save, or a folder, without a suffix, for `model.safetensors`.
            max_shard_size: the maximum bytes of tensors in a file, such as `5GB`. Beyond it there
                are several `.safetensors` files and an index. The default is 5GB for an index,
                else unlimited.

        Raises:
            ShardirError: the files can't be written; existing files are unchanged.
        """
        weight_files.write(path, self.state_dict(), max_shard_size)

    def _copies(self) -> list[str]:
        """Return the keys of states that begin as copies of other states, such as those of
        replicas, but for moving averages, which the program has trained."""
        averages = {s.of_parameter(name, EMA) for s in self.step_keys for name in self.values}
        roles = (a for f, _ in bodies(self.module) for a in arguments(f))
        return [a.key for a in roles if a.key and isinstance(a.init, InitAttr)
                and a.init.kind == "copy" and a.key not in averages]  # fmt: skip

    def _aliases(self) -> dict[str, str]:
        """Return further names of parameters and buffers, with their names in `values`."""
        names = self._canonical_names().items()
        return {name: known for name, known in names if name != known}

    def _canonical_names(self) -> dict[str, str]:
        """Map each name of the module's state_dict to the name in `values`: tied tensors share
        one."""
        model = self.model
        tensors = dict(named_tensors(model))
        names = {id(tensors[name]): name for name in self.values if name in tensors}
        return {name: names[id(x)] for name in model.state_dict()
                if (x := tensors.get(name)) is not None and id(x) in names}  # fmt: skip
