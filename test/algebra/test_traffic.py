"""The elements that devices have of their new shards are counted as by hand, device by device, in
memory that grows with the number of devices."""

import itertools
import tracemalloc
from collections import Counter
from fractions import Fraction
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.strategies import meshes, shapes

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axis, Mesh
from shardir.algebra.traffic import sent, shares


def coordinates(mesh: Mesh) -> list[dict[str, int]]:
    """The coordinates of all devices, by axis."""
    each = itertools.product(*(range(n) for _, n in mesh.axes))
    return [dict(zip((name for name, _ in mesh.axes), at, strict=True)) for at in each]


def shard(mesh: Mesh, shape: Shape, layout: Layout, at: dict[str, int]) -> set[tuple[int, ...]]:
    """The elements that a device has, by a layout of full axes."""
    spans = []
    for n, axes in zip(shape, layout.dims, strict=True):
        k = 0
        for a in axes:
            k = k * mesh.extent((a,)) + at[a.name]
        spans.append(range(*mesh.bounds(n, axes, k)))
    return set(itertools.product(*spans))


@st.composite
def layouts(draw: Any, mesh: Mesh, rank: int) -> Layout:
    """A layout whose axes, in any order, are dealt to dimensions and to none."""
    dims: list[tuple[Axis, ...]] = [()] * (rank + 1)
    for name, _ in draw(st.permutations(mesh.axes)):
        dims[draw(st.integers(0, rank))] += (Axis(name),)
    return Layout(mesh.name, tuple(dims[:rank]))


def parts(counts: Counter[tuple[int, ...]]) -> dict[tuple[int, ...], Fraction]:
    """The share of all devices that have each of some numbers."""
    return {of: Fraction(n, counts.total()) for of, n in counts.items()}


@given(st.data())
def test_shares_are_those_of_each_device(data: Any) -> None:
    mesh, shape = data.draw(meshes()), data.draw(shapes(2))
    source, target = (data.draw(layouts(mesh, 2)) for _ in range(2))
    names = [name for name, _ in mesh.axes]
    free = data.draw(st.sets(st.sampled_from(names)))
    devices, found = coordinates(mesh), Counter[tuple[int, ...]]()
    for at in devices:
        near = [d for d in devices if all(d[n] == at[n] for n in names if n not in free)]
        new = shard(mesh, shape, target, at)
        held = set[tuple[int, ...]]().union(*(shard(mesh, shape, source, d) for d in near))
        found[len(new), len(new & held)] += 1
    counted = shares(mesh, shape, source, target, (frozenset(map(Axis, free)),))
    assert parts(counted) == parts(found)


def test_the_memory_of_counting_grows_with_the_number_of_devices() -> None:
    """It was quadratic where an axis of many devices is split further."""
    peaks = []
    for n in (1 << 10, 1 << 12):
        mesh, a, b = Mesh("m", (("a", 2), ("b", n))), Axis("a"), Axis("b")
        tracemalloc.start()
        assert sent(mesh, (32,), Layout("m", ((b,),)), Layout("m", ((b, a),))) == 1
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 5 * peaks[0]


def test_axes_that_cross_are_counted_on_many_devices_as_on_few() -> None:
    """Of a:(1)2 and a:(1)3, which six devices of any number are enough for."""
    two, three = ((Axis("a", 1, n),) for n in (2, 3))
    for source, target in (((two, ()), ((), three)), ((three, ()), ((), two))):
        ends = Layout("m", source), Layout("m", target)
        few, many = (sent(Mesh("m", (("a", n),)), (36, 36), *ends) for n in (6, 6**6))
        assert many == few > 0
