"""States of torch's optimizers as states of programs, and back, by the names of parameters.

state[weight]["exp_avg"]       weight.exp_avg
state[weight]["step"]          step.count, one for all parameters
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from xdsl.dialects.builtin import ModuleOp

from shardir.algebra.layout import Shape
from shardir.diagnostics import ShardirError, several
from shardir.dialects.dist import MeshOp, global_shape
from shardir.dialects.nn.base import Array
from shardir.dialects.train import EMA, SUM, StateKeys, arguments, key_of_replica, replicas_of
from shardir.frontends.torch.schedules import after, copy_of
from shardir.frontends.torch.weights import array_of
from shardir.rewriting.functions import bodies

STEP = "step"
"""The name of a program's step, and of torch's number of steps."""

SHARED = {STEP: "count", "mu_product": "mu_product"}
"""The names of the states that torch has of each parameter, and a program once."""

RATE = "lr"
"""The name of the learning rate, if it is a state."""

RENAMED: dict[tuple[type[Any], str], str] = {(torch.optim.SGD, "momentum_buffer"): "momentum"}
"""The names of states that a program calls otherwise."""

REDUCED = {"row_var": -1, "col_var": -2}
"""The dimension, of one element in torch, that a state of a program lacks."""


def steps_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> int:
    """Return the steps that an optimizer has made for these parameters, by their identity; 0 where
    it does not count.

    Raises:
        ShardirError: they are different numbers.
    """
    counts: dict[int, str] = {}
    for p, name in _parameters(optimizer, names):
        step = optimizer.state[p].get(STEP, 0) if p in optimizer.state else 0
        counts.setdefault(int(step), name)
    if len(counts) > 1 and any(STEP in s for s in optimizer.state.values()):
        (first, a), (second, b) = list(counts.items())[:2]
        raise ShardirError(
            f"expected an optimizer with one number of steps for all parameters, got {first} for "
            f"{a}, {second} for {b}; use one whose parameters have all been trained in each step"
        )
    return next(iter(counts), 0)


def read_states(
    optimizer: torch.optim.Optimizer, keys: StateKeys, names: Mapping[int, str], module: ModuleOp,
    count: int,
) -> dict[str, Array]:  # fmt: skip
    """Return the states of an optimizer as values of a program's states, by key.

    Args:
        keys: the keys of the states of its step.
        names: the names of trained parameters, by id.
        module: the program, after its passes.
        count: the value of its number of steps, if it has one.

    Raises:
        ShardirError: the program lacks a state, or it has another shape.
    """
    values_by_key: dict[str, Any] = {}
    types = _types(module)
    shared = {kind: key for kind, name in SHARED.items() if (key := keys.of_step(name)) in types}
    for p, name in _parameters(optimizer, names):
        for kind, value in optimizer.state.get(p, {}).items():
            if value is None or kind == STEP:
                continue
            key = shared.get(kind) or keys.of_parameter(name, name_of_state(optimizer, kind))
            value = array_of(torch.as_tensor(value))
            if key in values_by_key and kind in shared and (values_by_key[key] != value).any():
                raise ShardirError(
                    f"expected one {kind} of all parameters, got {values_by_key[key]} and {value} "
                    f"({name})"
                )
            values_by_key[key] = value
    if count and STEP in shared:  # else nothing of the program reads it
        values_by_key[shared[STEP]] = np.asarray(count, np.int64)
    return dict(_fitted(values_by_key, types))


def _fitted(
    states: Mapping[str, Array], types: Mapping[str, tuple[Shape, int | None]]
) -> Iterator[tuple[str, Array]]:
    """Yield values of states in the program's shapes; each replica begins with the same one."""
    if missing := [k for k in states if not {k, key_of_replica(k)} & types.keys()]:
        raise ShardirError(
            f"expected an optimizer with the states of the program's, got {several(missing)} "
            "too; use one without them: load_state_dict of its parameters' states alone"
        )
    for key, value in states.items():
        own = key if key in types else key_of_replica(key)
        if own not in types:
            continue
        shape, replicas = types[own]
        if [n for n in shape if n != 1] != [n for n in value.shape if n != 1]:
            raise ShardirError(
                f"expected {key} of {list(shape)} in the optimizer, got {list(value.shape)}"
            )
        copy = np.array(value).reshape(shape)  # torch changes its own in place
        yield own, copy if own == key else np.broadcast_to(copy, (replicas or 1, *shape))


def _types(module: ModuleOp) -> dict[str, tuple[Shape, int | None]]:
    """Return the shape of each state and parameter of a program, and its number of replicas."""
    mesh = next((op.mesh for op in module.ops if isinstance(op, MeshOp)), None)
    return {
        a.key: (global_shape(t, mesh), replicas_of(f))
        for f, _ in bodies(module)
        for a, t in zip(arguments(f), f.function_type.inputs, strict=True) if a.key is not None
    }  # fmt: skip


@dataclass(frozen=True)
class TorchForm:
    """The form of an optimizer's state_dict at the compilation of a program.

    Args:
        kind: the class of the optimizer.
        groups: the groups of its parameters.
        names: the names of its parameters, in order; None for a parameter that is not trained.
        dtypes: the dtypes of its parameters.
        count: the number of its completed steps.
        scheduler: a copy of its scheduler, if it has one.
        keys: the keys of the states of its step.
    """

    kind: type[torch.optim.Optimizer]
    groups: list[dict[str, Any]]
    names: list[str | None]
    dtypes: list[torch.dtype]
    count: int
    scheduler: Any
    keys: StateKeys

    @classmethod
    def of(
        cls, optimizer: torch.optim.Optimizer, scheduler: Any, keys: StateKeys,
        names: Mapping[int, str],
    ) -> "TorchForm":  # fmt: skip
        held = [p for group in optimizer.param_groups for p in group["params"]]
        return cls(
            type(optimizer), deepcopy(optimizer.state_dict()["param_groups"]),
            [names.get(id(p)) for p in held], [p.dtype for p in held], steps_of(optimizer, names),
            None if scheduler is None else copy_of(scheduler), keys,
        )  # fmt: skip

    def state_dict(self, states: Mapping[str, Array], steps: int) -> dict[str, Any]:
        """Return an argument for `optimizer.load_state_dict`, with the rates of the scheduler, or
        those that the loop of the training has set.

        Args:
            states: the states of the program, by key.
            steps: the number of steps of its runs.
        """
        state_of_parameter: dict[str, Any] = {"state": {}, "param_groups": deepcopy(self.groups)}
        if self.scheduler is not None:
            for group, now in zip(
                state_of_parameter["param_groups"], after(self.scheduler, steps), strict=True
            ):
                group["lr"] = now
        elif (rate_key := self.keys.of_step(RATE)) in states:
            first = next((rate for g in self.groups if (rate := float(g["lr"]))), 1.0)
            for group in state_of_parameter["param_groups"]:
                group["lr"] = group["lr"] * (float(states[rate_key]) / first)
        count = int(states.get(self.keys.of_step(SHARED[STEP]), self.count + steps))
        if states or count:
            state_of_parameter["state"] = {i: self._state(name, dtype, states, count)
                             for i, (name, dtype) in enumerate(zip(self.names, self.dtypes,
                                                                   strict=True))
                             if name is not None}  # fmt: skip
        return state_of_parameter

    def _state(
        self, name: str, dtype: torch.dtype, states: Mapping[str, Array], count: int
    ) -> dict[str, torch.Tensor]:
        """The state of one parameter."""
        theirs = {ours: kind for (of, kind), ours in RENAMED.items() if of is self.kind}
        own = {
            kind: torch.tensor(float(states[key])) for kind, shared in SHARED.items()
            if kind != STEP and (key := self.keys.of_step(shared)) in states
        }  # fmt: skip
        if self.kind is not torch.optim.SGD:
            own[STEP] = torch.tensor(float(count))
        for key, value in states.items():
            kind = key.removeprefix(self.keys.of_parameter(name, ""))  # which may have a dot
            if kind not in (key, EMA, SUM):
                x = torch.from_numpy(np.array(value)).to(dtype)
                own[theirs.get(kind, kind)] = x.unsqueeze(REDUCED[kind]) if kind in REDUCED else x
        return own


def name_of_state(optimizer: torch.optim.Optimizer, kind: str) -> str:
    """Return the name of a state that torch calls `kind`."""
    return RENAMED.get((type(optimizer), kind), kind)


def _parameters(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[torch.Tensor, str]]:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) in names:
                yield p, names[id(p)]
