"""Transitions of layouts: each one that takes axes away is undone by the one that adds them."""

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import layouts_on

from shardir.algebra.collectives import COLLECTIVES, AxisState
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.transitions import gathered_along, more_partial, split_along, without_partial
from shardir.diagnostics import ShardirError

MESH = Mesh("m", (("a", 2), ("b", 3), ("c", 4)))
AXES: list[Axes] = [p for n in (1, 2, 3) for p in permutations([*map(Axis, "abc")], n)]
SOME = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.mark.parametrize(
    ("change", "undo"), [(gathered_along, split_along), (split_along, gathered_along)]
)
@SOME
@given(data=st.data())
def test_gathering_and_splitting_undo_each_other(change: Any, undo: Any, data: Any) -> None:
    """So only the minor axes of a dimension can be gathered."""
    layout = data.draw(layouts_on(MESH, 2))
    for dim, axes in ((d, axes) for d in range(2) for axes in AXES):
        try:
            changed = change(layout, dim, axes, MESH)
        except ShardirError:
            continue
        assert undo(changed, dim, axes, MESH).simplified(MESH) == layout.simplified(MESH)


@SOME
@given(st.data())
def test_what_is_reduced_was_partial(data: Any) -> None:
    layout = data.draw(layouts_on(MESH, 2, reductions=("sum", "max")))
    for axes in AXES:
        try:
            reduced = without_partial(layout, axes, layout.reduction, MESH)
        except ShardirError:
            continue
        again = more_partial(reduced, axes, layout.reduction, MESH)
        assert again.simplified(MESH) == layout.simplified(MESH)


def test_transposed_collectives_go_back() -> None:
    """Gradients of replicated values are partial, and those of partial ones replicated."""
    dual = {AxisState.REPLICATED: AxisState.PARTIAL, AxisState.PARTIAL: AxisState.REPLICATED}
    for record in COLLECTIVES.values():
        if record.transposed and record.planned and record.start and record.end:
            back = COLLECTIVES[record.transposed]
            assert back.start == dual.get(record.end, record.end), record.name
            assert back.end == dual.get(record.start, record.start), record.name
