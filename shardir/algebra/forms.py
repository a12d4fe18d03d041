"""The seconds of a collective, by the alpha-beta model, for each form that libraries implement.

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
messages of an all-to-all overlap: it has as many latencies as Bruck's algorithm has rounds (1997).

In these forms a group over several levels moves all bytes over the outermost links. A hierarchical
form moves fewer: its all-reduce is a reduce-scatter within the inner unit, an all-reduce of the
shards across units, and an all-gather within; its all-gather is one across units, then one within.

The planner, the search and the reports price by these forms.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from shardir.algebra.cluster import Level
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.traffic import within


class Form(NamedTuple):
    """A form of a collective: the seconds of its latencies, and the seconds of a byte."""

    name: str
    latency: float
    rate: float

    def seconds(self, size: float) -> float:
        """Return the seconds of `size` bytes."""
        return self.latency + self.rate * size


Forms = tuple[Form, ...]

NO_COMMUNICATION: Forms = (Form("", 0.0, 0.0),)
"""The forms of a step that does not communicate."""

Levels = tuple[tuple[int, Level], ...]
"""The levels that a group spans, innermost first: the number of units, and their links."""


@lru_cache(maxsize=65536)
def levels_of(mesh: Mesh, axes: Axes) -> Levels:
    """Return the levels that a group over `axes` spans."""
    sub_axes = mesh.cut(axes, mesh.level_sub_axes)
    levels, devices = [], 1
    for i, level in enumerate(mesh.cluster_or_default.levels):
        near = mesh.extent(tuple(within(mesh, i, sub_axes)))
        if near > devices:
            levels.append((near // devices, level))
        devices = near
    return tuple(levels)


@lru_cache(maxsize=65536)
def forms_of(kind: str, forms: Callable[[Levels], Forms], mesh: Mesh, axes: Axes) -> Forms:
    """Return the forms of a kind of collective over `axes` that are fastest for some size, with the
    cluster's ratios for the kind and its seconds of a call."""
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
    """Return the Pareto front of forms: by ascending latency and descending rate."""
    front: list[Form] = []
    for form in sorted(forms, key=lambda f: (f.latency, f.rate)):
        if not front or form.rate < front[-1].rate:
            front.append(form)
    return tuple(front)


def copying(size: float, mesh: Mesh) -> float:
    """Return the seconds in which a device reads and writes `size` bytes of its memory."""
    speed = mesh.cluster_or_default.memory_bandwidth
    return 2 * size / speed if speed else 0.0


# ---- the forms of each kind of collective, for a group that spans `levels` ----


@lru_cache(maxsize=4096)
def all_reduce(levels: Levels) -> Forms:
    """Rates are for a byte of the operand."""
    n, links = _flat(levels)
    around, deep, byte = 2 * (n - 1), 2 * rounds(n), 1 / links.bandwidth
    forms = [
        Form("ring", around * links.latency, around / n * byte),
        Form("tree", deep * links.latency, 2 * byte),
    ]
    if n & (n - 1) == 0:
        forms.append(Form("halving", deep * links.latency, around / n * byte))
    if len(levels) > 1:
        inner, outer = levels[:1], levels[1:]
        forms += [
            Form("hierarchical", 2 * near.latency + far.latency,
                 2 * near.rate + far.rate / inner[0][0])
            for near in all_gather(inner) for far in all_reduce(outer)
        ]  # fmt: skip
    return tuple(forms)


@lru_cache(maxsize=4096)
def all_gather(levels: Levels) -> Forms:
    """Rates are for a byte of the result; of a reduce-scatter, of the operand."""
    n, links = _flat(levels)
    rate = (n - 1) / n / links.bandwidth
    forms = [Form("ring", (n - 1) * links.latency, rate)]
    if n & (n - 1) == 0:
        forms.append(Form("doubling", rounds(n) * links.latency, rate))
    if len(levels) > 1:
        inner, outer = levels[:1], levels[1:]
        forms += [
            Form("hierarchical", near.latency + far.latency, near.rate + far.rate / inner[0][0])
            for near in all_gather(inner) for far in all_gather(outer)
        ]  # fmt: skip
    return tuple(forms)


def broadcast(levels: Levels) -> Forms:
    """Rates are for a byte of the operand."""
    n, links = _flat(levels)
    return (Form("tree", rounds(n) * links.latency, 1 / links.bandwidth),)


def gather(levels: Levels) -> Forms:
    """Rates are for a byte of the root's result; of a scatter, of the root's operand."""
    n, links = _flat(levels)
    return (Form("tree", rounds(n) * links.latency, (n - 1) / n / links.bandwidth),)


def pairwise(levels: Levels) -> Forms:
    """Rates are for a second of the bytes that a device receives over the links of all levels."""
    n, links = _flat(levels)
    return (Form("direct", rounds(n) * links.latency, 1.0),)


def direct(levels: Levels) -> Forms:
    """Rates are for a byte that a device receives from one other device."""
    _, links = _flat(levels)
    return (Form("direct", links.latency, 1 / links.bandwidth),)


def _flat(levels: Levels) -> tuple[int, Level]:
    """Return the number of devices of a group, and the outermost level that it crosses."""
    n = 1
    for count, _ in levels:
        n *= count
    return n, levels[-1][1]


def rounds(n: int) -> int:
    """Return ceil(log2 n)."""
    return (n - 1).bit_length()
