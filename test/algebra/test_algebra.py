"""Meshes, layouts, factors, strategies and their notation, as properties."""

import itertools
from dataclasses import replace
from math import prod
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import chains, laid_out_shapes, layouts_on, meshes, shapes, sub_axes, with_sizes
from xdsl.dialects.builtin import IntegerAttr, StringAttr, TensorType, f32, i32

from shardir.algebra.factors import Factors, OpSharding, choose_op_sharding, try_op_sharding
from shardir.algebra.layout import REDUCTIONS, Layout, LocalLayout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh, SizedAxes, shard_bounds
from shardir.algebra.notation import (
    mesh_of,
    options_text,
    parse_axes,
    parse_layout,
    parse_local,
    parse_mesh,
    parse_options,
    parse_strategy,
)
from shardir.algebra.redistribution import estimated_seconds
from shardir.algebra.strategy import Strategy
from shardir.diagnostics import NotationError, ShardirError
from shardir.dialects.nn import EinsumOp, GatherOp
from shardir.dialects.nn.base import layout_mismatch

quick = settings(max_examples=150, deadline=None, derandomize=True)

# ---- shards ----


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


# ---- axes and sub-axes ----


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


# ---- notation ----


@quick
@given(st.data())
def test_layouts_are_read_as_they_are_written(data: Any):
    mesh = data.draw(meshes())
    rank = data.draw(st.integers(0, 3))
    layout = data.draw(layouts_on(mesh, rank, reductions=REDUCTIONS))
    layout = data.draw(with_sizes(mesh, data.draw(shapes(rank)), layout))
    assert parse_layout(str(layout)) == layout
    local = LocalLayout(layout, data.draw(st.none() | shapes(rank)))
    assert parse_local(str(local)) == local
    assert parse_mesh(", ".join(f"{n} = {s}" for n, s in mesh.axes)) == mesh.axes
    axes = data.draw(sub_axes(mesh))
    assert parse_axes(", ".join(map(str, axes))) == axes


def cuts() -> st.SearchStrategy[Any]:
    axes = st.sampled_from([(), (Axis("a"),), (Axis("a", 2, 4), Axis("b"))])
    some = st.lists(st.lists(st.integers(1, 9) | axes, max_size=3).map(tuple), max_size=3)
    return some.map(tuple)


@quick
@given(st.builds(Strategy, st.sampled_from([None, "m"]), cuts(), st.none() | cuts()))
def test_strategies_are_read_as_they_are_written(strategy: Strategy):
    assert parse_strategy(str(strategy)) == strategy


PLAIN = "".join(chr(i) for i in range(128) if chr(i) not in '"\\\n\r')
"""The characters that a string has without an escape."""


@quick
@given(
    st.dictionaries(
        st.text(ascii_lowercase + "_", min_size=1, max_size=5),
        st.integers(-99, 99)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(PLAIN, max_size=5),
        max_size=3,
    )
)
def test_options_are_read_as_they_are_written(values: dict[str, Any]):
    options = ("word", tuple(values.items()))
    assert parse_options(options_text(options)) == options


def test_old_spellings():
    assert parse_strategy("[[2, 4], [4, 1]]") == parse_strategy("((2, 4), (4, 1))")
    assert parse_strategy("{[2, 4], [4, 1]}") == parse_strategy("((2, 4), (4, 1))")
    assert parse_strategy("((1,),)") == parse_strategy("((1),)")


@pytest.mark.parametrize(
    "read, text, offset",
    [
        (parse_layout, "@m, [{a}", 8),
        (parse_layout, "@m, [{a}], partial many {b}", 19),
        (parse_layout, "m, [{a}]", 0),
        (parse_axes, "a, , b", 3),
        (parse_mesh, "a = 2, a = 3", 7),
        (parse_mesh, "a = 0", 0),
        (parse_strategy, "((2, 0),)", 5),
        (parse_options, "sgd, lr = ", 10),
        (parse_options, "sgd, lr = 1.0, lr = 2.0", 15),
    ],
)
def test_errors_of_notation_have_an_offset(read: Any, text: str, offset: int):
    with pytest.raises(NotationError) as e:
        read(text)
    assert e.value.offset == offset


# ---- strategies ----

EIGHT = mesh_of("m", "d = 8")
GRID = mesh_of("m", "a = 2, b = 2")
MATMUL = Factors.of([["i", "k"], ["k", "j"]], [["i", "j"]], [(16, 32), (32, 16), (16, 16)])
SOFTMAX = Factors.of([["i", "j"]], [["i", "j"]], [(16, 32)] * 2, replicate=["j"])
MERGED = Factors.of([["a b"]], [["a", "b"]], [(12,), (4, 3)])


@pytest.mark.parametrize(
    "text, factors, mesh, code",
    [
        ("((2, {a}), (1, 1))", MATMUL, GRID, "S1"),
        ("((4, 4), (4, 1))", MATMUL, EIGHT, "S2"),
        ("((3, 1), (1, 1))", MATMUL, EIGHT, "S3"),
        ("((2, 1),)", MATMUL, EIGHT, "S4"),
        ("((2, 1), (1,))", MATMUL, EIGHT, "S4"),
        ("((2, 4), (2, 1))", MATMUL, EIGHT, "S5"),
        ("(({a}, {b}), ({}, {a}))", MATMUL, GRID, "S5"),
        ("((2, 1), (1, 1)) -> ((4, 1),)", MATMUL, EIGHT, "S5"),
        ("((8,),)", MERGED, EIGHT, "S6"),
        ("(({d},),)", MERGED, EIGHT, "S6"),
        ("((2, 2),)", SOFTMAX, EIGHT, "S7"),
        ("(({a}, {b}),)", SOFTMAX, GRID, "S7"),
        ("(({x}, {}), ({}, {}))", MATMUL, GRID, "S8"),
        ("(({a:(1)3}, {}), ({}, {}))", MATMUL, GRID, "S8"),
    ],
)
def test_strategies_that_do_not_fit(text: str, factors: Factors, mesh: Mesh, code: str):
    """[S9], an axis for two factors, is for the op that has the strategy: test_passes.py."""
    with pytest.raises(ShardirError, match=rf"^\[{code}\]"):
        parse_strategy(text).factor_axes(factors, mesh)


def test_numbers_become_axes_major_first():
    """The network of MindSpore's documentation on 8 devices: 2 x 4 x 1."""
    found = parse_strategy("((2, 4), (4, 1))").factor_axes(MATMUL, EIGHT)
    assert found == {"i": (Axis("d", 1, 2),), "k": (Axis("d", 2, 4),)}
    found = parse_strategy("((2, 1), (1, 2))").factor_axes(MATMUL, EIGHT)
    assert found == {"i": (Axis("d", 1, 2),), "j": (Axis("d", 2, 2),)}
    found = parse_strategy("((6,),)").factor_axes(MERGED, mesh_of("m", "d = 12"))
    assert found == {"a": (Axis("d", 1, 2),), "b": (Axis("d", 2, 3),)}


@pytest.mark.parametrize("left", ["bik", "bki", "kbi"])
@pytest.mark.parametrize("right", ["bkj", "bjk", "kjb"])
def test_devices_are_dealt_to_contractions_as_to_matrix_products(left: str, right: str):
    """MindSpore's device matrix of a product is (batch, rows, contracted, columns), whichever of
    its operands is transposed (SetDevMatrixShape in its matmul_info.cc)."""
    sizes, slices = dict(b=4, i=8, k=16, j=32), dict(b=2, i=4, k=2, j=8)
    mesh = mesh_of("m", "d = 128")
    types = [TensorType(f32, [sizes[f] for f in v]) for v in (left, right, "bij")]
    props = {"equation": StringAttr(f"{left},{right}->bij")}
    factors = EinsumOp.rule(types[:2], types[2:], props)
    cuts = tuple(tuple(slices[f] for f in v) for v in (left, right))
    found, taken = Strategy(None, cuts).factor_axes(factors, mesh), mesh.take((2, 4, 2, 8))
    assert taken is not None and found == dict(zip("bikj", taken, strict=True))


@pytest.mark.parametrize("axis", [0, 1])
def test_devices_are_dealt_to_the_indices_of_a_gather_first(axis: int):
    """MindSpore's device matrix is that of the indices, then that of the table (NormalImpl and
    ShardBatchAndAxisImpl in its gather_info.cc)."""
    mesh = mesh_of("m", "d = 64")
    shapes = [(8, 16), (4, 32), (4, 32, 16) if axis == 0 else (8, 4, 32)]
    types = [TensorType(t, s) for t, s in zip((f32, i32, f32), shapes, strict=True)]
    factors = GatherOp.rule(types[:2], types[2:], {"axis": IntegerAttr(axis, 64)})
    found = parse_strategy("((4, 2), (2, 4))").op_sharding(factors, mesh)
    taken = mesh.take((2, 4, 4, 2))
    assert taken is not None
    assert [l.dims for l in found.operands] == [taken[2:], taken[:2]]


def test_two_spellings_of_axes_are_equal():
    found = parse_strategy("(({d:(1)2, d:(2)4}, {}), ({}, {})) -> (({d}, {}),)")
    assert found.factor_axes(MATMUL, EIGHT) == {"i": (Axis("d"),)}


def test_a_strategy_names_the_partial_values_that_an_op_passes_on():
    text = "(({a}, {}), ({a}, {})), partial sum {b}"
    found = parse_strategy(text)
    assert str(found) == text
    add = Factors.of([["i", "j"]] * 2, [["i", "j"]], [(4, 6)] * 3, linear="sum")
    placement = found.op_sharding(add, GRID)
    partial = parse_layout("@m, [{a}, {}], partial sum {b}")
    assert placement.operands == (partial, partial) and placement.results == (partial,)
    with pytest.raises(ShardirError, match=r"^\[S10\]"):
        found.op_sharding(replace(add, linear=""), GRID)


# ---- factors ----


@st.composite
def merged_dims(draw: Any) -> Factors:
    """A dimension of up to three factors, each of which stands alone in the result."""
    sizes = draw(st.lists(st.sampled_from([2, 3, 4, 5, 6, 8]), min_size=1, max_size=3))
    names = [f"f{i}" for i in range(len(sizes))]
    return Factors.of([[" ".join(names)]], [names], [(prod(sizes),), tuple(sizes)])


@quick
@given(st.data())
def test_compose_is_the_inverse_of_assign(data: Any):
    mesh, factors = data.draw(meshes()), data.draw(merged_dims())
    dim = factors.operands[0][0]
    axes = mesh.simplify(data.draw(sub_axes(mesh))[: data.draw(st.integers(0, 3))])
    assigned, complete = factors.assign(dim, axes, mesh)
    if complete:
        assert factors.compose(dim, assigned, mesh) == axes
        local = prod(factors.size(f) for f in dim) // mesh.extent(axes)
        ours = prod(factors.size(f) // mesh.extent(assigned.get(f, ())) for f in dim)
        assert len(dim) == 1 or ours == local


@quick
@given(st.data())
def test_assign_is_the_inverse_of_compose(data: Any):
    mesh, factors = data.draw(meshes()), data.draw(merged_dims())
    dim = factors.operands[0][0]
    hands: dict[str, list[Axis]] = {f: [] for f in dim}
    for a in data.draw(sub_axes(mesh)):
        hand = data.draw(st.integers(0, len(dim)))
        if hand < len(dim):
            hands[dim[hand]].append(a)
    chosen = {f: mesh.simplify(tuple(axes)) for f, axes in hands.items()}
    axes = factors.compose(dim, chosen, mesh)
    if axes is not None:
        assigned, complete = factors.assign(dim, axes, mesh)
        assert complete and {f: assigned.get(f, ()) for f in dim} == chosen


# ---- placement ----

SIGNATURES: list[tuple[str, Any, Any, tuple[Shape, ...], dict[str, Any]]] = [
    ("matmul", [["i", "k"], ["k", "j"]], [["i", "j"]], ((8, 4), (4, 12), (8, 12)), {}),
    ("uneven", [["i", "k"], ["k", "j"]], [["i", "j"]], ((5, 7), (7, 3), (5, 3)), {}),
    ("add", [["i", "j"]] * 2, [["i", "j"]], ((8, 6),) * 3, {"linear": "sum"}),
    ("row", [["i", "j"], ["j"]], [["i", "j"]], ((8, 6), (6,), (8, 6)), {}),
    ("transpose", [["i", "j"]], [["j", "i"]], ((8, 6), (6, 8)), {"linear": "any"}),
    ("merge", [["i", "j"]], [["i j"]], ((4, 6), (24,)), {"linear": "any"}),
    ("split", [["i j"]], [["i", "j"]], ((24,), (4, 6)), {"linear": "any"}),
    ("softmax", [["i", "j"]], [["i", "j"]], ((8, 6),) * 2, {"replicate": ["j"]}),
    ("max", [["i", "j"]], [["i"]], ((8, 6), (8,)), {"reduction": "max"}),
    ("sum", [["i", "j"]], [["j"]], ((8, 6), (6,)), {"linear": "sum"}),
    ("two results", [["i", "j"]], [["i", "j"], ["j"]], ((8, 6), (8, 6), (6,)), {}),
    ("stuck", [["", "j"]], [["j", ""]], ((8, 6), (6, 8)), {}),
]
RULES = {
    name: (Factors.of(ins, outs, shapes, **options), shapes)
    for name, ins, outs, shapes, options in SIGNATURES
}


def cost(mesh: Mesh, shapes: Any, operands: Any, hints: Any, placement: OpSharding) -> float:
    """The seconds of redistributions to the placement's operands and from its results."""
    moves = list(zip(operands, placement.operands, shapes, strict=False))
    moves += [
        (r, h or r.complete, s)
        for r, h, s in zip(placement.results, hints, shapes[len(operands) :], strict=True)
    ]
    return sum(estimated_seconds(s, mesh, a, b, 4) for a, b, s in moves)


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_a_placement_is_legal_and_splits_what_is_agreed_on(name: str, data: Any):
    """Factors on which the layouts agree are split so, since that splits the computation. It costs
    no more than to leave the others unsharded, with partial operands reduced before or after."""
    factors, shapes = RULES[name]
    mesh = data.draw(
        st.sampled_from([GRID, EIGHT, mesh_of("m", "a = 2, b = 3"), mesh_of("m", "d = 6")])
    )
    ranks = [len(s) for s in shapes]
    n = len(factors.operands)
    operands = tuple(data.draw(layouts_on(mesh, r, reductions=("sum", "max"))) for r in ranks[:n])
    hints = tuple(data.draw(st.none() | layouts_on(mesh, r, partial=False)) for r in ranks[n:])
    found = choose_op_sharding(factors, operands, hints, mesh, shapes, (4,) * len(shapes))
    assert layout_mismatch(factors, found.operands, found.results, mesh, False) == ""
    for layout, shape in zip((*found.operands, *found.results), shapes, strict=True):
        layout.check(mesh, shape)
    agreed = agreed_on(factors, operands, hints, mesh)
    if try_op_sharding(factors, agreed, mesh) is None:
        agreed = {}
    assert {f: found.axes.get(f) for f in agreed} == agreed
    partial = operands[0] if operands and found.operands[0].partial else None
    assert partial is None or {o.partial for o in found.operands} == {partial.partial}
    spent = cost(mesh, shapes, operands, hints, found)
    for kept in (None, kept_partial(factors, operands)):
        other = try_op_sharding(factors, agreed, mesh, kept)
        if other is not None:
            assert spent <= cost(mesh, shapes, operands, hints, other) * (1 + 1e-9)
    used = {a for axes in found.axes.values() for a in axes}
    used |= {a for o in found.operands for a in o.partial}
    for result in found.results:  # each axis splits a dimension, or leaves the result partial
        mine = {a for axes in (*result.dims, result.partial) for a in axes}
        assert in_order(mesh, mine) == in_order(mesh, used)


def in_order(mesh: Mesh, axes: set[Axis]) -> Axes:
    return mesh.simplify(tuple(sorted(axes, key=mesh.order)))


def kept_partial(factors: Factors, operands: tuple[Layout, ...]) -> Layout | None:
    """The partial axes that a linear op passes on: those that all operands have, of a sum."""
    partial = {(o.partial, o.reduction) for o in operands}
    if len(partial) != 1 or not factors.linear:
        return None
    ((axes, reduction),) = partial
    return operands[0] if axes and (reduction == "sum" or factors.linear == "any") else None


def agreed_on(
    factors: Factors, operands: tuple[Layout, ...], hints: tuple[Layout | None, ...], mesh: Mesh
) -> dict[str, Axes]:
    """The factors for which all values propose the same axes."""
    wanted: dict[str, set[Axes]] = {}
    values = [*zip(factors.operands, operands, strict=True)]
    values += [(d, h) for d, h in zip(factors.results, hints, strict=True) if h is not None]
    for dims, layout in values:
        for dim, axes in zip(dims, layout.dims, strict=True):
            mine, _ = factors.assign(dim, axes, mesh)
            for f in dim:
                wanted.setdefault(f, set()).add(() if f in factors.replicate else mine.get(f, ()))
    return {f: axes for f, w in wanted.items() if len(w) == 1 for axes in w if axes}


def test_a_sum_that_both_operands_split_is_not_computed_redundantly():
    """FSDP and tensor parallelism: the columns of the weight are gathered, not the rows of both,
    though less would move."""
    factors = Factors.of(
        [["b", "k"], ["k", "j"]], [["b", "j"]], ((512, 256), (256, 256), (512, 256))
    )
    mesh = mesh_of("m", "dp = 2, tp = 4")
    x, w, y = (parse_layout(f"@m, {t}") for t in ("[{dp}, {tp}]", "[{tp}, {dp}]", "[{dp}, {}]"))
    shapes = ((512, 256), (256, 256), (512, 256))
    found = choose_op_sharding(factors, (x, w), (y,), mesh, shapes, (4, 4, 4))
    assert found.operands == (x, parse_layout("@m, [{tp}, {}]"))
    assert found.results == (parse_layout("@m, [{dp}, {}], partial sum {tp}"),)


def test_partial_values_are_reduced_before_they_are_broadcast():
    factors = Factors.of([["i"]], [["i", "j"]], ((8,), (8, 64)), linear="any")
    partial = parse_layout("@m, [{}], partial sum {a}")
    found = choose_op_sharding(factors, (partial,), (None,), GRID, ((8,), (8, 64)), (4, 4))
    assert found.operands == (partial.complete,)
    factors = Factors.of([["i", "j"]], [["i"]], ((8, 64), (8,)), linear="sum")
    partial = parse_layout("@m, [{}, {}], partial sum {a}")
    found = choose_op_sharding(factors, (partial,), (None,), GRID, ((8, 64), (8,)), (4, 4))
    assert found.operands == (partial,)


def test_partial_operands_of_a_conversion_stay_partial():
    """The program chooses the type in which they are added, also between types of one size."""
    factors = Factors.of([["i"]], [["i"]], ((8,), (8,)), linear="sum")
    partial = parse_layout("@m, [{}], partial sum {a}")
    shared = ((partial.complete,),)
    for converts, operand in ((False, partial.complete), (True, partial)):
        found = choose_op_sharding(
            factors, (partial,), (None,), GRID, ((8,), (8,)), (2, 2), shared, converts
        )
        assert found.operands == (operand,)
