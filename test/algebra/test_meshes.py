"""Meshes, axes and sub-axes, as properties."""

import itertools
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.strategies import (
    chains,
    meshes,
    quick,
    sub_axes,
)

from shardir.algebra.bound import crossing, refined
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axis, Mesh
from shardir.algebra.notation import (
    mesh_of,
)
from shardir.cost.clusters import load


def coordinates(mesh: Mesh, axis: Axis) -> list[int]:
    """The coordinate of each rank along an axis, by cutting an array of coordinates."""
    sizes = [s for _, s in mesh.axes]
    at = [n for n, _ in mesh.axes].index(axis.name)
    along = np.indices(sizes)[at].flatten()
    size = axis.size or sizes[at]
    cut = np.arange(sizes[at]).reshape(axis.pre, size, -1)
    place = {int(v): j for (_, j, _), v in np.ndenumerate(cut)}
    return [place[int(i)] for i in along]


@quick
@given(st.data())
def test_coordinates_are_a_mixed_radix(data: Any):
    mesh = data.draw(meshes())
    for axis in data.draw(sub_axes(mesh)):
        mesh.check_axis(axis)
        found = [mesh.coordinate(r, axis) for r in range(mesh.size)]
        assert found == coordinates(mesh, axis)
        assert set(found) == set(range(mesh.extent((axis,))))


@quick
@given(st.data())
def test_the_index_is_row_major_in_the_order_of_the_axes(data: Any):
    mesh = data.draw(meshes())
    axes = data.draw(sub_axes(mesh))
    shape = [mesh.extent((a,)) for a in axes]
    where = [tuple(mesh.coordinate(r, a) for a in axes) for r in range(mesh.size)]
    indices = [int(np.ravel_multi_index(w, shape)) for w in where]
    assert [mesh.index(r, axes) for r in range(mesh.size)] == indices
    assert sorted(indices) == list(range(mesh.size))


def any_axis(mesh: Mesh) -> st.SearchStrategy[Axis]:
    """Any sub-axis, whether or not it fits with others."""
    found = [Axis(n) for n, _ in mesh.axes]
    for n, s in mesh.axes:
        for chain in chains(s):
            found += [Axis(n, lo, hi // lo) for lo, hi in itertools.pairwise(chain)]
    return st.sampled_from(found)


@quick
@given(st.data())
def test_axes_overlap_unless_their_coordinates_are_independent(data: Any):
    """They also overlap where no single cut of the axis has both as sub-axes."""
    mesh = data.draw(meshes())
    a, b = data.draw(any_axis(mesh)), data.draw(any_axis(mesh))
    assume(mesh.extent((a,)) > 1 and mesh.extent((b,)) > 1)
    pairs = list(zip(coordinates(mesh, a), coordinates(mesh, b), strict=True))
    counts = {pairs.count(p) for p in set(pairs)}
    independent = len(set(pairs)) == mesh.extent((a, b)) and len(counts) == 1
    if a.name == b.name:
        cuts = {*mesh.span(a), *mesh.span(b)}
        independent &= any(cuts <= set(chain) for chain in chains(mesh.full(a.name)))
    assert mesh.overlap(a, b) == mesh.overlap(b, a) == (not independent)


@quick
@given(st.data())
def test_groups_partition_the_ranks(data: Any):
    """Ranks of a group differ in the axes alone, and are in the order of their index."""
    mesh = data.draw(meshes())
    all_axes = data.draw(sub_axes(mesh))
    n = data.draw(st.integers(0, len(all_axes)))
    axes, others = all_axes[:n], all_axes[n:]
    groups = mesh.groups(axes)
    assert sorted(r for g in groups for r in g) == list(range(mesh.size))
    for group in groups:
        assert [mesh.index(r, axes) for r in group] == list(range(mesh.extent(axes)))
        assert len({mesh.index(r, others) for r in group}) == 1


@quick
@given(st.data())
def test_simplify_keeps_the_index(data: Any):
    mesh = data.draw(meshes())
    axes = data.draw(sub_axes(mesh))[: data.draw(st.integers(0, 4))]
    simple = mesh.simplify(axes)
    assert [mesh.index(r, simple) for r in range(mesh.size)] == [
        mesh.index(r, axes) for r in range(mesh.size)
    ]
    assert mesh.simplify(simple) == simple and len(simple) <= len(axes)
    assert all(mesh.extent((a,)) > 1 for a in simple)


@quick
@given(st.data())
def test_without_minor_undoes_appending(data: Any):
    mesh = data.draw(meshes())
    all_axes = data.draw(sub_axes(mesh))
    i, j = sorted(data.draw(st.tuples(*[st.integers(0, len(all_axes))] * 2)))
    major, minor = all_axes[:i], all_axes[i:j]
    full = mesh.simplify(major + minor)
    assert mesh.without_minor(full, minor) == mesh.simplify(major)
    other = data.draw(sub_axes(mesh))[: data.draw(st.integers(0, 3))]
    rest = mesh.without_minor(full, other)
    if rest is not None:
        assert mesh.simplify(rest + other) == full


@quick
@given(st.data())
def test_without_takes_away_a_set_of_axes(data: Any):
    mesh = data.draw(meshes())
    all_axes = data.draw(sub_axes(mesh))
    i, j = sorted(data.draw(st.tuples(*[st.integers(0, len(all_axes))] * 2)))
    rest, gone = all_axes[:i], all_axes[i:j]
    full = mesh.simplify(tuple(sorted(rest + gone, key=mesh.order)))
    assert mesh.without(full, gone) == mesh.simplify(tuple(sorted(rest, key=mesh.order)))
    stranger = [a for a in all_axes[j:] if mesh.extent((a,)) > 1]
    if stranger:
        assert mesh.without(full, (stranger[0],)) is None


@quick
@given(meshes(), st.lists(st.integers(1, 8), max_size=3))
def test_take_deals_devices_major_first(mesh: Mesh, counts: list[int]):
    """None exactly where the counts do not cut the axes at sub-axes."""
    ends = list(itertools.accumulate([s for _, s in mesh.axes], lambda a, b: a * b))
    wanted = list(itertools.accumulate(counts, lambda a, b: a * b))
    assume(not wanted or wanted[-1] <= mesh.size)
    cuts = sorted({1, *ends, *wanted})
    taken = mesh.take(tuple(counts))
    assert (taken is not None) == all(b % a == 0 for a, b in itertools.pairwise(cuts))
    if taken is not None:
        assert [mesh.extent(a) for a in taken] == counts
        every = tuple(a for axes in taken for a in axes)
        left = mesh.size // prod(counts)
        assert [mesh.index(r, every) for r in range(mesh.size)] == [
            r // left for r in range(mesh.size)
        ]


def test_ranks_and_groups_of_a_known_mesh():
    mesh = mesh_of("m", "dp = 2, tp = 4")
    assert mesh.groups((Axis("tp"),)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups((Axis("dp"),)) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups((Axis("tp", 2, 2),)) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups((Axis("tp", 1, 2), Axis("dp"))) == ((0, 4, 2, 6), (1, 5, 3, 7))
    assert mesh.take((2, 2)) == ((Axis("dp"),), (Axis("tp", 1, 2),))


@pytest.mark.parametrize("sizes", [(32,), (4, 16), (16, 4), (8, 8), (2048,), (8, 4, 8, 8)], ids=str)
def test_axes_are_cut_once_at_each_level(sizes: tuple[int, ...]) -> None:
    """An axis of 16 crosses two levels of the cluster: the parts are disjoint, each along which
    ranks differ is of one level, and no two sub-axes of powers of two cross."""
    cluster = load("pod2048").part(prod(sizes))
    mesh = Mesh("m", tuple(zip("abcd", sizes, strict=False)), cluster)
    assert mesh.clash(mesh.level_sub_axes) is None
    for part in mesh.cut(mesh.names, mesh.level_sub_axes):
        stride, reach = mesh.stride(part), mesh.stride(part) * mesh.extent((part,))
        assert not [u for u in cluster.units if stride < u < reach], part
    for name in mesh.names:
        alone = Layout("m", ((name,),))
        assert not crossing(mesh, *refined(mesh, alone, alone))
