"""Shards of layouts, and the invariants of layouts."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import laid_out_shapes, quick

from shardir.algebra.layout import Layout, LocalLayout
from shardir.algebra.mesh import Axis, SizedAxes, shard_bounds
from shardir.algebra.notation import (
    mesh_of,
    parse_layout,
)
from shardir.diagnostics import ShardirError


@quick
@given(st.integers(0, 40), st.integers(1, 12))
def test_shards_hold_each_element_once(size: int, parts: int):
    bounds = [shard_bounds(size, parts, k) for k in range(parts)]
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(size))
    longest = -(-size // parts)
    cut = [stop - start for start, stop in bounds]
    assert cut[0] == longest and cut == sorted(cut, reverse=True)
    assert all(n in (0, longest) for n in cut[:-1]) or sum(0 < n < longest for n in cut) == 1


@quick
@given(laid_out_shapes())
def test_slices_of_all_ranks_tile_the_value(drawn: Any):
    """Each element is on all ranks that replicate it, or that have a partial value of it."""
    mesh, shape, layout = drawn
    layout.check(mesh, shape)
    holders = np.zeros(shape, int)
    for rank in range(mesh.size):
        holders[layout.slices(mesh, shape, rank)] += 1
    split = mesh.extent(tuple(a for d in layout.dims for a in d))
    assert (holders == mesh.size // split).all()


def test_explicit_sizes_that_are_the_usual_ones_are_the_same_layout():
    mesh = mesh_of("m", "a = 4")
    usual = parse_layout("@m, [{a} sizes [2, 2, 2, 1]]")
    assert usual.simplified(mesh) == parse_layout("@m, [{a}]") != usual
    other = parse_layout("@m, [{a} sizes [2, 2, 1, 2]]")
    assert other.simplified(mesh) == other != parse_layout("@m, [{a}]")
    assert other != parse_layout("@m, [{a} sizes [2, 1, 2, 2]]")
    assert hash(other) == hash(Layout("m", (SizedAxes((Axis("a"),), (2, 2, 1, 2)),)))


@quick
@given(laid_out_shapes())
def test_the_local_shape_is_the_largest_shard(drawn: Any):
    mesh, shape, layout = drawn
    parts = [layout.slices(mesh, shape, r) for r in range(mesh.size)]
    sizes = {tuple(s.stop - s.start for s in p) for p in parts}
    assert layout.local_shape(mesh, shape) == tuple(map(max, zip(*sizes, strict=True)))
    assert layout.even(mesh, shape) == (len(sizes) == 1)
    local = LocalLayout.of(layout, mesh, shape)
    assert local.global_shape(mesh, layout.local_shape(mesh, shape)) == shape


# ---- invalid layouts ----


@pytest.mark.parametrize(
    "text, rank, invariant",
    [
        ("@m, [{a}]", 2, "[L1]"),
        ("@m, [{c}]", 1, "[L2]"),
        ("@m, [{a:(1)4}]", 1, "[L2]"),
        ("@m, [{d:(4)2}]", 1, "[L2]"),
        ("@m, [{a}, {a}]", 2, "[L3]"),
        ("@m, [{a, a}]", 1, "[L3]"),
        ("@m, [{a}], partial sum {a}", 1, "[L3]"),
        ("@m, [{d}, {d:(1)2}]", 2, "[L3]"),
        ("@m, [{d:(1)2}, {d:(3)2}]", 2, "[L3]"),
        ("@m, [{d:(1)3}, {d:(2)3}]", 2, "[L3]"),
        ("@m, [{a} sizes [6]]", 1, "[L6]"),
        ("@m, [{a} sizes [3, 2, 1]]", 1, "[L6]"),
        ("@m, [{a} sizes [3, 4]]", 1, "[L6]"),
    ],
)
def test_errors_of_layouts_have_the_code_of_their_invariant(text: str, rank: int, invariant: str):
    mesh = mesh_of("m", "a = 2, d = 6")
    with pytest.raises(ShardirError, match="^" + invariant.replace("[", r"\[")):
        parse_layout(text).check(mesh, (6,) * rank)


def test_tensor_maps_are_those_of_mindspore():
    mesh = mesh_of("m", "dp = 2, tp = 4")
    assert parse_layout("@m, [{dp}, {tp}]").tensor_map(mesh) == (
        "device matrix [2, 4], tensor map [1, 0]"
    )
    assert parse_layout("@m, [{}, {tp:(1)2}]").tensor_map(mesh) == (
        "device matrix [2, 2, 2], tensor map [-1, 1]"
    )
    assert parse_layout("@m, [{dp} sizes [5, 3], {tp}]").tensor_map(mesh) == (
        "device matrix [2, 4], tensor map [1, 0], manual_split (5, 3) of dimension 0"
    )
