"""The mesh of an emitted program, as a rank sees it: shards, coordinates and groups."""

import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..plan.axes import Sized
from . import position

Axis = str | tuple[str, int, int]
Axes = tuple[Axis, ...]


# ---- shards ----------------------------------------------------------------------------------


def shard_size(total: int, count: int) -> int:
    """Return the size of the largest shard, which all but the last shards have."""
    return -(-total // count)


def bounds(total: int, count: int, index: int) -> tuple[int, int]:
    """Return the range [start, stop) of shard `index` of `total` elements in `count` shards."""
    size = shard_size(total, count)
    return min(index * size, total), min((index + 1) * size, total)


def name_of(axes: Axes) -> str:
    """Return the name of a process group, in torch's flight recorder and elsewhere: `dp, tp:(2)4`,
    where tp is seen as [2, 4, rest]."""
    return ", ".join(axis if isinstance(axis, str) else "{}:({}){}".format(*axis) for axis in axes)


# ---- the mesh --------------------------------------------------------------------------------


class Group:
    """The ranks that communicate with this one over some axes."""

    def __init__(self, ranks: Sequence[int], rank: int, process_group: Any):
        self.ranks = tuple(ranks)  # in the order of the axes as listed
        self.size = len(self.ranks)
        self.index = self.ranks.index(rank)
        self.process_group = process_group
        # torch orders the ranks of a group by number: order[i] is the index of our member i.
        by_number = sorted(self.ranks)
        self.order = tuple(by_number.index(r) for r in self.ranks)
        self.in_order = by_number == list(self.ranks)


class Mesh:
    """The mesh and this rank's position in it: rank = row-major index over the named axes.

    Args:
        timeout: the longest wait in a process group; None for torch's own.
    """

    def __init__(
        self, axes: Sequence[tuple[str, int]], rank: int = 0, device: Any = "cpu",
        timeout: timedelta | None = None,
    ):  # fmt: skip
        self.timeout = timeout
        self.axes = {name: size for name, size in axes}
        self.size = math.prod(self.axes.values())
        self.rank = rank
        self.device = torch.device(device)
        self._step = {}  # by axis: the difference in rank of neighbours along it
        step = self.size
        for name, size in self.axes.items():
            step //= size
            self._step[name] = step
        self._groups: dict[Axes, Group] = {}
        self._process_groups: dict[tuple, Any] = {}  # by the partition of all ranks
        self._channels: dict[tuple[int, int], Any] = {}  # by sender and receiver
        self._sends: deque = deque()  # unfinished sends: the work, and the tensor it reads
        self._to_self: dict[tuple, deque] = {}  # the values that this rank has sent to itself

    def _size_and_step(self, axis: Axis) -> tuple[int, int]:
        name, pre, size = (axis, 1, self.axes[axis]) if isinstance(axis, str) else axis
        return size, self._step[name] * (self.axes[name] // (pre * size))

    def count(self, axes: Axes) -> int:
        """Return the number of ranks in a group over these axes."""
        return math.prod(self._size_and_step(axis)[0] for axis in axes)

    def index(self, axes: Axes) -> int:
        """Return this rank's position in its group over these axes."""
        position = 0
        for size, step in map(self._size_and_step, axes):
            position = position * size + self.rank // step % size
        return position

    def bounds(self, total: int, axes: Axes, rank: int | None = None) -> tuple[int, int]:
        """Return the range that a rank, by default this one, holds of a dimension of size `total`
        that these axes split."""
        index = self.index(axes) if rank is None else self.members(axes, rank).index(rank)
        if isinstance(axes, Sized):
            start = sum(axes.sizes[:index])
            return start, start + axes.sizes[index]
        return bounds(total, self.count(axes), index)

    def members(self, axes: Axes, rank: int) -> list[int]:
        """Return the ranks that differ from `rank` only in these axes, in the axes' order."""
        sizes_steps = [self._size_and_step(axis) for axis in axes]
        base = rank - sum(rank // step % size * step for size, step in sizes_steps)
        offsets = ([k * step for k in range(size)] for size, step in sizes_steps)
        return [base + sum(offset) for offset in itertools.product(*offsets)]

    def group(self, axes: Axes) -> Group:
        """Return this rank's group. All ranks must create a new group together, as main() does."""
        found = self._groups.get(axes)
        if found is None:
            ranks = self.members(axes, self.rank)
            process_group = self._process_group(axes) if len(ranks) > 1 else None
            found = self._groups[axes] = Group(ranks, self.rank, process_group)
        return found

    def _process_group(self, axes: Axes) -> Any:
        """Return the process group over these axes. Each rank creates all of them, in one order,
        as torch requires."""
        partition = tuple(sorted({tuple(sorted(self.members(axes, r))) for r in range(self.size)}))
        if len(partition) == 1:
            return dist.group.WORLD
        if partition not in self._process_groups:
            made = [self._new_group(ranks, name_of(axes)) for ranks in partition]
            mine = next(g for g, ranks in zip(made, partition, strict=True) if self.rank in ranks)
            self._process_groups[partition] = self._connect_group(mine)
        return self._process_groups[partition]

    def _new_group(self, ranks: Iterable[int], name: str) -> Any:
        # Without a timeout a group has torch's default, not the world group's.
        return dist.new_group(list(ranks), timeout=self.timeout, group_desc=name)

    def _connect_group(self, process_group: Any) -> Any:
        """Run a first collective, in which NCCL connects the group, while all ranks are here."""
        if self.device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=self.device), group=process_group)
        return process_group

    def connect(self, axes: Axes, source: int, target: int) -> None:
        """Make and connect the channels from one position to another in each group over these axes.
        All ranks must make new channels together, as main() does.

        A channel is a process group for the messages from one rank to another. NCCL runs the
        transfers of a process group in order: in a group of all ranks, or of both directions, a
        send would wait for a receive that its rank has posted before. On CPUs transfers run in any
        order: there all channels are the world group, whose ranks are connected already.
        """
        groups = sorted({tuple(self.members(axes, rank)) for rank in range(self.size)})
        for ends in ((ranks[source], ranks[target]) for ranks in groups):
            if self.device.type == "cpu" or dist.get_backend() == "gloo":
                self._channels[ends] = dist.group.WORLD
            elif ends not in self._channels:
                made = self._new_group(ends, f"{ends[0]} to {ends[1]}")
                self._channels[ends] = made
                first = torch.zeros(1, device=self.device)
                if self.rank == ends[0]:
                    dist.send(first, ends[1], group=made)
                elif self.rank == ends[1]:
                    dist.recv(first, ends[0], group=made)

    def channel(self, source: int, target: int) -> Any:
        """Return the process group of messages from `source` to `target`."""
        return self._channels[source, target]

    def hold(self, sends: Iterable[tuple[Any, torch.Tensor]]) -> None:
        """Hold tensors until `wait`, each with the work that sends it, or None."""
        self._sends += [send for send in sends if send[0] is not None]

    def wait(self) -> None:
        """Wait until all messages of this rank are sent."""
        if not self._channels:
            return
        position.begin()
        while self._sends:
            self._sends.popleft()[0].wait()
        position.complete()
