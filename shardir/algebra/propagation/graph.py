"""The graph that propagation runs on: values and nodes, which are named by their indices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardir.algebra.factors import FactorAxes, Factors, OpSharding
from shardir.algebra.layout import Shape
from shardir.algebra.mesh import Mesh
from shardir.algebra.sharding import Sharding


class GraphValue(NamedTuple):
    """A tensor."""

    shape: Shape
    annotation: Sharding | None = None
    is_input: bool = False
    """Whether it may be split along dimension 0 where nothing reaches it."""
    is_parameter: bool = False
    """Whether it proposes axes only after activations have, or before them."""
    itemsize: int = 4
    """The bytes of an element."""
    is_active: bool = False
    """Whether its cotangent is to be computed."""
    is_bundled: bool = False
    """Whether it is a gradient that is reduced in a bucket with others; of a parameter with a
    cotangent, whether that is."""


def _no_time(axes: FactorAxes) -> float:
    return 0.0


class Node(NamedTuple):
    """An op on values. Without factors nothing propagates through it."""

    operands: tuple[int, ...]
    results: tuple[int, ...]
    factors: Factors | None = None
    strategy: OpSharding | None = None
    """In place of factors: the sharding that the node's strategy determines."""
    forward: bool = True
    """Whether its operands propose axes."""
    backward: bool = True
    """Whether its results do."""
    decomposes: bool = False
    """Whether it is replaced by others, which redistribute its operands for themselves alone."""
    seconds: Callable[[FactorAxes], float] = _no_time
    """The time to compute it with these axes."""


class Tie(NamedTuple):
    """Two values that have one sharding where they can, by a node."""

    value: int
    other: int
    node: int


@dataclass(frozen=True)
class PropagationGraph:
    """Values and nodes; a node stands after those that produce its operands."""

    mesh: Mesh
    values: Sequence[GraphValue]
    nodes: Sequence[Node]
    groups: Sequence[Mapping[int, int]] = ()
    """Values that have one sharding, each with the node that puts it into the group; no value is in
    two groups."""
    ties: Sequence[Tie] = ()

    @cached_property
    def touching(self) -> list[list[int]]:
        """Per value, the node that produces it, then those that use it."""
        found: list[list[int]] = [[] for _ in self.values]
        for i, node in enumerate(self.nodes):
            for v in dict.fromkeys((*node.results, *node.operands)):
                found[v].append(i)
        return found

    @cached_property
    def levels(self) -> list[int]:
        """Per node, the number of nodes on the longest path to it."""
        producer: dict[int, int] = {}
        levels: list[int] = []
        for i, node in enumerate(self.nodes):
            levels.append(1 + max((levels[producer[v]] for v in node.operands if v in producer),
                                  default=0))  # fmt: skip
            producer.update(dict.fromkeys(node.results, i))
        return levels
