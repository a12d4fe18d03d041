"""The functions of a program on one rank, and the states that they use and change.

A part of the runtime; needs only torch.
"""

from collections.abc import Callable, Mapping, Sequence

import runtime as rt
from runtime_plan import PlanError, PlanFunction, ProgramPlan
from runtime_states import DTYPES, States
from torch import Tensor


class Session:
    """The functions of a program, to be called on this rank's shards.

    Args:
        functions: those of program.py, by their names in the plan.
        seed: of the initial values of states.
    """

    def __init__(
        self, plan: ProgramPlan, mesh: rt.Mesh, functions: Mapping[str, Callable], seed: int
    ):
        self.plan, self.mesh, self.functions = plan, mesh, functions
        for function in plan.functions:
            if function.name not in functions:
                raise PlanError(
                    f"plan.json names {function.name!r}, which the program does not have"
                )
        self.states = States(plan, mesh, seed)

    def call(
        self, function: PlanFunction, inputs: Sequence[Tensor], check: bool = False
    ) -> list[Tensor]:
        """Run a function on this rank's shards of its inputs, in their order; the states become
        those that it returns.

        Args:
            check: whether to compare the results with the plan.
        """
        given = iter(inputs)
        args = [
            next(given) if arg.role == "input" else self.states.shard(arg) for arg in function.args
        ]
        outputs = self.functions[function.name](self.mesh, *args)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        if check:
            self._check(function, outputs)
        for result, output in zip(function.results, outputs, strict=True):
            if result.updates:
                self.states.values[result.updates] = output
                self.states.types[result.updates] = result
        self.mesh.wait()
        return outputs

    def _check(self, function: PlanFunction, outputs: list[Tensor]) -> None:
        """Raise PlanError unless the results have the types of the plan: a later error would be
        hard to trace."""
        if len(outputs) != len(function.results):
            raise PlanError(
                f"{function.name} returns {len(outputs)} results, not {len(function.results)}"
            )
        for result, output in zip(function.results, outputs, strict=True):
            shape = [stop - start for start, stop in self.states.bounds(result)]
            if list(output.shape) != shape or output.dtype != DTYPES[result.dtype]:
                raise PlanError(
                    f"{function.name} returns {list(output.shape)} {output.dtype} as"
                    f" {result.name!r} on rank {self.mesh.rank}; expected {shape} by plan.json"
                    f" {DTYPES[result.dtype]} (of {list(result.shape)})"
                )
