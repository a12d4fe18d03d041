"""Factors of ops: what they split, and the placement that is chosen."""

from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import extent
from support.strategies import layouts_on, meshes, quick, sub_axes

from shardir.algebra.factors import Factors, OpSharding, try_op_sharding
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.notation import (
    mesh_of,
    parse_layout,
)
from shardir.algebra.op_sharding import choose_op_sharding
from shardir.algebra.redistribution import estimated_seconds
from shardir.dialects.nn.base import layout_mismatch

EIGHT = mesh_of("m", "d = 8")
GRID = mesh_of("m", "a = 2, b = 2")


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
@settings(max_examples=extent(60, 200), deadline=None, derandomize=True)
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
