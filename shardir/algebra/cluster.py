"""Clusters: what a device holds and calculates, and what the links between devices carry.

    levels [node = 8 {bandwidth = 4.5e+11, latency = 3e-06},
            pod = 4 {bandwidth = 5e+10, latency = 2e-05}],
    memory = 80000000000 {bandwidth = 3.35e+12}, flops {bf16 = 9.89e+14, f32 = 6.7e+13},
    overhead = 4e-06, interference = 0.1, collectives {all_reduce = 0.8}

A level is a kind of unit: a node of 8 devices, a pod of 4 nodes. Neighbouring ranks share a unit
of the innermost level. Devices that share a node, say, communicate over its links, and otherwise
over those of the first level of which they share a unit.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from shardir.diagnostics import ShardirError

BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "i64": 8, "i32": 4, "i1": 1}
"""What an element takes up."""


class Level(NamedTuple):
    """A kind of unit: how many of the level below (innermost: devices) it holds; what a device
    receives over its links in bytes/s; what a message over them costs besides, in seconds."""

    name: str
    count: int
    bandwidth: float
    latency: float

    def __str__(self) -> str:
        return (
            f"{self.name} = {self.count} "
            f"{{bandwidth = {_number(self.bandwidth)}, latency = {_number(self.latency)}}}"
        )


class Times(dict[str, float]):
    """Factors by kind of collective: 1 of one that nobody states."""

    def __missing__(self, kind: str) -> float:
        return 1.0


@dataclass(frozen=True)
class Cluster:
    """Levels, innermost to outermost; the memory of a device in bytes, None where nobody says;
    flop/s by element type; what a device reads and writes of its memory in bytes/s, None where
    nobody says; what an op costs besides, in seconds; the share of the seconds of a collective's
    bytes that a device loses while it calculates beside it (0: nothing, 1: as if it waited); how
    many times as long as the formulas say a collective takes, by its kind (where nobody says, as
    long)."""

    levels: tuple[Level, ...]
    memory: int | None = None
    flops: tuple[tuple[str, float], ...] = ()
    memory_bandwidth: float | None = None
    overhead: float = 0.0
    interference: float = 0.0
    collectives: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        parts = [f"levels [{', '.join(map(str, self.levels))}]"]
        if self.memory is not None:
            rate = self.memory_bandwidth
            speed = "" if rate is None else f" {{bandwidth = {_number(rate)}}}"
            parts.append(f"memory = {self.memory}{speed}")
        if self.flops:
            parts.append(f"flops {{{_numbers(self.flops)}}}")
        if self.overhead:
            parts.append(f"overhead = {_number(self.overhead)}")
        if self.interference:
            parts.append(f"interference = {_number(self.interference)}")
        if self.collectives:
            parts.append(f"collectives {{{_numbers(self.collectives)}}}")
        return ", ".join(parts)

    @cached_property
    def units(self) -> tuple[int, ...]:
        """How many devices a unit of each level holds."""
        return tuple(accumulate((l.count for l in self.levels), mul))

    @cached_property
    def times(self) -> "Times":
        """How many times as long as the formulas say each kind of collective takes."""
        return Times(self.collectives)

    def part(self, devices: int) -> "Cluster":
        """The first `devices` of it: whole units, and the part of the next one that they fill.

        Raises:
            ShardirError: there are fewer, or they fill no units.
        """
        if devices > self.units[-1]:
            raise ShardirError(f"[M5] the cluster has {self.units[-1]} devices, {devices} are used")
        levels, left = [], devices
        for level in self.levels:
            count = min(level.count, left)
            if left % count:
                raise ShardirError(
                    f"[M5] {devices} devices are no number of whole units of the cluster: a "
                    f"{level.name} holds {level.count} of what is in it"
                )
            levels.append(level._replace(count=count))
            left //= count
            if left == 1:
                break
        return replace(self, levels=tuple(levels))


def _number(x: float) -> str:
    short = f"{x:g}"
    return short if float(short) == x else repr(x)


def _numbers(named: tuple[tuple[str, float], ...]) -> str:
    return ", ".join(f"{n} = {_number(x)}" for n, x in named)


@lru_cache(maxsize=64)
def flat(devices: int) -> Cluster:
    """Where nobody says more: all devices alike, on one link of Gloo's kind. Below about 1 MB its
    collectives take the same time whatever their size; the latency is that of 50,000 f32. Powers
    of two, so that prices are exact."""
    return Cluster((Level("all", devices, 2.0**30, 200_000 / 2**30),))
