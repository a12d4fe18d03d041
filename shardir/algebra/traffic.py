"""Who lacks what: elements counted per device, and by where the nearest device that has them is.

Counting is by dimension. Of a device's new shard, the rows of one dimension that lie on devices
which differ from it along some axes alone are those of the old shards whose other digits are its
own; over dimensions such counts multiply. So nothing is enumerated but the positions along axes
that dimensions share.
"""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, pairwise, product
from math import prod

from shardir.algebra.exchange import exchange_axes
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh, Sized, sizes_of

Counts = tuple[int, ...]


@lru_cache(maxsize=4096)
def _edges(mesh: Mesh, n: int, axes: Axes) -> tuple[int, ...]:
    """Where the shards of a dimension begin, and the end of the last."""
    if sizes := sizes_of(axes):
        return tuple(accumulate(sizes, initial=0))
    return (*(mesh.bounds(n, axes, k)[0] for k in range(mesh.extent(axes))), n)


@lru_cache(maxsize=4096)
def _indices(mesh: Mesh, names: tuple[str, ...], axes: Axes) -> list[int]:
    """The index along `axes` of each position along the whole axes `names`."""
    stride, below = {}, 1
    for name in reversed(names):
        stride[name] = below
        below *= mesh.full(name)
    found = [0] * below
    for a in axes:
        size = mesh.extent((a,))
        step = stride[a.name] * (mesh.full(a.name) // (a.pre * size))
        found = [i * size + p // step % size for p, i in enumerate(found)]
    return found


def _overlap(a: int, b: int, low: int, high: int) -> int:
    return max(0, min(b, high) - max(a, low))


def _rows(edges: Counts, sizes: Counts, free: list[bool], k: int, low: int, high: int) -> int:
    """Rows of [low, high) in the shards whose index differs from k in the free digits alone."""
    m, i = 1, len(sizes)
    while i and free[i - 1]:
        i -= 1
        m *= sizes[i]
    if not any(free[:i]):
        k -= k % m
        return _overlap(edges[k], edges[k + m], low, high)
    total = 0
    ranges = []
    for n, f in zip(reversed(sizes), reversed(free), strict=True):
        ranges.append(range(n) if f else (k % n,))
        k //= n
    for digits in product(*reversed(ranges)):
        j = 0
        for n, digit in zip(sizes, digits, strict=True):
            j = j * n + digit
        total += _overlap(edges[j], edges[j + 1], low, high)
    return total


def _fixed(axes: Axes, free: list[bool]) -> Iterator[Axis]:
    return (a for a, f in zip(axes, free, strict=True) if not f)


def _components(mesh: Mesh, source: Layout, target: Layout) -> list[tuple[set[str], list[int]]]:
    """Dimensions that share no axis, before or after, apart from each other."""
    found: list[tuple[set[str], list[int]]] = []
    for d, (s, t) in enumerate(zip(source.dims, target.dims, strict=True)):
        names, dims = {a.name for a in (*s, *t)}, [d]
        for other in [c for c in found if c[0] & names]:
            found.remove(other)
            names, dims = names | other[0], other[1] + dims
        found.append((names, dims))
    return found


@lru_cache(maxsize=65536)
def shares(
    mesh: Mesh, shape: Shape, source: Layout, target: Layout, free: tuple[frozenset[Axis], ...]
) -> Counter[Counts]:
    """For each device the elements of its new shard; then, for each set of axes in `free`, how many
    of them lie on devices that differ from it along those axes alone. As the distinct tuples, with
    the number of devices for each (up to a common factor)."""
    out: Counter[Counts] = Counter({(1,) * (len(free) + 1): 1})
    for names, dims in _components(mesh, source, target):
        order = tuple(n for n, _ in mesh.axes if n in names)
        columns = []
        for d in dims:
            have, want = source.dims[d], target.dims[d]
            sizes = tuple(mesh.extent((a,)) for a in have)
            before, after = _edges(mesh, shape[d], have), _edges(mesh, shape[d], want)
            masks = [[a in axes for a in have] for axes in free]
            keys = [_indices(mesh, order, tuple(_fixed(have, m))) for m in masks]
            news = _indices(mesh, order, want)
            known: dict[Counts, Counts] = {}
            rows: dict[Counts, int] = {}
            column = []
            for k, new, *key in zip(_indices(mesh, order, have), news, *keys, strict=True):
                found = known.get((new, *key))
                if found is None:
                    low, high = after[new], after[new + 1]
                    held = []
                    for i, m in enumerate(masks):
                        one = i, new, key[i]
                        if one not in rows:
                            rows[one] = _rows(before, sizes, m, k, low, high)
                        held.append(rows[one])
                    found = known[(new, *key)] = (high - low, *held)
                column.append(found)
            columns.append(column)
        here: Counter[Counts] = Counter()
        for cases, count in Counter(zip(*columns, strict=True)).items():
            here[tuple(map(prod, zip(*cases, strict=True)))] += count
        both: Counter[Counts] = Counter()
        for (a, n), (b, m) in product(out.items(), here.items()):
            both[tuple(x * y for x, y in zip(a, b, strict=True))] += n * m
        out = both
    return out


@lru_cache(maxsize=65536)
def within(mesh: Mesh, level: int, digits: Axes) -> frozenset[Axis]:
    """The digits along which devices of one unit of a level differ; of level -1, none."""
    if level < 0:
        return frozenset()
    unit = mesh.wires.units[level]
    return frozenset(a for a in digits if mesh.stride(a) * mesh.extent((a,)) <= unit)


@lru_cache(maxsize=65536)
def fetched(mesh: Mesh, shape: Shape, source: Layout, target: Layout) -> tuple[Counts, ...]:
    """What devices fetch from each level, innermost first, where each takes what it lacks from the
    device that has it and is otherwise at its own place: the distinct cases."""
    source = cut(mesh, source, mesh.level_digits)
    digits = tuple(a for d in source.dims for a in d)
    levels = range(-1, len(mesh.wires.levels) - 1)
    cases = shares(mesh, shape, source, target, tuple(within(mesh, i, digits) for i in levels))
    found = set()
    for total, *held in cases:
        reached = [*held, total]
        found.add(tuple(b - a for a, b in pairwise(reached)))
    return tuple(sorted(found))


def sent(mesh: Mesh, shape: Shape, source: Layout, target: Layout) -> int:
    """The most that a device sends in an exchange: for each device of its group, what that one
    takes from it."""
    axes = mesh.simplify(exchange_axes(source, target))
    target = cut(mesh, target, axes)
    taken = tuple(a for d in target.dims for a in d)
    group = frozenset(a for a in taken if any(mesh.overlap(a, b) for b in axes))
    alike = mesh.extent(axes) // mesh.extent(tuple(group))  # devices that take the same
    cases = shares(mesh, shape, target, source, (frozenset(), group))
    return max(all_of_them * alike - kept for _, kept, all_of_them in cases)


def cut(mesh: Mesh, layout: Layout, digits: Axes) -> Layout:
    """The layout with its axes cut where those of `digits` begin and end."""

    def fine(axes: Axes) -> Axes:
        found, sizes = mesh.cut(axes, digits), sizes_of(axes)
        return Sized(found, sizes) if sizes else found

    partial = tuple(sorted(mesh.cut(layout.partial, digits), key=mesh.order))
    return Layout(layout.mesh, tuple(map(fine, layout.dims))).with_partial(
        partial, layout.reduction
    )
