"""Layouts, strategies and options are read as they are written."""

from string import ascii_lowercase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import layouts_on, meshes, quick, shapes, sub_axes, with_sizes

from shardir.algebra.layout import REDUCTIONS, LocalLayout
from shardir.algebra.mesh import Axis
from shardir.algebra.notation import (
    options_text,
    parse_axes,
    parse_layout,
    parse_local,
    parse_mesh,
    parse_options,
    parse_strategy,
)
from shardir.algebra.strategy import Strategy
from shardir.diagnostics import NotationError


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
