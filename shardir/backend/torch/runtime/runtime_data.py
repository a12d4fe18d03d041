"""The inputs of a program on one rank: rows of files, or random values.

A part of the runtime; needs only torch.
"""

from collections.abc import Callable

import torch
from runtime_files import open_npy
from runtime_order import rows_at
from runtime_plan import PlanArgument, PlanFunction
from runtime_states import DTYPES, States, part
from torch import Tensor


def input_of(states: States, function: PlanFunction, arg: PlanArgument) -> Callable[[int], Tensor]:
    """Return the function from a step to this rank's shard of an input: a batch of a file's rows,
    or values that are the same in each step. A function that is no step reads the rows in order."""
    data, is_step = None, function.kind == "step"
    if arg.init["kind"] == "file" and arg.shape:
        data = open_npy(states.plan.directory / arg.init["file"])
    if data is None or not (is_step or len(data) >= 2 * arg.shape[0] > 0):
        same = states.filled(arg)
        return lambda step: same
    several = "microbatches" in arg.init
    *microbatches, (start, stop) = states.bounds(arg)[: several + 1]
    columns, size = states.bounds(arg)[several + 1 :], arg.shape[several]
    shuffle = is_step and arg.init.get("shuffle", True)

    def batch(number: int) -> Tensor:
        first, count = number * size + start, stop - start
        if shuffle:
            rows = rows_at(len(data), first, count, states.seed)
        else:
            rows = torch.arange(first, first + count) % len(data)
        mine = part(data, [(0, len(data)), *columns])[rows]  # reads nothing else of the file
        return mine.to(states.mesh.device, DTYPES[arg.dtype], memory_format=torch.contiguous_format)

    def batches(step: int) -> Tensor:  # a microbatch is the batch of a step without them
        (first, last), first_of_step = microbatches[0], step * arg.shape[0]
        return torch.stack([batch(first_of_step + k) for k in range(first, last)])

    return batches if several else batch
