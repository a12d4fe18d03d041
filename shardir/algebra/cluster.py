"""Clusters: the memory and the speed of a device, and the links between devices.

    levels [node = 8 {bandwidth = 4.5e+11, latency = 3e-06},
            pod = 4 {bandwidth = 5e+10, latency = 2e-05}],
    memory = 80000000000 {bandwidth = 3.35e+12}, flops {bf16 = 9.89e+14, f32 = 6.7e+13},
    operands {f32 = 1e+12}, overhead = 4e-06, interference = 0.1, occupancy = 0.1, skew = 0.0001,
    call = 1e-06, packing = 1e-06, collectives {all_reduce = 0.8}, bytes {all_reduce = 1.5},
    ops {nn.gelu = 1.2}, host {bandwidth = 2.5e+10, latency = 1e-05}

A level is a kind of unit: a node of 8 devices, a pod of 4 nodes. Neighbouring ranks share a unit of
the innermost level. Devices communicate over the links of the innermost level of which they share a
unit. Each device has a link of its own to the memory of its host.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import inf
from operator import mul
from typing import NamedTuple

from shardir.backend.torch.shardir_runtime.plan import arrays
from shardir.diagnostics import ShardirError, coded

BYTES = {name: arrays.BYTES[name] for name in ("f64", "f32", "bf16", "f16", "i64", "i32", "i1")}
"""The element types of the IR, with the bytes of an element."""


class Level(NamedTuple):
    """A kind of unit.

    Attributes:
        count: units of the level below in a unit; devices for the innermost level.
        bandwidth: bytes/s that a device receives over the links of a unit.
        latency: of a message over these links, in seconds.
    """

    name: str
    count: int
    bandwidth: float
    latency: float

    def __str__(self) -> str:
        return (
            f"{self.name} = {self.count} "
            f"{{bandwidth = {_number(self.bandwidth)}, latency = {_number(self.latency)}}}"
        )


class HostLink(NamedTuple):
    """The link of a device to the memory of its host: bytes/s of a copy in one direction, and its
    latency in seconds."""

    bandwidth: float
    latency: float


HOST_LINK = HostLink(2.5e10, 1e-5)
"""The link of a cluster that declares none: 16 lanes of PCIe 4.0, 31.5 GB/s, of which copies of
pinned memory reach about 25 GB/s. The latency is an estimate."""


class TimeRatios(dict[str, float]):
    """Ratios by kind of collective or op; 1 for a missing kind."""

    def __missing__(self, kind: str) -> float:
        return 1.0


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal devices.

    Args:
        levels: innermost to outermost.
        memory: of a device, in bytes; None if unknown.
        flops: flop/s by element type.
        memory_bandwidth: bytes/s, reads and writes together; None if unknown.
        overhead: seconds of an op besides its work.
        interference: the share of the seconds of a collective's bytes that a device loses if it
            computes beside the collective; 1 as if it waited.
        collectives: by kind, the ratio of its seconds to the formulas' (forms.py), if not 1.
        bytes: by kind, the ratio of the seconds of its bytes, if not that of `collectives`.
        ops: by the name of an op, the ratio of its seconds to the roofline's, if not 1.
        host: the link of a device to its host; HOST_LINK if None.
        operands: by element type, bytes/s of the operands and results of a product, whose seconds
            add to those of its flops; the roofline holds for a missing type.
        occupancy: the share of a collective's latencies in which the device itself works, and which
            it loses even if it computes beside the collective: o of 2 o + L in LogP (Culler et al.,
            1993).
        skew: seconds; after c seconds of computation without waiting for each other, the begins of
            devices have a standard deviation of sqrt(skew c).
        call: seconds of a collective besides its messages.
        packing: seconds, besides its bytes, of each op (copy or view) that moves a value into or
            out of a buffer of several values.
        error: the median relative error of times that are predicted with it; None if it was not
            measured.
    """

    levels: tuple[Level, ...]
    memory: int | None = None
    flops: tuple[tuple[str, float], ...] = ()
    memory_bandwidth: float | None = None
    overhead: float = 0.0
    interference: float = 0.0
    collectives: tuple[tuple[str, float], ...] = ()
    ops: tuple[tuple[str, float], ...] = ()
    host: HostLink | None = None
    operands: tuple[tuple[str, float], ...] = ()
    skew: float = 0.0
    occupancy: float = 0.0
    bytes: tuple[tuple[str, float], ...] = ()
    call: float = 0.0
    packing: float = 0.0
    error: float | None = None

    def __post_init__(self) -> None:
        """Raise ShardirError for a figure out of range."""
        for level in self.levels:
            if level.count < 1 or not _positive(level.bandwidth) or not 0 <= level.latency < inf:
                raise ShardirError(
                    f"expected level {level.name} to have at least one unit, a positive bandwidth "
                    f"and no negative latency, both finite, got {level}; give B/s and s"
                )
        if self.memory is not None and self.memory < 1:
            raise ShardirError(f"expected a memory of at least 1 B, got {self.memory}; give bytes")
        for name, number in (
            ("memory bandwidth", 1.0 if self.memory_bandwidth is None else self.memory_bandwidth),
            *((f"rate of {name}", number) for name, number in self.flops),
            *((f"rate of operands in {name}", number) for name, number in self.operands),
            *((f"ratio of {name}", number) for name, number in self.collectives + self.ops),
            *((f"ratio of the bytes of {name}", number) for name, number in self.bytes),
            ("bandwidth of the host's link", self.host_link.bandwidth),
        ):
            if not _positive(number):
                raise ShardirError(
                    f"expected a positive, finite {name}, got {number}; give B/s, flop/s or a ratio"
                )
        for name, seconds in (
            ("overhead", self.overhead),
            ("latency of the host's link", self.host_link.latency),
            ("skew", self.skew),
            ("time of a call", self.call),
            ("time of packing", self.packing),
        ):
            if not 0 <= seconds < inf:
                raise ShardirError(
                    f"expected a finite {name}, 0 or more, got {seconds}; give seconds"
                )
        if self.error is not None and not 0 <= self.error < inf:
            raise ShardirError(
                f"expected a finite error of predictions, 0 or more, got {self.error}; give a share"
            )
        for name, share in (("interference", self.interference), ("occupancy", self.occupancy)):
            if not 0 <= share <= 1:
                raise ShardirError(f"expected an {name} from 0 to 1, got {share}; give a share")

    def __str__(self) -> str:
        parts = [f"levels [{', '.join(map(str, self.levels))}]"]
        if self.memory is not None:
            rate = self.memory_bandwidth
            speed = "" if rate is None else f" {{bandwidth = {_number(rate)}}}"
            parts.append(f"memory = {self.memory}{speed}")
        if self.flops:
            parts.append(f"flops {{{_numbers(self.flops)}}}")
        if self.operands:
            parts.append(f"operands {{{_numbers(self.operands)}}}")
        if self.overhead:
            parts.append(f"overhead = {_number(self.overhead)}")
        if self.interference:
            parts.append(f"interference = {_number(self.interference)}")
        if self.occupancy:
            parts.append(f"occupancy = {_number(self.occupancy)}")
        if self.skew:
            parts.append(f"skew = {_number(self.skew)}")
        if self.call:
            parts.append(f"call = {_number(self.call)}")
        if self.packing:
            parts.append(f"packing = {_number(self.packing)}")
        if self.collectives:
            parts.append(f"collectives {{{_numbers(self.collectives)}}}")
        if self.bytes:
            parts.append(f"bytes {{{_numbers(self.bytes)}}}")
        if self.ops:
            parts.append(f"ops {{{_numbers(self.ops)}}}")
        if self.host is not None:
            parts.append(f"host {{{_numbers(tuple(self.host._asdict().items()))}}}")
        if self.error is not None:
            parts.append(f"error = {_number(self.error)}")
        return ", ".join(parts)

    @cached_property
    def units(self) -> tuple[int, ...]:
        """The number of devices in a unit of each level."""
        return tuple(accumulate((l.count for l in self.levels), mul))

    @cached_property
    def times(self) -> TimeRatios:
        """By kind of collective, the ratio of its seconds to the formulas'."""
        return TimeRatios(self.collectives)

    @cached_property
    def byte_times(self) -> TimeRatios:
        """By kind of collective, the ratio of the seconds of its bytes to the formulas'."""
        return TimeRatios({**self.times, **dict(self.bytes)})

    @property
    def gap(self) -> float:
        """The share of a latency for which a collective in flight holds its links (g of LogP)."""
        return self.occupancy or 1.0

    def lost(self, seconds: float, latency: float) -> float:
        """Return the seconds that a device loses to a collective beside which it computes.

        Args:
            seconds: of the collective, of which `latency` are latencies.
        """
        return self.interference * (seconds - latency) + self.occupancy * latency

    @cached_property
    def op_times(self) -> TimeRatios:
        """By the name of an op, the ratio of its seconds to the roofline's."""
        return TimeRatios(self.ops)

    @cached_property
    def rates(self) -> dict[str, float]:
        """The flop/s of each element type."""
        return dict(self.flops)

    @cached_property
    def operand_rates(self) -> dict[str, float]:
        """The bytes/s of the operands of products, by element type."""
        return dict(self.operands)

    @property
    def host_link(self) -> HostLink:
        """The link of a device to the memory of its host."""
        return self.host or HOST_LINK

    def part(self, devices: int) -> "Cluster":
        """Return the cluster of the first `devices`: full units, and the used part of the next one.

        Raises:
            ShardirError: there are fewer, or they fill no units.
        """
        if devices > self.units[-1]:
            message = f"expected at most the {self.units[-1]} devices of the cluster, got {devices}"
            raise ShardirError(coded("M5", message, use="use fewer devices"))
        levels, left = [], devices
        for level in self.levels:
            count = min(level.count, left)
            if left % count:
                message = (
                    f"expected a number of devices that fills units of the cluster, got {devices}, "
                    f"and a {level.name} holds {level.count}"
                )
                raise ShardirError(coded("M5", message))
            levels.append(level._replace(count=count))
            left //= count
            if left == 1:
                break
        return replace(self, levels=tuple(levels))


def _positive(x: float) -> bool:
    return 0 < x < inf


def _number(x: float) -> str:
    short = f"{x:g}"
    return short if float(short) == x else repr(x)


def _numbers(named: tuple[tuple[str, float], ...]) -> str:
    return ", ".join(f"{n} = {_number(x)}" for n, x in named)


DEFAULT = Cluster(
    # An all-gather of 4 KB on 4 ranks takes about 0.45 ms, by doubling 2 messages; about 1 GB/s go
    # through memory (docs/understand/benchmarks.md). Below 0.2 MB the latency exceeds the time of
    # the bytes.
    levels=(Level("machine", 16, bandwidth=1e9, latency=0.000225),),
    memory=2_000_000_000,
    # one core with AVX2 in f32, half of it in f64; bf16 and f16 are no faster than f32
    flops=(("f64", 2e10), ("f32", 4e10), ("bf16", 4e10), ("f16", 4e10)),
    memory_bandwidth=8e9,
    overhead=5e-6,
    # the cores that compute also move the bytes, so that only latencies are hidden
    interference=1.0,
    # by shard-calibrate on 4 ranks, three times; the others' times are those of the all-gather
    collectives=(("all_reduce", 0.8), ("reduce_scatter", 1.15)),
    # a copy within the memory reads and writes its bytes
    host=HostLink(4e9, 5e-6),
)
"""The ready-made cluster `gloo`: processes on one machine of 2 cores, which share the cores, over
Gloo; rough figures. A mesh without a cluster has its devices."""


@lru_cache(maxsize=64)
def default(devices: int) -> Cluster:
    """Return the cluster of a mesh without one: that many devices of DEFAULT on its one level, of
    unlimited memory."""
    (level,) = DEFAULT.levels
    return replace(DEFAULT, levels=(level._replace(count=devices),), memory=None)
