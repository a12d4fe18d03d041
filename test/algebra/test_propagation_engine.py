"""Propagation on graphs of plain values: each number of its contract, laws on random graphs."""

import random
import re
from dataclasses import replace
from math import prod

import pytest

from shardir.algebra.factors import Factors, choose_op_sharding
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Mesh
from shardir.algebra.notation import mesh_of, parse_layout, parse_sharding
from shardir.algebra.propagation import propagate
from shardir.algebra.propagation.annotations import ContradictionError
from shardir.algebra.propagation.graph import GraphValue, Node, PropagationGraph, Tie
from shardir.algebra.propagation.worklist import Worklist
from shardir.algebra.sharding import Sharding, refines

MESH = mesh_of("m", "dp = 2, tp = 2")


class Writer:
    """Writes a graph; values are named by letters, as in the notation of einsum."""

    def __init__(self, mesh: Mesh = MESH):
        self.mesh = mesh
        self.names: list[str] = []
        self.values: list[GraphValue] = []
        self.nodes: list[Node] = []
        self.groups: list[dict[int, int]] = []
        self.ties: list[Tie] = []

    def value(self, name: str, shape: Shape, annotation: str = "", **flags: bool) -> int:
        sharding = parse_sharding(f"@m, {annotation}") if annotation else None
        self.names.append(name)
        self.values.append(GraphValue(shape, sharding, **flags))
        return len(self.values) - 1

    def node(self, text: str, factors: str, forward: bool = True, backward: bool = True) -> int:
        """`x, w -> y` with the factors `i k, k j -> i j`; a merged dimension is `(a b)`."""
        (xs, ys), (fs, rs) = self.sides(text), self.sides(factors)
        dims = [[*map(" ".join, merged(v))] for v in (*fs, *rs)]
        n = len(fs)
        shapes = [self.values[v].shape for v in (*self.find(xs), *self.find(ys))]
        made = Factors.of(dims[:n], dims[n:], shapes, linear="any")
        self.nodes.append(Node(self.find(xs), self.find(ys), made, None, forward, backward))
        return len(self.nodes) - 1

    @staticmethod
    def sides(text: str) -> tuple[list[str], ...]:
        return tuple([v.strip() for v in side.split(",")] for side in text.split("->"))

    def find(self, names: list[str]) -> tuple[int, ...]:
        return tuple(map(self.names.index, names))

    def group(self, *names: str) -> None:
        """Puts values into a group, each by a node of its own."""
        members = {}
        for v in self.find([*names]):
            self.nodes.append(Node((v,), ()))
            members[v] = len(self.nodes) - 1
        self.groups.append(members)

    def graph(self) -> PropagationGraph:
        return PropagationGraph(self.mesh, self.values, self.nodes, self.groups, self.ties)

    def run(self) -> dict[str, str]:
        """The layout of each value, as text."""
        self.state = propagate(self.graph())
        return {
            name: str(Layout("m", dims)).removeprefix("@m, ")
            for name, dims in zip(self.names, self.state.dims, strict=True)
        }


def merged(text: str) -> list[list[str]]:
    """`i (a b)` -> [[i], [a, b]]."""
    return [found.split() for found in re.findall(r"(?<=\()[^)]*|\w+(?![^(]*\))", text)]


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


# ---- laws, on random graphs ----

THREE = mesh_of("m", "a = 2, b = 2, c = 2")
FORMS = [
    "i j -> i j", "i j -> j i", "i j, i j -> i j", "i k, k j -> i j", "i j -> i", "i -> i j",
    "(i j) -> i j", "i j -> (i j)", "b i k, b k j -> b i j", "b i j -> i b j", "b (i j) -> b i j",
    "(i j) k -> i (j k)",
]  # fmt: skip
SEEDS = range(60)


def random_graph(seed: int) -> PropagationGraph:
    """A dozen nodes; some annotations, closed and open, late and early; groups, ties, barriers."""
    draw = random.Random(seed)
    w = Writer(THREE)
    for _ in range(draw.randint(6, 16)):
        operands, results = w.sides(draw.choice(FORMS))
        sizes: dict[str, int] = {}
        chosen: list[int] = []
        for text in operands:
            dims = merged(text)
            fits = [
                v for v, value in enumerate(w.values)
                if len(value.shape) == len(dims) and all(
                    len(d) == 1 and sizes.get(d[0], n) == n
                    for d, n in zip(dims, value.shape, strict=True)
                )
            ]  # fmt: skip
            if fits and draw.random() < 0.8:
                chosen.append(draw.choice(fits))
                sizes |= {d[0]: n for d, n in zip(dims, w.values[chosen[-1]].shape, strict=True)}
                continue
            for f in (f for d in dims for f in d):
                sizes.setdefault(f, draw.choice((2, 4, 8)))
            chosen.append(w.value(f"x{len(w.values)}", shape_of(dims, sizes), is_input=True))
            if draw.random() < 0.3:
                w.values[-1] = w.values[-1]._replace(is_input=False, is_parameter=True)
        made = []
        for text in results:
            for f in (f for d in merged(text) for f in d):
                sizes.setdefault(f, draw.choice((2, 4, 8)))
            made.append(w.value(f"y{len(w.values)}", shape_of(merged(text), sizes)))
        dims = [[*map(" ".join, merged(t))] for t in (*operands, *results)]
        factors = Factors.of(
            dims[: len(operands)], dims[len(operands) :],
            [w.values[v].shape for v in (*chosen, *made)],
        ).with_sizes(sizes)  # fmt: skip
        barrier = draw.random() < 0.15
        w.nodes.append(Node(
            tuple(chosen), tuple(made), factors,
            forward=not barrier or draw.random() < 0.5, backward=not barrier or draw.random() < 0.5,
        ))  # fmt: skip
    for v, value in enumerate(w.values):
        if draw.random() < 0.4:
            w.values[v] = value._replace(annotation=random_sharding(draw, len(value.shape)))
    equal_shapes = [v for v, value in enumerate(w.values) if value.shape == w.values[-1].shape]
    unannotated = [v for v in equal_shapes if w.values[v].annotation is None]
    if len(unannotated) > 1:
        w.nodes += [Node((v,), ()) for v in unannotated[:2]]
        w.groups.append({unannotated[0]: len(w.nodes) - 2, unannotated[1]: len(w.nodes) - 1})
    if len(equal_shapes) > 1 and draw.random() < 0.5:
        w.nodes.append(Node((), ()))
        w.ties.append(Tie(equal_shapes[0], equal_shapes[-1], len(w.nodes) - 1))
    return w.graph()


def shape_of(dims: list[list[str]], sizes: dict[str, int]) -> Shape:
    return tuple(prod(sizes[f] for f in d) for d in dims)


def random_sharding(draw: random.Random, rank: int) -> Sharding:
    axes = list(THREE.names)
    draw.shuffle(axes)
    dims = [
        tuple([axes.pop() for _ in range(draw.choice((0, 0, 1, 1, 2))) if axes])
        for _ in range(rank)
    ]
    return Sharding(
        Layout("m", tuple(dims)),
        frozenset(d for d in range(rank) if draw.random() < 0.5),
        tuple(draw.choice((0, 0, 1)) for _ in range(rank)),
        tuple(axes[:1]) if axes and draw.random() < 0.3 else (),
    ).simplified(THREE)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_result_is_a_fixed_point(seed: int):
    graph = random_graph(seed)
    state = propagate(graph)
    before = list(state.dims)
    assert not Worklist(state).visit(range(len(graph.nodes)))
    assert state.dims == before


@pytest.mark.parametrize("seed", SEEDS)
def test_values_are_only_refined(seed: int):
    """Closed dimensions stay; open ones are split further, over axes that are free for it."""
    graph = random_graph(seed)
    state = propagate(graph)
    for v, value in enumerate(graph.values):
        used = tuple(a for axes in state.dims[v] for a in axes)
        assert THREE.clash(used) is None
        if (annotation := value.annotation) is None:
            continue
        for d, (axes, mine) in enumerate(zip(state.dims[v], annotation.layout.dims, strict=True)):
            assert axes == mine or (d in annotation.open and refines(axes, mine, THREE))
        assert THREE.clash((*used, *annotation.replicated)) is None
    for members in graph.groups:
        assert len({state.dims[v] for v in members}) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_propagation_is_idempotent(seed: int):
    """Its result, as annotations that are as open as before, is its result again, if all values
    propose at once. (A late proposal may lose a conflict that it would win as an early one.)"""
    graph = random_graph(seed)
    values = [
        value._replace(
            is_parameter=False,
            annotation=value.annotation and replace(value.annotation, priorities=()),
        )
        for value in graph.values
    ]
    dims = propagate(replace(graph, values=values)).dims
    for v, mine in enumerate(dims):
        old = values[v].annotation or Sharding(Layout("m", mine), frozenset(range(len(mine))))
        values[v] = values[v]._replace(annotation=replace(old, layout=Layout("m", mine)))
    assert propagate(replace(graph, values=values)).dims == dims


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_values_and_nodes_does_not_matter(seed: int):
    graph = random_graph(seed)
    draw = random.Random(seed)
    order = topological(graph, draw)
    names = list(range(len(graph.values)))
    draw.shuffle(names)  # value v becomes names[v]
    inputs = [v for v, value in enumerate(graph.values) if value.is_input]
    for v, name in zip(inputs, sorted(names[v] for v in inputs), strict=True):
        names[v] = name  # these stay in their order
    place = {n: i for i, n in enumerate(order)}
    values = [v for _, v in sorted(zip(names, graph.values, strict=True), key=lambda p: p[0])]
    nodes = [
        graph.nodes[n]._replace(
            operands=tuple(names[v] for v in graph.nodes[n].operands),
            results=tuple(names[v] for v in graph.nodes[n].results),
        )
        for n in order
    ]
    groups = [
        {names[v]: place[n] for v, n in sorted(g.items(), key=lambda p: names[p[0]])}
        for g in graph.groups
    ]
    ties = [Tie(names[t.value], names[t.other], place[t.node]) for t in graph.ties]
    found = propagate(PropagationGraph(THREE, values, nodes, groups, ties)).dims
    assert [found[names[v]] for v in range(len(values))] == propagate(graph).dims


def topological(graph: PropagationGraph, draw: random.Random) -> list[int]:
    """Another order of the nodes in which each stands after those that produce its operands."""
    producer = {v: n for n, node in enumerate(graph.nodes) for v in node.results}
    left, order = list(range(len(graph.nodes))), list[int]()
    while left:
        ready = [
            n for n in left if all(producer.get(v) not in left for v in graph.nodes[n].operands)
        ]
        order.append(draw.choice(ready))
        left.remove(order[-1])
    return order


@pytest.mark.parametrize("seed", SEEDS)
def test_every_split_dimension_has_a_path(seed: int):
    """It ends at annotations and inputs, whose axes are part of what it explains."""
    graph = random_graph(seed)
    state = propagate(graph)
    for v, dims in enumerate(state.dims):
        for d, axes in enumerate(dims):
            path = state.path(v, d)
            assert bool(axes) == bool(path)
            if axes:
                assert {"annotation", "input"} & {found.kind for _, _, found in path}
