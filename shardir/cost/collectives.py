"""How long a collective takes: alpha-beta, of the quickest of the forms that libraries have.

A message takes `latency` and its bytes / `bandwidth` of the level that it crosses. Of n devices,
with B bytes on each before an all-reduce, after an all-gather, or before a reduce-scatter:

    all-reduce     ring           2 (n - 1) (a + B / (n b))
                   tree           2 ceil(log2 n) a + 2 B / b
    all-gather,    ring           (n - 1) (a + B / (n b))
    reduce-scatter doubling       log2 n a + (n - 1) / n B / b      n a power of two
    broadcast      tree           ceil(log2 n) a + B / b
    gather,        tree           ceil(log2 n) a + (n - 1) / n B / b
    scatter
    all-to-all     direct         ceil(log2 n) a + what a device receives from each level / its b
    others         direct         a + what a device receives / b

Rings: Patarasuk and Yuan, 2009. Doubling (and halving): Thakur, Rabenseifner and Gropp, 2005. The
tree is the pipelined double binary one of Sanders, Speck and Traeff, 2009. An all-to-all's
messages overlap: it waits for as many latencies as Bruck's has rounds (1997). A group of several
levels crosses the outermost with all of it in these; hierarchical forms do within each inner unit
first what makes the rest smaller: an all-reduce is a reduce-scatter within the unit, an all-reduce
of the parts across units, an all-gather within; an all-gather first goes across, then within.
"""

from typing import NamedTuple

from shardir.algebra.cluster import Level
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.traffic import within

Levels = tuple[tuple[int, Level], ...]
"""How many units of each level a group spans, innermost first, and the wires between them."""


class Form(NamedTuple):
    """A way to do a collective, and its time in seconds."""

    name: str
    seconds: float


NOTHING = Form("", 0.0)


def levels_of(mesh: Mesh, axes: Axes) -> Levels:
    """The levels that a group over `axes` spans."""
    digits = mesh.cut(axes, mesh.level_digits)
    found, reached = [], 1
    for i, level in enumerate(mesh.wires.levels):
        near = mesh.extent(tuple(within(mesh, i, digits)))
        if near > reached:
            found.append((near // reached, level))
        reached = near
    return tuple(found)


def all_reduce(size: float, levels: Levels) -> Form:
    """Of `size` bytes on each device."""
    if not levels:
        return NOTHING
    n, wires = _flat(levels)
    forms = [
        Form("ring", 2 * (n - 1) * (wires.latency + size / n / wires.bandwidth)),
        Form("tree", 2 * rounds(n) * wires.latency + 2 * size / wires.bandwidth),
    ]
    if len(levels) > 1:
        inner, outer = levels[:1], levels[1:]
        parts = all_reduce(size / inner[0][0], outer).seconds
        forms.append(Form("hierarchical", 2 * all_gather(size, inner).seconds + parts))
    return min(forms, key=_seconds)


def all_gather(size: float, levels: Levels) -> Form:
    """To `size` bytes on each device; a reduce-scatter of as many takes as long."""
    if not levels:
        return NOTHING
    n, wires = _flat(levels)
    moving = (n - 1) / n * size / wires.bandwidth
    forms = [Form("ring", (n - 1) * wires.latency + moving)]
    if n & (n - 1) == 0:
        forms.append(Form("doubling", rounds(n) * wires.latency + moving))
    if len(levels) > 1:
        inner, outer = levels[:1], levels[1:]
        parts = all_gather(size / inner[0][0], outer).seconds
        forms.append(Form("hierarchical", parts + all_gather(size, inner).seconds))
    return min(forms, key=_seconds)


def broadcast(size: float, levels: Levels) -> Form:
    """Of `size` bytes."""
    if not levels:
        return NOTHING
    n, wires = _flat(levels)
    return Form("tree", rounds(n) * wires.latency + size / wires.bandwidth)


def gather(size: float, levels: Levels) -> Form:
    """To `size` bytes on the root; a scatter of as many takes as long."""
    if not levels:
        return NOTHING
    n, wires = _flat(levels)
    return Form("tree", rounds(n) * wires.latency + (n - 1) / n * size / wires.bandwidth)


def direct(size: float, levels: Levels) -> Form:
    """Of `size` bytes that each device receives from one other."""
    if not levels:
        return NOTHING
    _, wires = _flat(levels)
    return Form("direct", wires.latency + size / wires.bandwidth)


def _flat(levels: Levels) -> tuple[int, Level]:
    """The devices of a group, and the outermost wires that it crosses."""
    n = 1
    for count, _ in levels:
        n *= count
    return n, levels[-1][1]


def rounds(n: int) -> int:
    """ceil(log2 n)"""
    return (n - 1).bit_length()


def _seconds(form: Form) -> float:
    return form.seconds
