"""The time of a collective: alpha-beta, in each of the forms that libraries have.

A message costs the `latency` of the level that it crosses, and its bytes / `bandwidth`. With n
devices, B bytes on each before an all-reduce, after an all-gather, or before a reduce-scatter:

    all-reduce     ring           2 (n - 1) (a + B / (n b))
                   tree           2 ceil(log2 n) a + 2 B / b
                   halving        2 log2 n a + 2 (n - 1) / n B / b  n a power of two
    all-gather,    ring           (n - 1) (a + B / (n b))
    reduce-scatter doubling       log2 n a + (n - 1) / n B / b      n a power of two
    broadcast      tree           ceil(log2 n) a + B / b
    gather,        tree           ceil(log2 n) a + (n - 1) / n B / b
    scatter
    all-to-all,    direct         ceil(log2 n) a + bytes received from each level / its b
    exchange
    others         direct         a + bytes that a device receives / b

Rings: Patarasuk and Yuan, 2009. Doubling, and halving (an all-reduce by both): Thakur, Rabenseifner
and Gropp, 2005. The tree is the pipelined double binary one of Sanders, Speck and Traeff, 2009. The
messages of an all-to-all overlap: its number of latencies is the number of rounds of Bruck (1997).
In these forms a group of several levels moves all bytes over the links of the outermost. In a
hierarchical form less crosses them: an all-reduce is a reduce-scatter within the inner unit, an
all-reduce of the shards across units, and an all-gather within; an all-gather is one across units,
then one within.

The planner, the search and the reports ask these forms, so that they have one price.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from shardir.algebra.cluster import Level
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.traffic import within


class Form(NamedTuple):
    """A form of a collective: the seconds of its latencies, and those of each byte."""

    name: str
    latency: float
    rate: float

    def seconds(self, size: float) -> float:
        """Return the time of `size` bytes."""
        return self.latency + self.rate * size


Forms = tuple[Form, ...]

NO_COMMUNICATION: Forms = (Form("", 0.0, 0.0),)
"""The forms of a step that does not communicate."""

Levels = tuple[tuple[int, Level], ...]
"""The number of units of each level that a group spans, innermost first, and their links."""


@lru_cache(maxsize=65536)
def levels_of(mesh: Mesh, axes: Axes) -> Levels:
    """Return the levels that a group over `axes` spans."""
    sub_axes = mesh.cut(axes, mesh.level_sub_axes)
    found, reached = [], 1
    for i, level in enumerate(mesh.cluster_or_default.levels):
        near = mesh.extent(tuple(within(mesh, i, sub_axes)))
        if near > reached:
            found.append((near // reached, level))
        reached = near
    return tuple(found)


@lru_cache(maxsize=65536)
def forms_of(kind: str, forms: Callable[[Levels], Forms], mesh: Mesh, axes: Axes) -> Forms:
    """Return the forms of a kind of collective over `axes` that are the fastest for some size, with
    the cluster's factor for the kind and its time of a call."""
    levels = levels_of(mesh, axes)
    if not levels:
        return NO_COMMUNICATION
    on = mesh.cluster_or_default
    times, bytes = on.times[kind], on.byte_times[kind]
    fastest = undominated(forms(levels))
    return tuple(Form(f.name, on.call + times * f.latency, bytes * f.rate) for f in fastest)


def fastest(forms: Forms, size: float) -> Form:
    """Return the form of minimum time for `size` bytes."""
    return min(forms, key=lambda form: form.seconds(size))


def undominated(forms: Forms) -> Forms:
    """Return the forms but for those whose latency and rate another has too, or less: by latency,
    each with a lower rate than the one before."""
    found: list[Form] = []
    for form in sorted(forms, key=lambda f: (f.latency, f.rate)):
        if not found or form.rate < found[-1].rate:
            found.append(form)
    return tuple(found)


def copying(size: float, mesh: Mesh) -> float:
    """Return the seconds in which a device writes `size` bytes to its memory and reads them."""
    speed = mesh.cluster_or_default.memory_bandwidth
    return 2 * size / speed if speed else 0.0


# ---- the forms of each kind, for a group that spans these levels ----


@lru_cache(maxsize=4096)
def all_reduce(levels: Levels) -> Forms:
    """By the bytes on each device."""
    n, links = _flat(levels)
    around, deep, each = 2 * (n - 1), 2 * rounds(n), 1 / links.bandwidth
    found = [
        Form("ring", around * links.latency, around / n * each),
        Form("tree", deep * links.latency, 2 * each),
    ]
    if n & (n - 1) == 0:
        found.append(Form("halving", deep * links.latency, around / n * each))
    if len(levels) > 1:
        inner, outer = levels[:1], levels[1:]
        found += [
            Form("hierarchical", 2 * near.latency + far.latency,
                 2 * near.rate + far.rate / inner[0][0])
            for near in all_gather(inner) for far in all_reduce(outer)
        ]  # fmt: skip
    return tuple(found)


@lru_cache(maxsize=4096)
def all_gather(levels: Levels) -> Forms:
    """By the bytes on each device after it; a reduce-scatter costs the same by those before it."""
    n, links = _flat(levels)
    rate = (n - 1) / n / links.bandwidth
    found = [Form("ring", (n - 1) * links.latency, rate)]
    if n & (n - 1) == 0:
        found.append(Form("doubling", rounds(n) * links.latency, rate))
    if len(levels) > 1:
        inner, outer = levels[:1], levels[1:]
        found += [
            Form("hierarchical", near.latency + far.latency, near.rate + far.rate / inner[0][0])
            for near in all_gather(inner) for far in all_gather(outer)
        ]  # fmt: skip
    return tuple(found)


def broadcast(levels: Levels) -> Forms:
    """By the bytes on each device."""
    n, links = _flat(levels)
    return (Form("tree", rounds(n) * links.latency, 1 / links.bandwidth),)


def gather(levels: Levels) -> Forms:
    """By the bytes on the root after it; a scatter costs the same by those before it."""
    n, links = _flat(levels)
    return (Form("tree", rounds(n) * links.latency, (n - 1) / n / links.bandwidth),)


def pairwise(levels: Levels) -> Forms:
    """By the seconds of the bytes that a device receives over the links of all levels."""
    n, links = _flat(levels)
    return (Form("direct", rounds(n) * links.latency, 1.0),)


def direct(levels: Levels) -> Forms:
    """By the bytes that each device receives from one other."""
    _, links = _flat(levels)
    return (Form("direct", links.latency, 1 / links.bandwidth),)


def _flat(levels: Levels) -> tuple[int, Level]:
    """Return the number of devices of a group, and the outermost links that it crosses."""
    n = 1
    for count, _ in levels:
        n *= count
    return n, levels[-1][1]


def rounds(n: int) -> int:
    """ceil(log2 n)"""
    return (n - 1).bit_length()
