"""Ranks as threads of this process, which exchange tensors in memory: the runtime of programs with
process groups that are simulated.

It is for values, not for time. A collective starts and ends in one call; a receive ends when it is
awaited. An error on one rank ends the others.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardir.backend.torch.shardir_runtime import collectives

SECONDS = 60.0
"""The longest wait of a rank for another one, in seconds."""


class SimulatedWork:
    """A communication in progress."""

    def __init__(self, finish: Callable[[], None] = lambda: None):
        self._finish = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, lambda: None
        finish()

    def is_completed(self) -> bool:
        return True


class SimulatedGroup:
    """A process group: the ranks in the order of their numbers."""

    def __init__(self, world: "World", ranks: Sequence[int]):
        self.world, self.ranks = world, sorted(ranks)
        self.barrier = threading.Barrier(len(self.ranks))
        self.slots: list[Any] = [None] * len(self.ranks)

    @property
    def me(self) -> int:
        return self.ranks.index(self.world.rank)

    def shared(self, value: Any) -> list[Any]:
        """Return the values of all members."""
        self.slots[self.me] = value
        self.barrier.wait(SECONDS)
        values = [*self.slots]
        self.barrier.wait(SECONDS)
        return values

    def send(self, tensors: Sequence[Tensor], member: int, tag: int) -> SimulatedWork:
        return self.world.post(tensors[0], self.ranks[member], self)

    def recv(self, tensors: Sequence[Tensor], member: int, tag: int) -> SimulatedWork:
        return self.world.awaited(tensors[0], self.ranks[member], self)


REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda x: x.sum(0, dtype=x.dtype), dist.ReduceOp.MAX: lambda x: x.amax(0),
    dist.ReduceOp.MIN: lambda x: x.amin(0),
}  # fmt: skip


class World:
    """What the runtime uses of torch.distributed, for ranks that are threads."""

    ReduceOp = dist.ReduceOp

    def __init__(self, size: int):
        self._local = threading.local()
        self._lock = threading.Condition()
        self._groups: dict[tuple[int, ...], SimulatedGroup] = {}
        self._sent: dict[tuple[int, int, int], list[Tensor]] = defaultdict(list)
        self._read: dict[tuple[int, int, int], int] = defaultdict(int)
        self.is_broken = False
        self.WORLD = self.new_group(range(size))

    @property
    def group(self) -> Any:
        return self

    @property
    def rank(self) -> int:
        return self._local.rank

    def join(self, rank: int) -> None:
        """Make this thread a rank."""
        self._local.rank = rank

    def end(self) -> None:
        """End all waits after an error."""
        with self._lock:
            self.is_broken = True
            for group in self._groups.values():
                group.barrier.abort()
            self._lock.notify_all()

    def new_group(self, ranks: Sequence[int], **_: Any) -> SimulatedGroup:
        with self._lock:
            key = tuple(sorted(ranks))
            return self._groups.setdefault(key, SimulatedGroup(self, key))

    def get_backend(self, group: Any = None) -> str:
        return "simulated"

    # ---- messages ----

    def post(self, x: Tensor, to: int, group: SimulatedGroup) -> SimulatedWork:
        with self._lock:
            self._sent[self.rank, to, id(group)].append(x.clone())
            self._lock.notify_all()
        return SimulatedWork()

    def awaited(self, x: Tensor, sender: int, group: SimulatedGroup) -> SimulatedWork:
        key = sender, self.rank, id(group)
        with self._lock:
            number = self._read[key]
            self._read[key] += 1

        def finish() -> None:
            with self._lock:
                sent = self._sent[key]
                is_there = self._lock.wait_for(
                    lambda: self.is_broken or len(sent) > number, SECONDS
                )
                if not is_there or self.is_broken:
                    raise threading.BrokenBarrierError
                x.copy_(sent[number].view_as(x))

        return SimulatedWork(finish)

    def isend(self, x: Tensor, to: int, group: SimulatedGroup) -> SimulatedWork:
        return self.post(x, to, group)

    def irecv(self, x: Tensor, sender: int, group: SimulatedGroup) -> SimulatedWork:
        return self.awaited(x, sender, group)

    # ---- collectives ----

    def all_reduce(
        self, x: Tensor, op: Any, group: SimulatedGroup, async_op: bool = False
    ) -> SimulatedWork:
        x.copy_(REDUCTIONS[op](torch.stack(group.shared(x.clone()))))
        return SimulatedWork()

    def all_to_all_single(
        self, out: Tensor, sent: Tensor, receives: Sequence[int] | None,
        sends: Sequence[int] | None, group: SimulatedGroup, async_op: bool = False,
    ) -> SimulatedWork:  # fmt: skip
        count = len(group.ranks)
        parts = sent.clone().split(list(sends) if sends else sent.shape[0] // count or 1)
        received = [parts[group.me] for parts in group.shared(parts) if parts]
        if received:
            torch.cat(received, out=out)
        return SimulatedWork()

    def broadcast(self, x: Tensor, src: int, group: SimulatedGroup) -> None:
        x.copy_(group.shared(x.clone())[group.ranks.index(src)])

    def gather(self, x: Tensor, outs: list[Tensor] | None, dst: int, group: SimulatedGroup) -> None:
        values = group.shared(x.clone())
        for out, value in zip(outs or (), values, strict=False):
            out.copy_(value)

    def scatter(
        self, out: Tensor, xs: list[Tensor] | None, src: int, group: SimulatedGroup
    ) -> None:
        values = group.shared(None if xs is None else [x.clone() for x in xs])
        out.copy_(values[group.ranks.index(src)][group.me])


def _users() -> Iterator[ModuleType]:
    """Yield the modules of the runtime that communicate."""
    for found in iter_modules(collectives.__path__):
        module = import_module(f"{collectives.__name__}.{found.name}")
        if getattr(module, "dist", None) is not None:
            yield module


_one_at_a_time = threading.Lock()


@contextmanager
def _communicating_by(world: World) -> Iterator[None]:
    with _one_at_a_time:
        before = {module: module.__dict__["dist"] for module in _users()}
        try:
            for module in before:
                module.__dict__["dist"] = world
            yield
        finally:
            for module, own in before.items():
                module.__dict__["dist"] = own


def run_ranks(count: int, call: Callable[[int], Any]) -> list[Any]:
    """Call a function with each rank, all at once; return the results.

    Raises:
        Exception: the first error of a rank.
    """
    world, results = World(count), [None] * count
    errors: list[Exception] = []

    def work(rank: int) -> None:
        world.join(rank)
        try:
            with torch.no_grad():
                results[rank] = call(rank)
        except threading.BrokenBarrierError:
            world.end()
        except Exception as e:
            errors.append(e)
            world.end()

    with _communicating_by(world):
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    if world.is_broken:
        raise RuntimeError(
            f"expected the ranks to make the same collectives, got one that waits for {SECONDS:g} s"
        )
    return results
