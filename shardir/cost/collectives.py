"""How long a collective takes: alpha-beta, of the quickest of the forms that libraries have.

A message takes `latency` and its bytes / `bandwidth` of the level that it crosses. Of n devices,
with B bytes on each before an all-reduce, after an all-gather, or before a reduce-scatter:

    all-reduce     ring           2 (n - 1) (a + B / (n b))
                   tree           2 ceil(log2 n) a + 2 B / b
                   halving        2 log2 n a + 2 (n - 1) / n B / b  n a power of two
    all-gather,    ring           (n - 1) (a + B / (n b))
    reduce-scatter doubling       log2 n a + (n - 1) / n B / b      n a power of two
    broadcast      tree           ceil(log2 n) a + B / b
    gather,        tree           ceil(log2 n) a + (n - 1) / n B / b
    scatter
    all-to-all     direct         ceil(log2 n) a + what a device receives from each level / its b
    others         direct         a + what a device receives / b

Rings: Patarasuk and Yuan, 2009. Doubling, and halving (an all-reduce by both): Thakur, Rabenseifner
and Gropp, 2005. The tree is the pipelined double binary one of Sanders, Speck and Traeff, 2009. An
all-to-all's messages overlap: it waits for as many latencies as Bruck's has rounds (1997). A group
of several levels crosses the outermost with all of it in these; hierarchical forms do within each
inner unit first what makes the rest smaller: an all-reduce is a reduce-scatter within the unit, an
all-reduce of the parts across units, an all-gather within; an all-gather first goes across, then
within.
"""

from shardir.algebra.cluster import Level
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.steps import NOTHING, Form
from shardir.algebra.traffic import within

Levels = tuple[tuple[int, Level], ...]
"""How many units of each level a group spans, innermost first, and the links between them."""

Forms = tuple[Form, ...]


def levels_of(mesh: Mesh, axes: Axes) -> Levels:
    """The levels that a group over `axes` spans."""
    sub_axes = mesh.cut(axes, mesh.level_sub_axes)
    found, reached = [], 1
    for i, level in enumerate(mesh.cluster_or_default.levels):
        near = mesh.extent(tuple(within(mesh, i, sub_axes)))
        if near > reached:
            found.append((near // reached, level))
        reached = near
    return tuple(found)


def quickest(forms: Forms, size: float) -> Form:
    """The form that takes least for so many bytes."""
    return min(forms, key=lambda form: form.seconds(size))


def worth(forms: Forms) -> Forms:
    """Those that are the quickest for some size: by latency, each with a lower rate."""
    found: list[Form] = []
    for form in sorted(forms, key=lambda f: (f.latency, f.rate)):
        if not found or form.rate < found[-1].rate:
            found.append(form)
    return tuple(found)


def all_reduce(levels: Levels) -> Forms:
    """By the bytes on each device."""
    if not levels:
        return NOTHING
    n, link = _flat(levels)
    around, deep, each = 2 * (n - 1), 2 * rounds(n), 1 / link.bandwidth
    found = [
        Form("ring", around * link.latency, around / n * each),
        Form("tree", deep * link.latency, 2 * each),
    ]
    if n & (n - 1) == 0:
        found.append(Form("halving", deep * link.latency, around / n * each))
    if len(levels) > 1:
        inner, outer = levels[:1], levels[1:]
        found += [
            Form("hierarchical", 2 * near.latency + far.latency,
                 2 * near.rate + far.rate / inner[0][0])
            for near in all_gather(inner) for far in all_reduce(outer)
        ]  # fmt: skip
    return tuple(found)


def all_gather(levels: Levels) -> Forms:
    """By the bytes on each device behind it; a reduce-scatter of as many takes as long."""
    if not levels:
        return NOTHING
    n, link = _flat(levels)
    rate = (n - 1) / n / link.bandwidth
    found = [Form("ring", (n - 1) * link.latency, rate)]
    if n & (n - 1) == 0:
        found.append(Form("doubling", rounds(n) * link.latency, rate))
    if len(levels) > 1:
        inner, outer = levels[:1], levels[1:]
        found += [
            Form("hierarchical", near.latency + far.latency, near.rate + far.rate / inner[0][0])
            for near in all_gather(inner) for far in all_gather(outer)
        ]  # fmt: skip
    return tuple(found)


def broadcast(levels: Levels) -> Forms:
    """By the bytes on each device."""
    if not levels:
        return NOTHING
    n, link = _flat(levels)
    return (Form("tree", rounds(n) * link.latency, 1 / link.bandwidth),)


def gather(levels: Levels) -> Forms:
    """By the bytes on the root behind it; a scatter of as many takes as long."""
    if not levels:
        return NOTHING
    n, link = _flat(levels)
    return (Form("tree", rounds(n) * link.latency, (n - 1) / n / link.bandwidth),)


def direct(levels: Levels) -> Forms:
    """By the bytes that each device receives from one other."""
    if not levels:
        return NOTHING
    _, link = _flat(levels)
    return (Form("direct", link.latency, 1 / link.bandwidth),)


def _flat(levels: Levels) -> tuple[int, Level]:
    """The devices of a group, and the outermost links that it crosses."""
    n = 1
    for count, _ in levels:
        n *= count
    return n, levels[-1][1]


def rounds(n: int) -> int:
    """ceil(log2 n)"""
    return (n - 1).bit_length()
