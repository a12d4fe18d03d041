"""Functions beside the steps, such as an accuracy: over all batches of their data."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..plan.program import PlanError, PlanFunction
from .states import DTYPES, States


def batches_of(function: PlanFunction) -> int:
    """Return the number of batches that a function's data has: complete ones, and one that is
    padded; 1 without data. Those of several microbatches count as one. A file of one batch is the
    same in all of them.

    Raises:
        PlanError: its files have different numbers of batches.
    """
    found: dict[int, str] = {}
    for arg in function.args:
        if arg.epochs is not None:
            found[arg.epochs.batches // (arg.microbatches or 1)] = arg.name
    several = sorted(found.keys() - {0, 1})
    if len(several) > 1:
        each = ", ".join(f"{n} of {found[n]}" for n in several)
        raise PlanError(f"{function.name}: expected inputs of as many batches each, got {each}")
    return several[0] if several else 1


def evaluate(
    states: States, function: PlanFunction, batches: int, call: Callable[[int], list[Tensor]]
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Run a function on all batches of its data; `call` runs it on one, by its number.

    Returns:
        This rank's results of the first batch; and of scalars of floats, by their places among the
        results, the mean over all batches: by the numbers of tokens where the result is a mean over
        these, else by those of rows, of which a padded batch has fewer. It is in double precision
        where there are several batches.
    """
    masked = next((arg.masked for arg in function.args if arg.masked is not None), None)
    results = list(enumerate(function.results))
    weights = {r.weighs: i for i, r in results if r.weighs is not None}
    numbers = [i for i, r in results if not (r.updates or r.shape or i in weights.values())]
    scalars = [i for i in numbers if DTYPES[function.results[i].dtype].is_floating_point]
    first: list[Tensor] = []
    sums: dict[int, tuple[Tensor, Tensor | int]] = {}
    for number in range(batches):
        outputs = call(number)
        first = first or outputs
        found = {
            i: states.gathered(outputs[i], function.results[i], function.results[i].partial)
            for i in (*scalars, *weights.values())
        }
        if batches == 1:
            return first, {i: found[i] for i in scalars}
        for i in scalars:
            weight: Tensor | int = masked.count(number) if masked else 1
            x = found[i].double()
            if i in weights:
                weight = found[weights[i]].double().reshape(())
                x = x.where(weight != 0, 0.0)  # the mean of a batch without tokens is 0 / 0
            total, count = sums.get(i, (torch.zeros_like(x), 0))
            sums[i] = total + x * weight, count + weight
    return first, {i: total / count for i, (total, count) in sums.items()}
