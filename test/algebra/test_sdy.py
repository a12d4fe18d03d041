"""Shardings and meshes in Shardy's text: the same layouts, nothing lost, clear errors."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import extent

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axis, Mesh
from shardir.algebra.notation import parse_layout
from shardir.algebra.sdy import Sharding, from_sdy, mesh_from_sdy, mesh_to_sdy, to_sdy
from shardir.diagnostics import NotationError, ShardirError

MESH = Mesh("m", (("x", 2), ("y", 8), ("z", 2), ("w", 1)))
X, Y, Z = Axis("x"), Axis("y"), Axis("z")

LAYOUTS = {
    "@m, []": "#sdy.sharding<@m, []>",
    "@m, [{}, {}]": "#sdy.sharding<@m, [{}, {}]>",
    "@m, [{x}, {z, y}]": '#sdy.sharding<@m, [{"x"}, {"z", "y"}]>',
    "@m, [{x}, {y:(2)2}]": '#sdy.sharding<@m, [{"x"}, {"y":(2)2}]>',
    "@m, [{y:(4)2, y:(1)4}]": '#sdy.sharding<@m, [{"y":(4)2, "y":(1)4}]>',
    "@m, [{y:(1)2, y:(2)4}]": '#sdy.sharding<@m, [{"y"}]>',
    "@m, [{x}], partial sum {z, y:(2)4}": ('#sdy.sharding<@m, [{"x"}], unreduced={"y":(2)4, "z"}>'),
    "@m, [{x}], partial max {y:(2)4}": '#sdy.sharding<@m, [{"x"}], unreduced=max{"y":(2)4}>',
    "@m, [], partial min {x, z}": '#sdy.sharding<@m, [], unreduced=min{"x", "z"}>',
    "@m, [], partial sum {x, y, z}": '#sdy.sharding<@m, [], unreduced={"x", "y", "z"}>',
}
"""The texts on the right are what Shardy's own parser prints."""


@pytest.mark.parametrize(("ours", "theirs"), LAYOUTS.items())
def test_layouts(ours: str, theirs: str) -> None:
    layout = parse_layout(ours)
    assert to_sdy(layout, MESH) == theirs
    assert from_sdy(theirs, MESH) == Sharding(layout.simplified(MESH))
    assert from_sdy(theirs.removeprefix("#sdy.sharding"), MESH).layout == layout.simplified(MESH)


def test_annotations_that_a_layout_has_not() -> None:
    text = (
        '#sdy.sharding<@m, [{"x", ?}p2, {?}, {"z"}], replicated={"y":(1)2}, unreduced={"y":(4)2}>'
    )
    sharding = from_sdy(text, MESH)
    assert sharding.layout == parse_layout("@m, [{x}, {}, {z}], partial sum {y:(4)2}")
    assert sharding.open == {0, 1}
    assert [sharding.priority(i) for i in range(3)] == [2, 0, 0]
    assert sharding.replicated == (Axis("y", 1, 2),)
    assert to_sdy(sharding, MESH) == text


SPELLINGS = {
    '< @m ,[ {"y" : ( 1 ) 2 , ? } p1 ] , unreduced = { "z" } , replicated = { "x" } >': (
        '#sdy.sharding<@m, [{"y":(1)2, ?}p1], replicated={"x"}, unreduced={"z"}>'
    ),
    '<@"m", [{"x"}p0], replicated={"z", "y":(2)4, "y":(1)2}>': (
        '#sdy.sharding<@m, [{"x"}], replicated={"y", "z"}>'
    ),
    '<@m, [{"w"}p1], replicated={}>': "#sdy.sharding<@m, [{}]>",
}


@pytest.mark.parametrize(("text", "shown"), SPELLINGS.items())
def test_one_spelling(text: str, shown: str) -> None:
    assert to_sdy(from_sdy(text, MESH), MESH) == shown


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    sub_axes = [X, Z, Axis("y", 1, 2), Axis("y", 2, 2), Axis("y", 4, 2)]
    rank = draw(st.integers(0, 3))
    places: list[list[Axis]] = [[] for _ in range(rank + 3)]
    for a in draw(st.permutations(sub_axes)):
        places[draw(st.integers(0, rank + 2))].append(a)
    dims, (partial, replicated, _) = places[:rank], places[rank:]
    layout = Layout("m", tuple(map(tuple, dims))).with_partial(tuple(partial))
    is_open = draw(st.frozensets(st.sampled_from(range(rank)))) if rank else frozenset()
    priorities = tuple(
        draw(st.integers(0, 3)) if axes or i in is_open else 0 for i, axes in enumerate(dims)
    )
    return Sharding(layout, is_open, priorities, tuple(replicated)).simplified(MESH)


@settings(max_examples=extent(30, 300), deadline=None, derandomize=True)
@given(shardings())
def test_nothing_is_lost(sharding: Sharding) -> None:
    assert from_sdy(to_sdy(sharding, MESH), MESH) == sharding


WRONG = {
    '<@m, [{?, "x"}]>': (8, "expected a sharding"),
    '<@m, [{"x", }]>': (12, "expected a sharding"),
    '<@m, [{"x"}]': (12, "expected a sharding"),
    '<mesh<["x"=2]>, [{"x"}]>': (1, "expected the name of a mesh, got an inlined mesh"),
    '<@"the mesh", []>': (1, "expected a name of a mesh of letters, digits, _, $ and ."),
    '<@m, [{"a b"}]>': (7, "expected a name of an axis of letters, digits, _, $ and ."),
    '<@m, [], replicated=max{"x"}>': (20, "expected the axes of replicated, got max"),
    '<@m, [], unreduced={}, unreduced={"x"}>': (23, "expected unreduced once in the sharding"),
    "<@other, []>": (None, "expected a sharding of mesh @m, got one of @other"),
    '<@m, [{"q"}]>': (None, "[L2] dimension 0: expected an axis of mesh @m (x, y, z, w), got q"),
    '<@m, [{"y":(3)2}]>': (None, "[L2] dimension 0: sub-axis y:(3)2: expected numbers"),
    '<@m, [{"x"}, {"x"}]>': (None, "[L3] expected axes that do not overlap, got x for"),
    '<@m, [{}p3]>': (None, "got p3; drop the priority, or open the dimension"),
    '<@m, [{"y":(1)4}], replicated={"y":(2)2}>': (
        None, "uses as replicated, got y:(2)2, and y:(1)4 is in use",
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_wrong_shardings(text: str) -> None:
    offset, message = WRONG[text]
    with pytest.raises(ShardirError) as e:
        from_sdy(text, MESH)
    assert message in str(e.value)
    assert getattr(e.value, "offset", None) == offset


def test_explicit_sizes_have_no_text() -> None:
    mesh = Mesh("m", (("a", 2),))
    with pytest.raises(
        ShardirError, match="expected shards of ceil\\(N / n\\) elements, as in Shardy"
    ):
        to_sdy(parse_layout("@m, [{a} sizes [1, 4]]"), mesh)


def test_other_layouts_without_a_text() -> None:
    for reduction in ("mean", "any"):
        layout = parse_layout(f"@m, [{{}}], partial {reduction} {{x}}")
        with pytest.raises(
            ShardirError,
            match=f"expected a partial max, min or sum, as Shardy has, got .*partial {reduction}",
        ):
            to_sdy(layout, MESH)
    with pytest.raises(
        ShardirError, match="expected 1 priorities, one for each dimension, or none, got 2"
    ):
        to_sdy(Sharding(parse_layout("@m, [{x}]"), priorities=(0, 1)), MESH)
    with pytest.raises(ShardirError, match="expected open dimensions from 0 to 0, got 1"):
        to_sdy(Sharding(parse_layout("@m, [{x}]"), open=frozenset({1})), MESH)


def test_meshes() -> None:
    text = 'sdy.mesh @m = <["x"=2, "y"=8, "z"=2, "w"=1]>'
    assert mesh_to_sdy(MESH) == text
    assert mesh_from_sdy(text) == MESH
    ids = ", ".join(map(str, range(32)))
    assert mesh_from_sdy(text.replace("]>", f"], device_ids=[{ids}]>")) == MESH


WRONG_MESHES = {
    "sdy.mesh @m = <[]>": "[M1] expected an axis in mesh @m, got none",
    "sdy.mesh @m = <[], device_ids=[3]>": "[M1] expected an axis in mesh @m, got none",
    'sdy.mesh @m = <["x"=0]>': "expected a size of at least 1 for axis x, got 0",
    'sdy.mesh @m = <["x"=2, "x"=2]>': "expected axis x once in the mesh, got it twice",
    'sdy.mesh @m = <["x"=2, "y"=2], device_ids=[0, 2, 1, 3]>': "to be 0 to 3 in order, got",
    'sdy.mesh @m <["x"=2]>': "expected a mesh",
}


@pytest.mark.parametrize("text", WRONG_MESHES)
def test_wrong_meshes(text: str) -> None:
    with pytest.raises(NotationError) as e:
        mesh_from_sdy(text)
    assert WRONG_MESHES[text] in str(e.value)


def test_every_small_layout_has_its_own_text() -> None:
    mesh = Mesh("m", (("a", 2), ("b", 2)))
    dims = [(), (Axis("a"),), (Axis("b"),), (Axis("a"), Axis("b")), (Axis("b"), Axis("a"))]
    layouts = [
        Layout("m", pair) for pair in itertools.product(dims, dims) if not {*pair[0]} & {*pair[1]}
    ]
    assert len({to_sdy(l, mesh) for l in layouts}) == len(layouts) == 11
