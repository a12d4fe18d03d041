"""Requests to end the training after the current step, on which all ranks agree."""

import os
import signal
from typing import Any

import torch
import torch.distributed as dist

from ..collectives import position
from .events import MAY_FINISH

INTERRUPT = (signal.SIGTERM, signal.SIGINT)
"""The signals that end a run."""


def may_finish() -> bool:
    """Whether the launcher may request the end of the training."""
    return MAY_FINISH in os.environ


def own_group(mesh: Any, name: str = "beside the steps") -> Any:
    """Return a process group of all ranks on CPUs, for work beside the steps."""
    if mesh.size == 1:
        return None
    backend = "gloo" if mesh.device.type == "cuda" else None  # else the run's
    return dist.new_group(backend=backend, group_desc=name)


class Interruption:
    """Requests by signals. Each step exchanges a flag during its computation. Before the first step
    nothing is to be saved, and a signal ends the process."""

    def __init__(self, mesh: Any, signals: tuple[signal.Signals, ...]):
        self._group, self._size = own_group(mesh, "interruptions"), mesh.size
        self._signals, self.signal = signals, 0

    def _ask(self, number: int, _: object) -> None:
        self.signal = number

    def begin(self) -> None:
        """Begin to exchange the flag."""
        for number in self._signals:
            signal.signal(number, self._ask)
        self._flag = torch.tensor([self.signal], dtype=torch.int32)
        self._work = None
        if self._size > 1:
            self._work = dist.all_reduce(
                self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True
            )

    def agreed(self) -> int:
        """Return a signal that a rank had received before the exchange; else 0."""
        if self._work is not None:
            position.begin()
            self._work.wait()
            position.complete()
        return int(self._flag)
