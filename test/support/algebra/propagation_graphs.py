"""Graphs of propagation, written as text."""

import re

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Mesh
from shardir.algebra.notation import mesh_of, parse_sharding
from shardir.algebra.propagation import propagate
from shardir.algebra.propagation.graph import GraphValue, Node, PropagationGraph, Tie

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
