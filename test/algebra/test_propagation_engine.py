"""Propagation on graphs of plain values: each number of its contract."""

import pytest
from support.algebra.propagation_graphs import MESH, Writer

from shardir.algebra.factors import Factors
from shardir.algebra.notation import parse_layout, parse_sharding
from shardir.algebra.op_sharding import choose_op_sharding
from shardir.algebra.propagation.annotations import ContradictionError
from shardir.algebra.propagation.graph import Node, Tie


def test_a_product_takes_what_its_operands_have():
    w = Writer()
    w.value("x", (8, 4), "[{dp}, {}]")
    w.value("w", (4, 6), "[{}, {tp}]")
    w.value("y", (8, 6))
    w.node("x, w -> y", "i k, k j -> i j")
    assert w.run()["y"] == "[{dp}, {tp}]"


def chain() -> Writer:
    """y = x a, z = y b, and t = z + z."""
    w = Writer()
    w.value("x", (8, 4), is_input=True)
    w.value("a", (4, 6))
    w.value("b", (6, 4))
    for name, shape in (("y", (8, 6)), ("z", (8, 4)), ("t", (8, 4))):
        w.value(name, shape)
    w.node("x, a -> y", "i k, k j -> i j")
    w.node("y, b -> z", "i k, k j -> i j")
    w.node("z, z -> t", "i j, i j -> i j")
    return w


def annotate(w: Writer, name: str, annotation: str) -> None:
    v = w.names.index(name)
    w.values[v] = w.values[v]._replace(annotation=parse_sharding(f"@m, {annotation}"))


@pytest.mark.parametrize("name", ["x", "y", "z", "t"])
def test_axes_propagate_forward_and_backward(name: str):
    """The batch's axis, from whichever value, reaches all that have the batch, and nothing else."""
    w = chain()
    annotate(w, name, "[{dp}, {?}]")
    found = w.run()
    assert [found[n] for n in "xyzt"] == ["[{dp}, {}]"] * 4
    assert found["a"] == found["b"] == "[{}, {}]"


def test_closed_dimensions_stay_and_open_ones_are_refined():
    w = chain()
    annotate(w, "x", "[{dp}, {tp}]")
    annotate(w, "y", "[{}, {?}]")
    annotate(w, "z", "[{dp, ?}, {}]")
    annotate(w, "t", "[{dp, tp}, {}]")
    found = w.run()
    assert (found["x"], found["y"]) == ("[{dp}, {tp}]", "[{}, {}]")
    assert found["z"] == "[{dp, tp}, {}]"
    assert found["a"] == "[{tp}, {}]"


def test_an_excluded_axis_splits_nothing():
    w = chain()
    annotate(w, "x", "[{dp}, {}]")
    annotate(w, "z", "[{?}, {?}], replicated {dp}")
    assert w.run() == {
        **dict.fromkeys("xy", "[{dp}, {}]"),
        **dict.fromkeys("abzt", "[{}, {}]"),
    }


def test_an_axis_splits_one_dimension_of_a_value():
    w = Writer()
    w.value("x", (8, 4), "[{}, {dp}]")
    w.value("y", (8, 8), "[{dp}, {?}]")
    w.value("z", (4, 8))
    w.node("x, y -> z", "i k, i j -> k j")
    found = w.run()
    assert found["y"] == "[{dp}, {}]" and found["z"] == "[{dp}, {}]"


@pytest.mark.parametrize("is_parameter", [True, False])
def test_parameters_propose_after_activations(is_parameter: bool):
    """x is small, so it is gathered for w, unless w is a parameter."""
    w = Writer()
    w.value("x", (2, 64), "[{dp}, {}]")
    w.value("w", (64, 1024), "[{}, {dp}]", is_parameter=is_parameter)
    w.value("y", (2, 1024))
    w.node("x, w -> y", "i k, k j -> i j")
    assert w.run()["y"] == ("[{dp}, {}]" if is_parameter else "[{}, {dp}]")


def test_a_priority_takes_part_after_lower_ones():
    for late, expected in (("y", "[{dp}, {}]"), ("x", "[{tp}, {}]")):
        w = Writer()
        w.value("x", (8, 4), "[{dp}p1, {}]" if late == "x" else "[{dp}, {}]")
        w.value("y", (8, 4), "[{tp}p1, {}]" if late == "y" else "[{tp}, {}]")
        w.value("z", (8, 4))
        w.node("x, y -> z", "i j, i j -> i j")
        assert w.run()["z"] == expected


@pytest.mark.parametrize(
    ("n", "expected"), [(1024, "[{dp}, {}]"), (2, "[{}, {dp}]")], ids=["a long x", "a long w"]
)
def test_a_conflict_is_resolved_for_the_cheapest(n: int, expected: str):
    """x and w want one axis for i and for j of y: the smaller of them is gathered."""
    w = Writer()
    w.value("x", (n, 64), "[{dp}, {}]")
    w.value("w", (64, 1026 - n), "[{}, {dp}]")
    w.value("y", (n, 1026 - n))
    node = w.node("x, w -> y", "i k, k j -> i j")
    assert w.run()["y"] == expected
    alternatives = w.state.node_conflicts[node]
    costs = [a.seconds for a in alternatives]
    assert len(alternatives) == 2 and costs == sorted(costs) and costs[0] < costs[1]
    granted = [dict(a.granted) for a in alternatives]
    assert ("i" in granted[0]) == (expected == "[{dp}, {}]") and granted[0] != granted[1]


def test_a_conflict_for_a_value_is_resolved_among_the_nodes_that_use_it():
    """Two users of one level want v split otherwise; what each gets does not depend on which of
    them stands first."""
    found = []
    for order in (1, -1):
        w = Writer()
        w.value("v", (8, 8))
        w.value("a", (8, 8), "[{dp}, {}]")
        w.value("b", (8, 8), "[{}, {dp}]")
        w.value("x", (8, 8))
        w.value("y", (8, 8))
        for text in ("v, a -> x", "v, b -> y")[::order]:
            w.node(text, "i j, i j -> i j")
        found.append(w.run())
        assert len(w.state.value_conflicts[0]) == 2
    assert found[0] == found[1] and found[0]["v"] == "[{dp}, {}]"


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("name", ["x", "y"])
def test_a_barrier_passes_axes_in_its_directions(name: str, forward: bool, backward: bool):
    w = Writer()
    w.value("x", (8,))
    w.value("y", (8,))
    w.node("x -> y", "i -> i", forward=forward, backward=backward)
    annotate(w, name, "[{dp}]")
    passes = forward if name == "x" else backward
    assert w.run() == {**dict.fromkeys("xy", "[{dp}]" if passes else "[{}]"), name: "[{dp}]"}


def test_a_group_has_one_sharding():
    w = chain()
    w.value("u", (8, 4))
    w.value("v", (8, 4))
    w.node("u -> v", "i j -> i j")
    w.group("t", "u")
    annotate(w, "x", "[{dp}, {}]")
    found = w.run()
    assert found["t"] == found["u"] == found["v"] == "[{dp}, {}]"
    assert w.state.provenance[w.names.index("u"), 0].kind == "group"


def test_annotations_of_a_group_meet_or_contradict():
    w = Writer()
    for name, annotation in (("x", "[{dp, ?}, {}]"), ("y", "[{dp, tp}, {}]"), ("z", "")):
        w.value(name, (8, 4), annotation)
    w.group("x", "y", "z")
    assert w.run() == dict.fromkeys("xyz", "[{dp, tp}, {}]")
    annotate(w, "z", "[{?}, {tp}]")
    with pytest.raises(ContradictionError) as e:
        w.run()
    (found,) = e.value.contradictions
    assert (w.names[found.value], w.names[found.other]) == ("z", "x")
    assert found.node == w.groups[0][found.value]


def test_tied_values_have_one_sharding_where_they_can():
    w = Writer()
    w.value("w", (8, 4), "[{dp}, {}]", is_parameter=True)
    w.value("new", (8, 4))
    w.value("other", (8, 4), "[{}, {tp}]")
    w.value("scalar", ())
    w.nodes.append(Node((0,), (1, 2, 3)))
    w.ties += [Tie(0, v, 0) for v in (1, 2, 3)]
    found = w.run()
    assert found["new"] == "[{dp}, {}]" and found["other"] == "[{}, {tp}]"
    assert w.state.is_parameter[1] and not w.state.is_parameter[2]


def test_a_strategy_determines_results_and_proposes_operands():
    w = Writer()
    w.value("x", (8, 4))
    w.value("w", (4, 6), "[{}, {}]")
    w.value("y", (8, 6))
    n = w.node("x, w -> y", "i k, k j -> i j")
    want = tuple(parse_layout(f"@m, {t}") for t in ("[{dp}, {}]", "[{}, {tp}]", "[{dp}, {tp}]"))
    factors = w.nodes[n].factors
    assert factors is not None
    shapes = ((8, 4), (4, 6), (8, 6))
    strategy = choose_op_sharding(factors, want[:2], want[2:], MESH, shapes, (4, 4, 4))
    w.nodes[n] = w.nodes[n]._replace(factors=None, strategy=strategy)
    assert w.run() == {"x": "[{dp}, {}]", "w": "[{}, {}]", "y": "[{dp}, {tp}]"}
    annotate(w, "y", "[{}, {}]")
    assert w.run()["y"] == "[{}, {}]"


def test_inputs_that_nothing_reaches_are_split():
    """Over what divides their dimension 0, and that nothing else uses."""
    assert chain().run()["x"] == "[{dp, tp}, {}]"
    w = chain()
    annotate(w, "b", "[{tp}, {}]")
    assert w.run()["t"] == w.run()["x"] == "[{dp}, {}]"
    w = chain()
    w.values = [v._replace(shape=(2, *v.shape[1:])) if v.shape[0] == 8 else v for v in w.values]
    assert w.run()["x"] == "[{dp}, {}]"
    annotate(w, "x", "[{}, {}]")
    assert w.run() == dict.fromkeys("xabyzt", "[{}, {}]")


def test_the_path_of_axes_leads_to_where_they_come_from():
    w = chain()
    annotate(w, "t", "[{dp}, {}]")
    w.run()
    path = w.state.path(w.names.index("x"), 0)
    assert [(w.names[v], d, found.kind, found.node) for v, d, found in path] == [
        ("x", 0, "factors", 0), ("y", 0, "factors", 1), ("z", 0, "factors", 2),
        ("t", 0, "annotation", None),
    ]  # fmt: skip


def test_a_long_chain_has_a_path():
    w = Writer()
    w.value("v0", (8,), "[{dp}]")
    for i in range(3000):
        w.value(f"v{i + 1}", (8,))
        w.nodes.append(Node((i,), (i + 1,), Factors.of([["i"]], [["i"]], [(8,), (8,)])))
    assert w.run()["v3000"] == "[{dp}]"
    assert len(w.state.path(3000, 0)) == 3001
