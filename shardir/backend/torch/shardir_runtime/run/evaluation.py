"""Functions beside the steps, such as an accuracy, over all batches of their data."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..plan.program import PlanError, PlanFunction
from .states import DTYPES, States


def batches_of(function: PlanFunction) -> int:
    """Return the number of batches of a function's data, with a padded batch; 1 without data. The
    microbatches of a call count as one batch. A file with a single batch is used in all batches.

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
        raise PlanError(
            f"{function.name}: expected the same number of batches in every input, got {each}"
        )
    return several[0] if several else 1


def averaged_results(function: PlanFunction) -> list[int]:
    """Return the indices of the results that an evaluation averages: scalars of floats."""
    return [
        i for i, r in enumerate(function.results)
        if not (r.updates or r.shape or r.weighs is not None)
        and DTYPES[r.dtype].is_floating_point
    ]  # fmt: skip


def evaluate(
    states: States, function: PlanFunction, calls: Iterable[list[Tensor]]
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Average the results of a function over batches; `calls` are this rank's results of each.

    Returns:
        This rank's results of the first batch; and, by their index among the results, the means of
        scalars of floats over all batches. They are weighted by the numbers of tokens if a result
        is a mean over tokens, else by the numbers of rows, without padding. The mean of several
        batches is in double precision.
    """
    masked = next((arg.masked for arg in function.args if arg.masked is not None), None)
    scalars = averaged_results(function)
    weights = {r.weighs: i for i, r in enumerate(function.results) if r.weighs is not None}
    first: list[Tensor] = []
    sums: dict[int, tuple[Tensor, Tensor | int]] = {}
    only: dict[int, Tensor] = {}
    number = -1
    for number, outputs in enumerate(calls):
        first = first or outputs
        found = {
            i: states.gathered(outputs[i], function.results[i], function.results[i].partial)
            for i in (*scalars, *weights.values())
        }
        only = only or {i: found[i] for i in scalars}
        for i in scalars:
            weight: Tensor | int = masked.count(number) if masked else 1
            x = found[i].double()
            if i in weights:
                weight = found[weights[i]].double().reshape(())
                x = x.where(weight != 0, 0.0)  # the mean of a batch without tokens is 0 / 0
            total, count = sums.get(i, (torch.zeros_like(x), 0))
            sums[i] = total + x * weight, count + weight
    if number < 1:
        return first, only
    return first, {i: total / count for i, (total, count) in sums.items()}
