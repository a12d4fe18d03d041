"""From any layout to any other: the plan, run on all ranks, gives the same value; and so does its
transpose for the cotangent."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import extent
from support.harness import (
    MESH,
    Arg,
    Problem,
    collectives,
    compiled,
    function,
    laid_out,
    layout,
    layouts,
    ordered_subsets,
    parts,
    problem,
)
from support.strategies import layouts_on, meshes, shapes, with_sizes
from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import ReturnOp

from shardir.algebra.layout import Layout, Shape, replicated
from shardir.algebra.mesh import Mesh
from shardir.algebra.notation import mesh_of
from shardir.algebra.redistribution import (
    estimated_seconds,
    plan,
    plan_redistribution,
    received,
)
from shardir.diagnostics import ShardirError
from shardir.dialects import dist
from shardir.interpret import run
from shardir.interpret.values import assemble
from shardir.rewriting.functions import update_signature
from shardir.rewriting.placement import layout_at

EVEN, UNEVEN = (8, 8), (5, 7)
LOWER = ("lower-to-spmd",)
GRADIENT = ("distributed-autodiff", "lower-to-spmd", "simplify-communication")


def identity(shape: Shape) -> Problem:
    """@f returns its argument."""
    return problem([Arg("f64", shape)], lambda b, x: x, (0,))


IDENTITY: dict[Shape, Problem] = {s: identity(s) for s in (EVEN, UNEVEN)}


def redistribution(p: Problem, mesh: Mesh, source: Layout, target: Layout) -> Any:
    """The module whose @f redistributes its argument."""
    module = laid_out(p.module, mesh, [source])
    f = function(module, "f")
    block = f.body.block
    end = block.last_op
    assert isinstance(end, ReturnOp)
    t = block.args[0].type
    assert isinstance(t, TensorType)
    new = dist.RedistributeOp.create(
        operands=[block.args[0]], result_types=[dist.with_layout(t, target)]
    )
    block.insert_op_before(new, end)
    end.operands[0] = new.out
    update_signature(f)
    return module


def error(p: Problem, mesh: Mesh, source: Layout, target: Layout) -> str:
    """The error of a redistribution or its gradient; empty without one."""
    try:
        module = redistribution(p, mesh, source, target)
        module.verify()
        return p.errors(compiled(module, GRADIENT))
    except Exception as e:
        return f"raises {type(e).__name__}: {e}"


def errors(p: Problem, mesh: Mesh, pairs: Sequence[tuple[Layout, Layout]]) -> list[str]:
    return [f"[{a}] -> [{b}]: {message}" for a, b in pairs if (message := error(p, mesh, a, b))]


# ---- every pair on a 2x2 mesh ----


def with_partials(l: Layout, reduction: str = "sum") -> Iterator[Layout]:
    """The layout, with any of its free axes partial."""
    for axes in ordered_subsets([a for a in MESH.names if a not in l.used]):
        yield l.with_partial(tuple(sorted(axes, key=MESH.order)), reduction)


SOURCES = sorted({p for l in layouts(2) for p in with_partials(l)}, key=str)


@pytest.mark.parametrize("shape", extent([UNEVEN], [EVEN, UNEVEN]), ids=str)
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_every_pair_of_a_2x2_mesh(source: Layout, shape: Shape):
    wrong = errors(IDENTITY[shape], MESH, [(source, t) for t in SOURCES])
    assert not wrong, f"{len(wrong)} of {len(SOURCES)}, such as\n" + "\n".join(wrong[:3])


@pytest.mark.parametrize("reduction", ["max", "min", "mean", "any"])
def test_other_reductions(reduction: str):
    """From partial values to complete ones in any layout."""
    p = IDENTITY[UNEVEN]
    sources = [source for l in layouts(2) for source in with_partials(l, reduction)]
    for k, (source, target) in enumerate(itertools.product(sources, layouts(2))):
        if k % extent(7, 1) == 0:
            module = compiled(redistribution(p, MESH, source, target), LOWER)
            (found,) = run(module, "f", p.arguments[:1])
            np.testing.assert_allclose(found, p.arguments[0], err_msg=f"[{source}] -> [{target}]")


# ---- the conversions of MindSpore's documentation ----

TWO, FOUR = mesh_of("m", "d = 2"), MESH
ROW_2 = {"row": "[{d}, {}]", "column": "[{}, {d}]", "replicated": "[{}, {}]"}
ROW_3 = {
    "replicated": "[{}, {}]", "row a": "[{a}, {}]", "row b": "[{b}, {}]", "column a": "[{}, {a}]",
    "column b": "[{}, {b}]", "row a column b": "[{a}, {b}]", "row b column a": "[{b}, {a}]",
}  # fmt: skip
EXPECTED_2 = {
    ("row", "column"): {"all_to_all": 1}, ("column", "row"): {"all_to_all": 1},
    ("row", "replicated"): {"all_gather": 1}, ("column", "replicated"): {"all_gather": 1},
    ("replicated", "row"): {}, ("replicated", "column"): {},
}  # fmt: skip


@pytest.mark.parametrize("pair", EXPECTED_2, ids=" to ".join)
def test_the_six_conversions_of_two_devices(pair: tuple[str, str]):
    source, target = (layout(ROW_2[n], TWO) for n in pair)
    for shape in (EVEN, UNEVEN):
        assert not error(IDENTITY[shape], TWO, source, target)
    module = compiled(redistribution(IDENTITY[EVEN], TWO, source, target), GRADIENT)
    forward, _ = parts(module, "g")
    assert collectives(forward) == EXPECTED_2[pair]


@pytest.mark.parametrize("pair", list(itertools.permutations(ROW_3, 2)), ids=" to ".join)
def test_the_42_conversions_of_four_devices(pair: tuple[str, str]):
    source, target = (layout(ROW_3[n], FOUR) for n in pair)
    for shape in (EVEN, UNEVEN):
        assert not error(IDENTITY[shape], FOUR, source, target)
    through_replication = received(EVEN, FOUR, source, replicated("m", 2))[0]
    assert received(EVEN, FOUR, source, target)[0] <= through_replication


# ---- other meshes, sub-axes ----


@settings(max_examples=extent(15, 200), deadline=None, derandomize=True)
@given(st.data())
def test_random_pairs(data: Any):
    """Sub-axes included, on meshes such as 2x2x2, 8 and 6; any sizes, 0 and 1 too."""
    mesh = data.draw(st.sampled_from([
        mesh_of("m", "a = 2, b = 2, c = 2"), mesh_of("m", "d = 8"), mesh_of("m", "d = 6"),
        mesh_of("m", "d = 12"), mesh_of("m", "a = 4, b = 3"), mesh_of("m", "a = 1, b = 2"),
    ]) | meshes(12))  # fmt: skip
    rank = data.draw(st.integers(1, 3))
    shape = data.draw(shapes(rank, 9))
    source, target = (
        data.draw(with_sizes(mesh, shape, data.draw(layouts_on(mesh, rank)))) for _ in range(2)
    )
    assert not error(identity(shape), mesh, source, target)


@settings(max_examples=extent(15, 200), deadline=None, derandomize=True)
@given(st.data())
def test_what_is_emitted_is_what_is_planned(data: Any):
    """Also between layouts that are equal but for their spelling."""
    mesh, rank = data.draw(meshes(8)), data.draw(st.integers(1, 2))
    shape = data.draw(shapes(rank, 12))
    source, target = (
        data.draw(with_sizes(mesh, shape, data.draw(layouts_on(mesh, rank)))) for _ in range(2)
    )
    module = compiled(redistribution(identity(shape), mesh, source, target), LOWER)
    emitted = [
        (op.name, layout_at(op.results[0]).simplified(mesh))
        for op in function(module, "f").body.block.ops
        if op.name.startswith("dist.")
    ]
    planned = plan_redistribution(shape, "f64", mesh, source, target).steps
    assert emitted == [(f"dist.{step.kind}", step.layout) for step in planned]


@settings(max_examples=extent(15, 300), deadline=None, derandomize=True)
@given(st.data())
def test_no_plan_is_slower_than_through_replication(data: Any):
    """And a plan to the layout of the value is empty."""
    mesh, rank = data.draw(meshes(12)), data.draw(st.integers(1, 3))
    shape = data.draw(shapes(rank, 9))
    source = data.draw(layouts_on(mesh, rank))
    target = data.draw(layouts_on(mesh, rank, partial=False))
    assert plan(shape, mesh, source, source) == ()
    found = estimated_seconds(shape, mesh, source, target, 4)
    unsharded = replicated("m", rank)
    assert found <= estimated_seconds(shape, mesh, source, unsharded, 4) * (1 + 1e-9)


# ---- gradients ----


def test_the_gradient_of_an_uneven_redistribution_to_partial():
    """The cotangent of a partial value is that of each of its addends."""
    p = IDENTITY[UNEVEN]
    source, target = layout("[{a}, {}], partial sum {b}"), layout("[{}, {}], partial sum {a, b}")
    module = redistribution(p, MESH, source, target)
    assert not p.errors(compiled(module, GRADIENT))
    _, backward = parts(module, "g")
    assert not collectives(backward)


def test_replicas_are_equal_to_the_bit():
    unsharded = replicated(MESH.name, 1)
    parts = [np.ones(3, np.float32) for _ in range(MESH.size)]
    assert (assemble(parts, unsharded, MESH, (3,)) == 1).all()
    parts[2] = np.nextafter(parts[2], np.float32(2))
    with pytest.raises(ShardirError, match="expected equal replicas"):
        assemble(parts, unsharded, MESH, (3,))
