"""The running operations of the backend `shm`, and waits for them.

A rank that waits in one operation advances all others that it has started, so ranks that wait for
each other in different operations do not deadlock.
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
"""The steps of an operation: a generator that yields the rank that it waits for."""

_unfinished: dict["Operation", None] = {}
"""The running operations of this process, in the order of their starts."""


class Operation:
    """A running operation.

    Attributes:
        awaited: the rank that it waits for; None once it has ended.
        error: the exception that has ended it, if any.
    """

    def __init__(self, by: "Operations", kind: str, steps: Steps, results: Sequence[Tensor]):
        self.by, self.kind, self.results = by, kind, results
        self.awaited: int | None = by.index
        self.error: Exception | None = None
        self._steps = steps
        _unfinished[self] = None

    def advance(self) -> None:
        """Run, without autograd, until a message is missing."""
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
        """Mark the operation as ended."""
        self.awaited, self.error = None, error
        _unfinished.pop(self, None)


class OperationHandle(dist.Work):
    """The handle of an operation. The operation completes even if its handle is dropped."""

    def __init__(self, operation: Operation):
        super().__init__()
        self._operation = operation

    def __del__(self) -> None:
        if self._operation.awaited is not None:
            self._operation.by.dropped.append(self._operation)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end of the operation.

        Raises:
            RuntimeError: another rank has ended, is late, or calls another collective.
        """
        operation = self._operation
        if operation.awaited is not None:
            operation.by.finish(operation, timeout.total_seconds())
        if operation.error is not None:
            raise operation.error
        return True

    def is_completed(self) -> bool:
        """Advance the operation without waiting; return whether it has ended."""
        operation = self._operation
        if operation.awaited is not None:
            operation.by.progress(0.0)
        return operation.awaited is None

    def is_success(self) -> bool:
        """Whether the operation has ended without an error."""
        return self.is_completed() and self._operation.error is None

    def exception(self) -> Exception | None:
        """Return the error of the operation, if any."""
        return self._operation.error

    def synchronize(self) -> None:
        """Wait for the end of the operation."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Return the tensors that it fills, after its end."""
        self.wait()
        return list(self._operation.results)

    def get_future(self) -> Any:
        """Wait, and return a completed future: no thread could complete it later."""
        future = torch.futures.Future()
        future.set_result(self.result())
        return future


class Operations:
    """The operations of a group.

    Attributes:
        index: the index of this rank in the group.
        dropped: the operations whose handles are gone.

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
            awaited: the rank and the key of the first message that it waits for. The steps do not
                start before this message has come.
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
        """Wait for the end of an operation for at most `seconds`; 0: the timeout of the group."""
        seconds = seconds if seconds > 0 else self.seconds
        with self.lock:
            deadline = time.monotonic() + seconds
            operation.advance()
            while (peer := operation.awaited) is not None:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    rank = self.links.ranks[peer]
                    message = (
                        f"{operation.kind} timed out: waited for rank {rank} for {seconds:g} s"
                    )
                    operation.end(RuntimeError(message))
                elif (
                    len(_unfinished) == 1
                    and not self.links.backlog
                    and remaining >= self.links.wake
                ):
                    self.links.receive(peer)
                    operation.advance()
                else:
                    self.progress(remaining)

    def progress(self, seconds: float) -> None:
        """Wait up to `seconds` for a message, and advance all operations of this process.

        Skips groups that another thread has locked.
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
        """Whether no other thread has locked this group."""
        free = self.lock.acquire(blocking=False)
        if free:
            self.lock.release()
        return free

    def advance(self, peers: Sequence[int]) -> None:
        """Receive from and send to ranks whose sockets are ready, then advance all operations."""
        for peer in peers:
            self.links.progress(peer)
        for operation in list(_unfinished):
            if operation.by is self:
                operation.advance()

    def leave(self) -> None:
        """Send the backlog, and close the links."""
        with self.lock:
            deadline = time.monotonic() + self.seconds
            while self.links.backlog and (remaining := deadline - time.monotonic()) > 0:
                self.advance(_ready([self.links], remaining).get(self.links, ()))
            self.links.close()


def _ready(links: Sequence[Links], seconds: float) -> dict[Links, list[int]]:
    """Wait up to `seconds` for sockets to read from or write to; return their ranks by links."""
    poll, by_file = select.poll(), dict[int, tuple[Links, int]]()
    for group in links:
        by_file |= group.register(poll)
    wake = min([seconds, *(group.wake for group in links)])
    ready = dict[Links, list[int]]()
    for file, _ in poll.poll(1000 * max(0.0, wake)):
        group, peer = by_file[file]
        ready.setdefault(group, []).append(peer)
    return ready
