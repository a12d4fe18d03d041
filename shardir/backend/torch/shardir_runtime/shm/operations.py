"""Operations of the backend `shm` that have started, and waits for them.

While a rank waits in one operation it goes on with all others that it has started, so that no rank
waits for one that waits for something else.
"""

import select
import threading
import time
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .links import Links

Steps = Generator[int, None, Any]
"""The steps of an operation: yields the rank that it waits for, until there is a message of it."""

_unfinished: dict["Operation", None] = {}
"""The operations of this process that have started and not ended, in their order."""


class Operation:
    """An operation that has started.

    Attributes:
        awaited: the rank that it waits for; None at its end.
        error: what has ended it, if anything has.
    """

    def __init__(self, by: "Operations", kind: str, steps: Steps, results: Sequence[Tensor]):
        self.by, self.kind, self.results = by, kind, results
        self.awaited: int | None = by.index
        self.error: Exception | None = None
        self._steps = steps
        _unfinished[self] = None

    def advance(self) -> None:
        """Go on until a message that has not come, without gradients."""
        if self.awaited is None:
            return
        recorded = torch.is_grad_enabled()
        if recorded:
            torch.set_grad_enabled(False)
        try:
            self.awaited = next(self._steps)
        except StopIteration:
            self.end()
        except Exception as error:
            self.end(error)
        except BaseException:
            self.end(RuntimeError(f"{self.kind} was interrupted"))
            raise
        finally:
            if recorded:
                torch.set_grad_enabled(True)

    def end(self, error: Exception | None = None) -> None:
        """Note that it has ended."""
        self.awaited, self.error = None, error
        _unfinished.pop(self, None)


class OperationHandle(dist.Work):
    """The handle of an operation, which ends also if the handle is dropped."""

    def __init__(self, operation: Operation):
        super().__init__()
        self._operation = operation

    def __del__(self) -> None:
        if self._operation.awaited is not None:
            self._operation.by.dropped.append(self._operation)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end.

        Raises:
            RuntimeError: another rank has ended, did not come in time, or calls something else.
        """
        operation = self._operation
        if operation.awaited is not None:
            operation.by.finish(operation, timeout.total_seconds())
        if operation.error is not None:
            raise operation.error
        return True

    def is_completed(self) -> bool:
        """Whether it has ended; it goes on if it can."""
        operation = self._operation
        if operation.awaited is not None:
            operation.by.progress(0.0)
        return operation.awaited is None

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self.is_completed() and self._operation.error is None

    def exception(self) -> Exception | None:
        """Return its error."""
        return self._operation.error

    def synchronize(self) -> None:
        """Wait for the end."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Return the tensors that it fills, after its end."""
        self.wait()
        return list(self._operation.results)

    def get_future(self) -> Any:
        """Return a future that is done: no thread could end it later."""
        future = torch.futures.Future()
        future.set_result(self.result())
        return future


class Operations:
    """The operations of a group.

    Attributes:
        index: of this rank in the group.
        dropped: those whose handles are gone.

    Args:
        seconds: the longest wait for another rank.
    """

    def __init__(self, links: Links, seconds: float):
        self.links, self.index, self.seconds = links, links.index, seconds
        self.lock = threading.RLock()
        self.dropped: list[Operation] = []

    def start(
        self, kind: str, steps: Steps, results: Sequence[Tensor] = (),
        awaited: tuple[int, Any] | None = None,
    ) -> OperationHandle:  # fmt: skip
        """Start an operation: run its steps until it waits.

        Args:
            awaited: the rank, and the key, of the message that it waits for first. Where that has
                not come nothing is to be run.
        """
        with self.lock:
            if self.dropped or self.links.backlog:
                self.progress(0.0)
                self.dropped = [other for other in self.dropped if other.awaited is not None]
            operation = Operation(self, kind, steps, results)
            if awaited is None or awaited[1] in self.links.inbox[awaited[0]]:
                operation.advance()
            else:
                operation.awaited = awaited[0]
            return OperationHandle(operation)

    def finish(self, operation: Operation, seconds: float = 0.0) -> None:
        """Wait for the end of an operation, for so long; 0: as long as the group may."""
        seconds = seconds if seconds > 0 else self.seconds
        with self.lock:
            until = time.monotonic() + seconds
            operation.advance()
            while (peer := operation.awaited) is not None:
                left = until - time.monotonic()
                if left <= 0:
                    rank = self.links.ranks[peer]
                    about = f"{operation.kind} timed out: waited for rank {rank} for {seconds:g} s"
                    operation.end(RuntimeError(about))
                elif len(_unfinished) == 1 and not self.links.backlog and left >= self.links.wake:
                    self.links.receive(peer)
                    operation.advance()
                else:
                    self.progress(left)

    def progress(self, seconds: float) -> None:
        """Go on with all operations of this process, for which there is a message within so long.

        Groups that another thread is in are left to it.
        """
        others = dict.fromkeys(operation.by for operation in list(_unfinished))
        groups = [self, *(other for other in others if other is not self and other.is_free())]
        if len(groups) == 1:
            if self.lock.acquire(blocking=False):
                try:
                    self.advance(self.links.ready(seconds))
                finally:
                    self.lock.release()
            return
        ready = _ready([group.links for group in groups], seconds)
        for group in groups:
            if group.lock.acquire(blocking=False):
                try:
                    group.advance(ready.get(group.links, ()))
                finally:
                    group.lock.release()

    def is_free(self) -> bool:
        """Whether no other thread is in it."""
        free = self.lock.acquire(blocking=False)
        if free:
            self.lock.release()
        return free

    def advance(self, peers: Sequence[int]) -> None:
        """Take and send what the sockets to some ranks are ready for, and go on."""
        for peer in peers:
            self.links.progress(peer)
        for operation in list(_unfinished):
            if operation.by is self:
                operation.advance()

    def leave(self) -> None:
        """Send what is left to send, and close the links."""
        with self.lock:
            until = time.monotonic() + self.seconds
            while self.links.backlog and (left := until - time.monotonic()) > 0:
                self.advance(_ready([self.links], left).get(self.links, ()))
            self.links.close()


def _ready(links: Sequence[Links], seconds: float) -> dict[Links, list[int]]:
    """Return the ranks whose sockets have a message, or take one, once there is one within so
    long."""
    poll, by_file = select.poll(), dict[int, tuple[Links, int]]()
    for each in links:
        by_file |= each.register(poll)
    wake = min([seconds, *(each.wake for each in links)])
    found = dict[Links, list[int]]()
    for file, _ in poll.poll(1000 * max(0.0, wake)):
        each, peer = by_file[file]
        found.setdefault(each, []).append(peer)
    return found
