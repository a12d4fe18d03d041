"""Cycles of graphs, which show that some orders cannot run."""

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def add_orders(after: dict[Node, set[Node]], orders: Iterable[Sequence[Node]]) -> None:
    """Add an edge from each node of each order to the next one."""
    for order in orders:
        for a, b in pairwise(order):
            after[a].add(b)


def find_cycle(after: Mapping[Node, Iterable[Node]]) -> list[Node]:
    """Return the nodes of a short cycle of a graph, each with an edge to the next one, the last to
    the first; empty if there is none.

    It is the shortest through one of the nodes, which is found in time linear in nodes and edges.
    """
    left = {n: 0 for n in after}
    for successors in after.values():
        for n in successors:
            left[n] += 1
    ready = [n for n, count in left.items() if not count]
    while ready:
        n = ready.pop()
        del left[n]
        for successor in after[n]:
            left[successor] -= 1
            if not left[successor]:
                ready.append(successor)
    if not left:
        return []
    before: dict[Node, Node] = {b: a for a in left for b in after[a] if b in left}
    start, passed = next(iter(left)), set()
    while start not in passed:  # each node that is left has one before it
        passed.add(start)
        start = before[start]
    return _shortest(after, left, start)


def _shortest(
    after: Mapping[Node, Iterable[Node]], among: Mapping[Node, int], start: Node
) -> list[Node]:
    """Return the shortest cycle through a node that is on one, by breadth-first search."""
    reached: dict[Node, Node] = {}
    queue = deque([start])
    while start not in reached:
        a = queue.popleft()
        for b in after[a]:
            if b in among and b not in reached:
                reached[b] = a
                queue.append(b)
    found = [reached[start]]
    while found[-1] != start:
        found.append(reached[found[-1]])
    return found[::-1]


def shortened(cycle: Sequence[Node], places: Sequence[Hashable]) -> str:
    """Return `0B0 -> 0F1 -> 1F1 -> ... -> 0B0`: of successive nodes in one place the two ends."""
    shown: list[str] = []
    for _, run in groupby(zip(places, cycle, strict=True), key=lambda pair: pair[0]):
        nodes = [str(n) for _, n in run]
        shown += nodes if len(nodes) < 3 else [nodes[0], nodes[-1]]
    return " -> ".join([*shown, shown[0]])
