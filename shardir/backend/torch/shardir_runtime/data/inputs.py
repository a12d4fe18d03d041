"""The inputs of a program on one rank: rows of files, or random values.

The rows of a step depend on the seed and the step alone (order.py). A rank reads only its part of
them.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from ..plan.arrays import ArrayError, FileArray
from ..plan.program import PlanArgument, PlanError, PlanFunction
from ..run.states import DTYPES, States
from .files import ArrayReader
from .order import batch_rows

AHEAD = 2
"""The number of steps whose inputs are prepared in advance, while a step runs."""


class Inputs:
    """The inputs of a function on this rank, in their order."""

    def __init__(self, states: States, function: PlanFunction):
        self.device = states.mesh.device
        self._hosts = [a.host for a in function.args if a.role == "input"]
        self._made = [_input(states, function, a) for a in function.args if a.role == "input"]

    def at(self, step: int) -> list[Tensor]:
        """Return the inputs of a step."""
        values = zip(self._host(step), self._hosts, strict=True)
        return [x if host else x.to(self.device) for x, host in values]

    def ahead(self, steps: Sequence[int]) -> Iterator[list[Tensor]]:
        """Yield the inputs of steps, which a thread prepares in advance. An error of the thread is
        raised where its step would begin."""
        make = self._copy_to_device if self.device.type == "cuda" else self._read
        waiting: deque[Future[Callable[[], list[Tensor]]]] = deque()
        pool, begun = ThreadPoolExecutor(1, "inputs"), iter(steps)
        try:
            for _ in steps:
                missing = AHEAD + 1 - len(waiting)
                waiting.extend(pool.submit(make, step) for step in islice(begun, missing))
                yield waiting.popleft().result()()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # the thread may wait for data forever

    def _host(self, step: int) -> list[Tensor]:
        return [make(step) for make in self._made]

    def _read(self, step: int) -> Callable[[], list[Tensor]]:
        found = self._host(step)
        return lambda: found

    def _copy_to_device(self, step: int) -> Callable[[], list[Tensor]]:
        """Start to copy the inputs of a step to the device. Return a function that makes the
        current stream wait for the copies, and returns them."""
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            found = [
                x if x.is_cuda or host else x.pin_memory().to(self.device, non_blocking=True)
                for x, host in zip(self._host(step), self._hosts, strict=True)
            ]
            copied = torch.cuda.current_stream().record_event()

        def wait_for_copies() -> list[Tensor]:
            here = torch.cuda.current_stream()
            here.wait_event(copied)
            for x in found:
                if x.is_cuda:
                    x.record_stream(here)
            return found

        return wait_for_copies


def _input(states: States, function: PlanFunction, arg: PlanArgument) -> Callable[[int], Tensor]:
    """Return the function from a step to this rank's shard of an input: a batch of a file's rows,
    or values that do not change. The shard is empty if only other stages read the input. A function
    that is not a step reads the rows in order."""
    is_step, epochs = function.kind == "step", arg.epochs
    several = arg.microbatches is not None
    if isinstance(arg.source, int):
        return partial(_read_pipe, arg.source, arg, states.bounds(arg))
    if not (states.is_among(arg.at) or states.broadcasts or function.replicas):
        unread = torch.empty(0, dtype=DTYPES[arg.dtype])
        return lambda step: unread
    microbatches, of_batch = states.bounds(arg)[:several], states.bounds(arg)[several:]
    reads = is_step or several or not of_batch or (epochs is not None and epochs.batches > 1)
    if arg.masked is None and (epochs is None or not reads):
        same = states.filled(arg)
        return lambda step: same
    (start, stop), *columns = of_batch or [(0, 1)]
    if arg.masked is not None:
        masked, places = arg.masked, torch.arange(start, stop)

        def batch(number: int) -> Tensor:
            return (places < masked.count(number)).to(DTYPES[arg.dtype])

    else:
        shuffle = is_step and arg.init.get("shuffle", True)
        read = _reading(arg, (start, stop), columns, states.seed if shuffle else None)
        batch = read if of_batch else lambda number: read(number)[0]

    def batches(step: int) -> Tensor:  # a microbatch is the batch of a step without them
        (first, last), first_of_step = microbatches[0], step * arg.shape[0]
        return torch.stack([batch(first_of_step + k) for k in range(first, last)])

    return batches if several else batch


def _reading(
    arg: PlanArgument, part: tuple[int, int], columns: Sequence[tuple[int, int]], seed: int | None
) -> Callable[[int], Tensor]:
    """Return the function from the number of a batch to a part of its rows in a file.

    Args:
        seed: the seed of the order of rows; None for the order of the file.
    """
    source, epochs = arg.source, arg.epochs
    assert isinstance(source, FileArray) and epochs is not None
    data = ArrayReader(source)

    def batch(number: int) -> Tensor:
        if seed is None:
            rows = (torch.arange(*part) + epochs.first(number)) % epochs.rows
        else:
            rows = batch_rows(epochs, part, number, seed)
        try:
            found = data.read(columns, rows)
        except ArrayError as error:
            raise PlanError(str(error)) from None
        return convert_rows(found, arg, rows, source.path)

    return batch


def _read_pipe(
    pipe: int, arg: PlanArgument, bounds: Sequence[tuple[int, int]], step: int
) -> Tensor:
    """Read this rank's shard of the next step from a pipe (launch/feed.py writes it)."""
    shape = [stop - start for start, stop in bounds]
    dtype = torch.float32 if arg.dtype == "bf16" else DTYPES[arg.dtype]
    memory = bytearray(math.prod(shape) * dtype.itemsize)
    done = 0
    while done < len(memory):
        count = os.readv(pipe, [memoryview(memory)[done:]])
        if not count:
            raise PlanError(f"expected a batch for step {step + 1}, got the end of them")
        done += count
    x = torch.frombuffer(memory, dtype=dtype) if memory else torch.empty(0, dtype=dtype)
    return x.view(shape).to(DTYPES[arg.dtype])


def convert_rows(x: Tensor, arg: PlanArgument, rows: Tensor, path: Path) -> Tensor:
    """Return rows of a file in the type of an input.

    Raises:
        PlanError: the type does not hold one of the integers.
    """
    if x.dtype == torch.int64 and arg.dtype == "i32" and x.numel():
        beyond = (x != x.int()).flatten(1).any(1) if x.ndim > 1 else x != x.int()
        if beyond.any():
            place = int(beyond.int().argmax())
            number = next(n for n in x[place].flatten().tolist() if not -(1 << 31) <= n < 1 << 31)
            raise PlanError(
                f"{arg.name}: expected numbers that i32 holds, got {number} in row "
                f"{int(rows[place])} of {path}"
            )
    return x.to(DTYPES[arg.dtype])
