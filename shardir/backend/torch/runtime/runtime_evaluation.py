"""Functions beside the steps, such as an accuracy: over all batches of their data.

A part of the runtime; needs only torch.
"""

from collections.abc import Callable

from runtime_plan import PlanError, PlanFunction
from runtime_states import States
from torch import Tensor


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
        results, the mean over all batches, of a padded one by its rows: in double precision where
        there are several.
    """
    masked = next((arg.masked for arg in function.args if arg.masked is not None), None)
    shares = [masked.count(k) if masked else 1 for k in range(batches)]
    first: list[Tensor] = []
    means: dict[int, Tensor] = {}
    for number in range(batches):
        outputs = call(number)
        first = first or outputs
        for i, (result, x) in enumerate(zip(function.results, outputs, strict=True)):
            if result.updates or result.shape or not x.is_floating_point():
                continue
            one = states.gathered(x, result, result.partial)
            if batches > 1:
                one = one.double() * shares[number] / sum(shares)
            means[i] = means[i] + one if i in means else one
    return first, means
