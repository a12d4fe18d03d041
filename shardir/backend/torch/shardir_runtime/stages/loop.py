"""The loop of a rank over the microbatches, as a list of what it does: the same in each step.

What a step would look up is found once: of each run of a part what it reads, and what of that no
later run reads; the receives that are posted before it; where its results go; and which sends are
over then.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ..collectives.mesh import Mesh
from .tables import LoopValue, StagePart, StageTables, ValueKey
from .transfers import STAGE, shard_shape


class LoopReceive(NamedTuple):
    """The post of a receive: the type of this rank's shard, and the rank that sends it."""

    value: LoopValue
    shape: tuple[int, ...]
    dtype: torch.dtype
    peer: int


class LoopTransfer(NamedTuple):
    """A message to or from another rank, and how many earlier sends to that rank are over: after it
    has arrived from there, or before it is sent to there."""

    value: LoopValue
    peer: int
    over: int


class LoopResult(NamedTuple):
    """The readers of a result of a run: other ranks, later runs of this one, sums over the
    microbatches, and the values of all of them."""

    sends: list[LoopTransfer]
    kept: LoopValue | None
    sums: list[str]
    collected: list[str]


class LoopRun(NamedTuple):
    """A part that runs on a microbatch: the receives that are posted before it, those that it waits
    for, what it reads, what of that no later run of this rank reads, and where its results go."""

    part: StagePart
    microbatch: int
    posts: list[LoopReceive]
    arrivals: list[LoopTransfer]
    reads: list[ValueKey]
    drops: list[LoopValue]
    results: list[LoopResult]


class RankLoop:
    """The runs, sends and receives of a rank in the loop, and those after it for its states."""

    def __init__(self, tables: StageTables, mesh: Mesh):
        rank = mesh.index((STAGE,))
        loop = list(tables.loop(rank))
        self.states = tables.kept_states(rank)
        reads = [[tables.key(name, k) for name in part.inputs] for part, k in loop]
        reads.append([*self.states.values()])
        last = {key: i for i, keys in enumerate(reads) for key in keys}
        sums, collected = _by_addend(tables.sums), _by_addend(tables.collected)
        messages = _Messages(tables, mesh, reads)
        self.runs: list[LoopRun] = []
        for i, (part, k) in enumerate(loop):
            posts, arrivals = messages.posts(i), messages.arrivals(i)
            drops = [x for x in {*reads[i]} if isinstance(x, tuple) and last[x] == i]
            results = []
            for name in part.outputs:
                kept = (name, k) if (name, k) in last else None
                sends = messages.sends((name, k))
                results.append(LoopResult(sends, kept, sums[name], collected[name]))
            self.runs.append(LoopRun(part, k, posts, arrivals, reads[i], drops, results))
        self.posts, self.arrivals = messages.posts(len(loop)), messages.arrivals(len(loop))
        """The receives of states after the loop."""
        self.sums = [name for part, _ in loop for x in part.outputs for name in sums[x]]
        read = {key[0] for key in last if isinstance(key, tuple)}
        self.slices = {name: of for name, of in tables.slices.items() if name in read}
        """The arguments whose microbatches parts read, by the names of these."""


def _by_addend(totals: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the totals by what they are of."""
    found: dict[str, list[str]] = defaultdict(list)
    for total, addend in totals.items():
        found[addend].append(total)
    return found


class _Messages:
    """The messages of a rank in the loop, to be asked for in the order of its runs.

    Args:
        reads: what each of them reads, and then what is read after the loop.
    """

    def __init__(self, tables: StageTables, mesh: Mesh, reads: Sequence[Sequence[ValueKey]]):
        self._tables, self._mesh, self._reads = tables, mesh, reads
        self._peers, rank = mesh.members((STAGE,), mesh.rank), mesh.index((STAGE,))
        others = [r for r in range(len(self._peers)) if r != rank]
        coming = {r: tables.sent(r, rank) for r in others}
        self._channels = {r: [message for message, _ in sent] for r, sent in coming.items()}
        """What each other rank sends to this one, in order."""
        self._made_at = {message: i for sent in coming.values() for message, i in sent}
        """The position in the loop of the sender of the part that makes it."""
        self._place = {x: (r, i) for r, sent in self._channels.items() for i, x in enumerate(sent)}
        self._posted: Counter[int] = Counter()
        self._received_at: dict[tuple[LoopValue, int], float] = {}
        """The position in the loop of the receiver by which it has received a message of this rank:
        of the first part there that reads it, or a later message of this rank."""
        for r in others:
            first, at = tables.first_reads(r), math.inf
            for message, _ in reversed(tables.sent(rank, r)):
                at = self._received_at[message, r] = min(at, first.get(message, math.inf))
        self._arrived: set[ValueKey] = set()
        self._sends: dict[int, deque[LoopValue]] = defaultdict(deque)
        """By target, the sends that are not waited for yet."""

    def posts(self, i: int) -> list[LoopReceive]:
        """Return the receives that are posted before a run: of what it and the next one read, and
        of what is sent before that by the same rank."""
        found = []
        ahead = self._reads[i : i + 2] if i + 2 < len(self._reads) else [self._reads[i]]
        for source, last in (self._place[x] for keys in ahead for x in keys if x in self._place):
            for name, k in self._channels[source][self._posted[source] : last + 1]:
                type = self._tables.transfers[name]
                shape = shard_shape(self._mesh, type)
                found.append(LoopReceive((name, k), shape, type.dtype, self._peers[source]))
            self._posted[source] = max(self._posted[source], last + 1)
        return found

    def arrivals(self, i: int) -> list[LoopTransfer]:
        """Return the messages that a run is the first to read. Each proves that its sender has
        received what the parts there have read until it was made: the sends of that are over."""
        found = []
        for message in self._reads[i]:
            if message in self._place and message not in self._arrived:
                self._arrived.add(message)
                source, _ = self._place[message]
                sends, over = self._sends[source], 0
                while sends and self._received_at[sends[0], source] <= self._made_at[message]:
                    sends.popleft()
                    over += 1
                found.append(LoopTransfer(message, self._peers[source], over))
        return found

    def sends(self, message: LoopValue) -> list[LoopTransfer]:
        """Return the sends of what a run makes. Of a value no more than `in_flight` are in flight
        to a rank."""
        found = []
        for target in self._tables.targets(message[0]):
            sends, over = self._sends[target], 0
            same = [i for i, (name, _) in enumerate(sends) if name == message[0]]
            if len(same) >= self._tables.in_flight:
                over = same[0] + 1
            for _ in range(over):
                sends.popleft()
            sends.append(message)
            found.append(LoopTransfer(message, self._peers[target], over))
        return found
