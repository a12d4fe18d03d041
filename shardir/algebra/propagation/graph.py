"""The graph of a propagation: values and nodes, which other records name by index."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardir.algebra.factors import FactorAxes, Factors, OpSharding
from shardir.algebra.layout import Shape
from shardir.algebra.mesh import Mesh
from shardir.algebra.sharding import Sharding


class GraphValue(NamedTuple):
    """A tensor.

    Attributes:
        is_input: it may be split along dimension 0 if no axes reach it.
        is_parameter: it proposes axes after activations, or before them.
        itemsize: the bytes of an element.
        is_active: its cotangent is computed.
        is_bundled: it is a gradient that is reduced in a bucket with others; or a parameter whose
            cotangent is one.
    """

    shape: Shape
    annotation: Sharding | None = None
    is_input: bool = False
    is_parameter: bool = False
    itemsize: int = 4
    is_active: bool = False
    is_bundled: bool = False


def _no_time(axes: FactorAxes) -> float:
    return 0.0


class Node(NamedTuple):
    """An op on values.

    Attributes:
        factors: None for an op through which no axes propagate.
        strategy: instead of factors, the sharding that the node's strategy determines.
        forward: operands propose axes.
        backward: results propose axes.
        decomposes: other ops replace it, and redistribute its operands for themselves.
        seconds: axes of factors -> seconds of its computation.
    """

    operands: tuple[int, ...]
    results: tuple[int, ...]
    factors: Factors | None = None
    strategy: OpSharding | None = None
    forward: bool = True
    backward: bool = True
    decomposes: bool = False
    seconds: Callable[[FactorAxes], float] = _no_time


class Tie(NamedTuple):
    """Two values that a node shards equally if their annotations allow it."""

    value: int
    other: int
    node: int


@dataclass(frozen=True)
class PropagationGraph:
    """Values and nodes. A node stands after the producers of its operands.

    Attributes:
        groups: disjoint sets of values with one sharding, each value with the node that puts it
            into the group.
    """

    mesh: Mesh
    values: Sequence[GraphValue]
    nodes: Sequence[Node]
    groups: Sequence[Mapping[int, int]] = ()
    ties: Sequence[Tie] = ()

    @cached_property
    def touching(self) -> list[list[int]]:
        """By value, its producer and its users."""
        nodes: list[list[int]] = [[] for _ in self.values]
        for i, node in enumerate(self.nodes):
            for v in dict.fromkeys((*node.results, *node.operands)):
                nodes[v].append(i)
        return nodes

    @cached_property
    def levels(self) -> list[int]:
        """By node, the number of nodes on the longest path to it."""
        producer: dict[int, int] = {}
        levels: list[int] = []
        for i, node in enumerate(self.nodes):
            levels.append(1 + max((levels[producer[v]] for v in node.operands if v in producer),
                                  default=0))  # fmt: skip
            producer.update(dict.fromkeys(node.results, i))
        return levels
