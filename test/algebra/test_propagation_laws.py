"""Laws of propagation on random graphs."""

import random
from dataclasses import replace
from itertools import product
from math import prod

import pytest
from support.algebra.propagation_graphs import Writer, merged
from support.extent import extent

from shardir.algebra.factors import Factors, try_op_sharding
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes
from shardir.algebra.notation import mesh_of
from shardir.algebra.propagation import propagate
from shardir.algebra.propagation.graph import Node, PropagationGraph, Tie
from shardir.algebra.propagation.worklist import Worklist
from shardir.algebra.sharding import Sharding, refines

THREE = mesh_of("m", "a = 2, b = 2, c = 2")
FORMS = [
    "i j -> i j", "i j -> j i", "i j, i j -> i j", "i k, k j -> i j", "i j -> i", "i -> i j",
    "(i j) -> i j", "i j -> (i j)", "b i k, b k j -> b i j", "b i j -> i b j", "b (i j) -> b i j",
    "(i j) k -> i (j k)",
]  # fmt: skip
SEEDS = range(extent(20, 200))


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


@pytest.mark.parametrize("seed", [*SEEDS, 188])
def test_the_order_of_nodes_with_strategies_does_not_matter(seed: int):
    """With seed 188 two users need a result in layouts of equal estimated times."""
    graph = products(seed)
    dims = propagate(graph).dims
    for n in range(2):
        nodes = [graph.nodes[i] for i in topological(graph, random.Random(n))]
        assert propagate(replace(graph, nodes=nodes)).dims == dims


def products(seed: int) -> PropagationGraph:
    """Three products with strategies, and four nodes that use them."""
    draw, w, names = random.Random(seed), Writer(THREE), ["p", "q", "r"]
    for name in ("x", "w", *names):
        w.value(name, (16, 16))
    for name in names:
        n = w.node(f"x, w -> {name}", "i k, k j -> i j")
        factors, chosen = w.nodes[n].factors, dict[str, Axes]()
        assert factors is not None
        for a in THREE.names:
            f = draw.choice("ijkk")
            chosen[f] = (*chosen.get(f, ()), a)
        w.nodes[n] = w.nodes[n]._replace(
            factors=None, strategy=try_op_sharding(factors, chosen, THREE)
        )
    for name in "abcd":
        w.value(name, (16, 16))
        if draw.random() < 0.3:
            w.values[-1] = w.values[-1]._replace(annotation=random_sharding(draw, 2))
        text = f"{draw.choice(names)}, {draw.choice(names)} -> {name}"
        w.node(text, draw.choice(["i j, i j -> i j", "i k, k j -> i j", "i j, j i -> i j"]))
        names.append(name)
    return w.graph()


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


@pytest.mark.parametrize("seed", SEEDS)
def test_each_source_of_axes_has_them(seed: int):
    """Also where results of strategies got other layouts, and in mixtures of two propagations."""
    draw = random.Random(seed)
    for graph in (random_graph(seed), products(seed)):
        first, other = propagate(graph), propagate(graph, parameters_first=True)
        differing = [v for v, dims in enumerate(first.dims) if dims != other.dims[v]]
        mixture = first.mixed(other, [v for v in differing if draw.random() < 0.5])
        for state in (first, other, mixture):
            for v, d in ((v, d) for v, dims in enumerate(state.dims) for d in range(len(dims))):
                for w, e, origin in state.path(v, d):
                    axes, annotation = state.dims[w][e], graph.values[w].annotation
                    for s in origin.sources:
                        shared = product(axes, state.dims[s.value][s.dim])
                        assert any(THREE.overlap(a, b) for a, b in shared)
                    if origin.kind == "annotation":
                        assert annotation is not None
                        assert refines(axes, annotation.layout.dims[e], THREE)
                    if origin.kind == "strategy":
                        node = graph.nodes[origin.node or 0]
                        assert node.strategy is not None
                        found = zip(
                            (*node.operands, *node.results),
                            (*node.strategy.operands, *node.strategy.results), strict=True,
                        )  # fmt: skip
                        assert axes in [l.dims[e] for x, l in found if x == w]
