"""The functions of a program on one rank, and the states that they read and update."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..collectives import position
from ..collectives.mesh import Mesh
from ..compat import is_profiled
from ..plan.program import REPLICA, PlanError, PlanFunction, PlanResult, ProgramPlan
from .indices import index_error
from .named import named_functions
from .states import DTYPES, States


def scalars_of(function: PlanFunction) -> dict[int, PlanResult]:
    """Return the scalars of a step by their index among its results: the loss, then metrics."""
    return {i: r for i, r in enumerate(function.results) if not r.updates and not r.shape}


class Session:
    """The functions of a program, to be called on this rank's shards.

    Attributes:
        others: the functions that are not steps, such as evaluations.
        periodic: the functions that belong to a step and run after some of its calls.
        updates: the functions that update the parameters of a step apart from its backward part, by
            the name of the step.

    Args:
        functions: the functions of program.py by their names in the plan.
        seed: of the initial values of states.
        broadcasts: whether rank 0 sends the initial values to all ranks.
        recorder: of the times of calls, if any (trace.py).
    """

    def __init__(
        self, plan: ProgramPlan, mesh: Mesh, functions: Mapping[str, Callable], seed: int,
        broadcasts: bool = False, recorder: Any = None,
    ):  # fmt: skip
        self.plan, self.mesh, self.functions = plan, mesh, functions
        self.recorder = recorder
        for function in plan.functions:
            if function.name not in functions:
                raise PlanError(
                    f"plan.json names {function.name!r}, which the program does not have"
                )
        self._step = 0
        self.states = States(plan, mesh, seed, broadcasts)
        self.periodic = [f for f in plan.functions if f.kind == "function" and f.every]
        self.updates = {f.update_of: f for f in plan.functions if f.update_of is not None}
        self.others = [f for f in plan.functions if f.is_beside]

    def begin_step(self, step: int) -> None:
        """Record the step, counted from 0, whose functions are called next."""
        self._step = step + 1
        position.at_step(self._step)

    def train_step(
        self, function: PlanFunction, step: int, inputs: Sequence[Tensor], check: bool = False
    ) -> list[Tensor]:
        """Run a step, counted from 0, its separate update, and the periodic functions after it.
        Return its results."""
        self.begin_step(step)
        outputs = self.call(function, inputs, check)
        if (update := self.updates.get(function.name)) is not None:
            self.call(update, [], check)
        for other in self.periodic:
            if (step + 1) % (other.every or 1) == 0:
                self.call(other, [])
        return outputs

    def call(
        self, function: PlanFunction, inputs: Sequence[Tensor], check: bool = False
    ) -> list[Tensor]:
        """Run a function on this rank's shards of its inputs, in their order, and set the states
        that it returns. Other results have storages of their own.

        Args:
            check: whether to compare the results with the plan.
        """
        if self.recorder is None:
            return self._call(function, inputs, check)
        with self.recorder.call(function.name):
            return self._call(function, inputs, check)

    def _call(self, function: PlanFunction, inputs: Sequence[Tensor], check: bool) -> list[Tensor]:
        given = iter(inputs)
        args = [
            next(given) if arg.role == "input" else self.states.shard(arg) for arg in function.args
        ]
        try:
            if function.replicas is None:
                outputs = self._outputs(function, args)
            else:
                outputs = self._of_replicas(function, function.replicas, args)
        except IndexError as error:
            step = self._step if function.kind == "step" else 0
            raise index_error(error, function, self.states, inputs, step) from error
        if check:
            self._check(function, outputs)
        for result, output in zip(function.results, outputs, strict=True):
            if result.updates and output is not None:
                self.states.values[result.updates] = output
                self.states.types[result.updates] = result
        self.mesh.wait()
        return [
            x if result.updates else _separate(x)
            for result, x in zip(function.results, outputs, strict=True)
        ]

    def _outputs(self, function: PlanFunction, args: list) -> list[Tensor]:
        functions = self._named_functions if is_profiled() else self.functions
        outputs = functions[function.name](self.mesh, *args)
        return [outputs] if isinstance(outputs, Tensor) else list(outputs)

    @cached_property
    def _named_functions(self) -> Mapping[str, Callable]:
        return named_functions(self.functions)

    def _of_replicas(self, function: PlanFunction, replicas: int, args: list) -> list[Tensor]:
        """Run a function on the values of each replica of this rank: one replica, or all on one
        device. Reported scalars are means over these replicas."""
        here = replicas // self.mesh.axes.get(REPLICA, 1)
        runs = []
        for k in range(here):
            own = []
            for arg, x in zip(function.args, args, strict=True):
                if arg.of_replica:
                    size = arg.shape[0] // replicas  # more than 1: the microbatches of a replica
                    x = x[k] if size == 1 else x[k * size : (k + 1) * size]
                own.append(x)
            runs.append(self._outputs(function, own))
        outputs = []
        for result, values in zip(function.results, zip(*runs, strict=True), strict=True):
            stacked = values[0][None] if here == 1 else torch.stack(values)
            is_reported = not (result.updates or result.shape)
            outputs.append(stacked.mean(0) if is_reported else stacked)
        return outputs

    def _check(self, function: PlanFunction, outputs: list[Tensor]) -> None:
        """Raise PlanError unless the results have the types of the plan, before a later error that
        would be hard to trace."""
        if len(outputs) != len(function.results):
            raise PlanError(
                f"{function.name} returns {len(outputs)} results, not {len(function.results)}"
            )
        for result, output in zip(function.results, outputs, strict=True):
            if output is None:  # other stages have it
                continue
            shape = [stop - start for start, stop in self.states.bounds(result)]
            if list(output.shape) != shape or output.dtype != DTYPES[result.dtype]:
                raise PlanError(
                    f"{function.name} returns {list(output.shape)} {output.dtype} as"
                    f" {result.name!r} on rank {self.mesh.rank}; expected {shape} by plan.json"
                    f" {DTYPES[result.dtype]} (of {list(result.shape)})"
                )


def _separate(x: Tensor) -> Tensor:
    """Return a tensor with a storage of its own. A loss that was reduced with the gradients is a
    view of their buffer, which would live as long as the loss."""
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x
