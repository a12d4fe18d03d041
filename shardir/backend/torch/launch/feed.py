"""Batches that Python makes while the ranks train: each rank gets its part through a pipe.

A pipe holds little, so that no more batches are made than the ranks are about to need, and none is
stored. They are made and written by the thread that watches the ranks.
"""

import fcntl
import os
import selectors
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shardir.backend.runs import RunError
from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.backend.torch.shardir_runtime.data.loaders import LOADER, state_bytes, state_file
from shardir.backend.torch.shardir_runtime.plan.program import PlanArgument, PlanError, ProgramPlan
from shardir.dialects.nn.base import Array
from shardir.syntax.descriptors import keep_from_forks, release

PIPE_BYTES = 1 << 20
PASSED = {"f32": "<f4", "f64": "<f8", "f16": "<f2", "bf16": "<f4", "i64": "<i8", "i32": "<i4",
        "i1": "|b1"}  # fmt: skip
"""How the elements of an input are passed; numpy has no bf16."""

Batch = Sequence[Array]
"""The inputs of a step, in their order."""


class Pipes:
    """A pipe to each rank, to which the thread that watches the ranks writes.

    Attributes:
        readers: the ends that the ranks read.
        moved: whether data was made since the last wait.
    """

    def __init__(self, count: int):
        pipes = [os.pipe() for _ in range(count)]
        self.readers = [r for r, _ in pipes]
        self._writers = [keep_from_forks(w) for _, w in pipes]
        self._waiting = [memoryview(b"")] * count
        self._has_ended, self.moved = False, False
        for writer in self._writers:
            os.set_blocking(writer, False)
            with suppress(OSError, AttributeError):  # as many as the user may have
                fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    @property
    def is_empty(self) -> bool:
        """Whether all data is written."""
        return not any(self._waiting)

    def put(self, data: Sequence[bytes]) -> None:
        """Set the data of each rank, when the data before it is written."""
        self._waiting = [memoryview(x) for x in data]

    def words(self, rank: int) -> list[str]:
        """Return the words of a rank's command line that name its pipe."""
        return []

    def register(self, selector: selectors.BaseSelector) -> None:
        """Wait for pipes that can be written."""
        for writer, waiting in zip(self._writers, self._waiting, strict=True):
            if waiting:
                selector.register(writer, selectors.EVENT_WRITE)

    def write(self, ready: set[int]) -> None:
        """Write to the pipes that are ready, as much as fits."""
        for rank, writer in enumerate(self._writers):
            if writer in ready:
                try:
                    count = os.write(writer, self._waiting[rank])
                except OSError:  # the rank has ended: its exit code says why
                    count = len(self._waiting[rank])
                self._waiting[rank] = self._waiting[rank][count:]

    def end(self) -> None:
        """Let the ranks come to the end of their data."""
        if not self._has_ended:
            self._has_ended = True
            for writer in self._writers:
                os.close(release(writer))

    def close(self) -> None:
        """Close all pipes."""
        self.end()
        for reader in self.readers:
            os.close(reader)


class LoaderStates:
    """The states of the loader of a run's batches, which is ahead of the steps: a file after each
    batch, which rank 0 copies to a checkpoint.

    Args:
        done: the number of steps before the run.
    """

    def __init__(self, loader: Any, folder: Path, done: int):
        self.loader, self.folder, self.done = loader, folder, done
        self._first = done + 1
        self.variables = {LOADER: str(folder)}

    def write(self, step: int) -> None:
        """Write the state after the batch of a step, counted from the beginning of the run."""
        try:
            content = state_bytes(self.loader, check=step == 1)  # its later states are of a kind
        except PlanError as error:
            raise RunError(str(error)) from None
        state_file(self.folder, self.done + step).write_bytes(content)

    def drop_before(self, step: int) -> None:
        """Remove the states before a step that is done: its checkpoint may come yet."""
        for old in range(self._first, step):
            state_file(self.folder, old).unlink(missing_ok=True)
        self._first = max(self._first, step)


class Feed(Pipes):
    """The batches of a run, for all of its ranks.

    Args:
        batches: global batches, which are split for the ranks; with `local`, a list of the parts of
            all ranks for each batch.
        steps: the number of steps.
        states: the states of the loader, if checkpoints have them.

    Raises:
        RunError: there are fewer batches than steps.
    """

    def __init__(
        self, plan: ProgramPlan, batches: Iterator[Batch], steps: int, local: bool,
        states: LoaderStates | None = None,
    ):  # fmt: skip
        step = next((f for f in plan.functions if f.kind == "step"), None)
        if step is None:
            raise RunError(
                "expected a training step for batches, got a program of "
                f"{', '.join(f.name for f in plan.functions)}; call it: shardir.load(directory)"
            )
        self.args = [arg for arg in step.args if arg.role == "input"]
        self.batches, self.steps, self.local = batches, steps, local
        self._meshes = [rt.Mesh(plan.axes, rank) for rank in range(plan.size)]
        self._made, self._states = 0, states
        first = self._next()  # before the ranks start: it may be a wrong one
        super().__init__(plan.size)
        self._waiting = first

    def words(self, rank: int) -> list[str]:
        """Return the words of a rank's command line that name its pipe."""
        return ["--data", f"{','.join(arg.name for arg in self.args)}=fd:{self.readers[rank]}"]

    def register(self, selector: selectors.BaseSelector) -> None:
        """Wait for pipes that can be written, after the next batch is made if it is due."""
        self.moved = False
        if self.is_empty and self._made < self.steps:
            self._waiting, self.moved = self._next(), True
        super().register(selector)

    def _next(self) -> list[memoryview]:
        """Return the data of each rank for the next step."""
        count = self.args[0].microbatches if self.args else None
        found = list(islice(self.batches, count or 1))
        if len(found) < (count or 1):
            raise RunError(
                f"expected the batches of {self.steps} steps, got those of {self._made}; pass "
                f"steps={self._made}, or a list or a loader, which begin again at their end"
            )
        self._made += 1
        if self._states is not None:
            self._states.write(self._made)
        return [
            memoryview(b"".join(self._part(rank, i, arg, found) for i, arg in enumerate(self.args)))
            for rank in range(len(self._meshes))
        ]

    def _part(self, rank: int, place: int, arg: PlanArgument, found: Sequence) -> bytes:
        """Return the bytes of a rank's part of an input of these batches."""
        bounds = rt.local_bounds(self._meshes[rank], arg.shape, arg.dims)
        if self.local and any(len(batch) != len(self._meshes) for batch in found):
            raise RunError(
                f"expected batches of a part for each of {len(self._meshes)} ranks, got "
                f"{' and '.join(str(len(batch)) for batch in found)}"
            )
        each = [batch[rank][place] if self.local else batch[place] for batch in found]
        x = np.stack(each) if arg.microbatches else each[0]
        if not self.local:
            x = x[tuple(slice(*b) for b in bounds)]
        if list(x.shape) != [stop - start for start, stop in bounds]:
            raise RunError(
                f"batch {self._made - 1}: expected {arg.name} of "
                f"{[stop - start for start, stop in bounds]} for rank {rank}, got {list(x.shape)}"
            )
        return np.ascontiguousarray(x, PASSED[arg.dtype]).tobytes()
