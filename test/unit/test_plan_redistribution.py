"""Planned redistributions: right on all ranks, never more than a detour, never above the bound."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import with_sizes

from shardir.algebra.errors import ShardirError
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axis, Mesh
from shardir.algebra.notation import parse_layout
from shardir.algebra.redistribution import plan_redistribution, price
from shardir.interpret.redistribution import redistribute
from shardir.interpret.values import assemble, split

MESHES = [
    Mesh("m", axes)
    for axes in (
        (("a", 2), ("b", 2)), (("a", 2), ("b", 3)), (("d", 6),), (("d", 8),), (("a", 4), ("b", 6)),
        (("a", 2), ("b", 2), ("c", 2)), (("a", 3), ("b", 2), ("c", 4)),
    )
]  # fmt: skip
SHAPES = [(5, 7), (8, 8), (12, 1), (1, 3), (2, 3, 4), (24,), (0, 4)]


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh, rank: int, partial: bool) -> Layout:
    """Any split over some digits of the mesh's axes; perhaps partial over one more."""
    digits: list[Axis] = []
    for name, size in mesh.axes:
        cut = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        parts = [Axis(name, 1, cut), Axis(name, cut, size // cut)]
        digits += [a for a in parts if a.size > 1]
    order = draw(st.permutations(digits))
    kept: tuple[Axis, ...] = ()
    if partial and order and draw(st.booleans()):
        kept, order = (order[0],), order[1:]
    dims: list[tuple[Axis, ...]] = [()] * rank
    for a in order[: draw(st.integers(0, len(order)))]:
        d = draw(st.integers(0, rank - 1))
        dims[d] = (*dims[d], a)
    reduction = draw(st.sampled_from(["sum", "max", "min", "mean"])) if kept else "sum"
    return Layout(mesh.name, tuple(dims)).with_partial(kept, reduction)


@st.composite
def ways(draw: st.DrawFn, stops: int, partial: bool) -> tuple[Mesh, tuple[int, ...], list[Layout]]:
    mesh, shape = draw(st.sampled_from(MESHES)), draw(st.sampled_from(SHAPES))
    drawn = [draw(layouts(mesh, len(shape), partial)) for _ in range(stops)]
    return mesh, shape, [draw(with_sizes(mesh, shape, layout)) for layout in drawn]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(ways(2, partial=True))
def test_each_rank_ends_with_its_part(way: tuple[Mesh, tuple[int, ...], list[Layout]]) -> None:
    mesh, shape, (source, target) = way
    plan = plan_redistribution(shape, 4, mesh, source, target)
    value = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    parts = redistribute(plan, split(value, plan.source, mesh))
    np.testing.assert_array_equal(assemble(parts, plan.target, mesh, shape), value)
    end = plan.steps[-1].layout if plan.steps else plan.source
    assert end.simplified(mesh) == plan.target
    assert plan.peak_bytes >= 4 * max(p.size for p in parts)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ways(3, partial=False))
def test_no_detour_is_cheaper(way: tuple[Mesh, tuple[int, ...], list[Layout]]) -> None:
    mesh, shape, (a, b, c) = way

    def cost(x: Layout, y: Layout) -> int:
        p = plan_redistribution(shape, 1, mesh, x, y)
        assert p.received_bytes == p.bound_bytes or not any(s.kind == "exchange" for s in p.steps)
        return price(shape, mesh, p.source, list(p.steps))

    assert cost(a, c) <= cost(a, b) + cost(b, c)
    assert plan_redistribution(shape, 1, mesh, a, a).steps == ()


def test_it_says_what_it_does() -> None:
    mesh = Mesh("m", (("a", 2), ("b", 3)))
    source, target = parse_layout("@m, [{a}, {b}]"), parse_layout("@m, [{b, a}, {}]")
    assert str(plan_redistribution((5, 7), 4, mesh, source, target)).splitlines() == [
        "[@m, [{a}, {b}]] -> [@m, [{b, a}, {}]]",
        "  exchange over {a, b} -> [@m, [{b, a}, {}]]",
        "  receives 28 B (at least 28 B), peak 64 B",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [("@m, [{a}]", r"\[L1\]"), ("@m, [{z}, {}]", r"\[L2\]"), ("@m, [{a}, {a}]", r"\[L3\]")],
)
def test_a_layout_that_does_not_fit_is_refused(text: str, message: str) -> None:
    mesh = Mesh("m", (("a", 2),))
    whole = parse_layout("@m, [{}, {}]")
    with pytest.raises(ShardirError, match=message):
        plan_redistribution((4, 4), 4, mesh, whole, parse_layout(text))
