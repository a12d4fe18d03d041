"""The minimum cut of a graph: Dinic's algorithm ("Algorithm for solution of a problem of maximum
flow in networks with power estimation", 1970), exact for integers.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from itertools import pairwise
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def minimum_cut(edges: Iterable[tuple[Node, Node, float]], source: Node, sink: Node) -> set[Node]:
    """Return the source side of a cut of minimum capacity; of several, the one with the fewest
    nodes.

    Args:
        edges: from, to, and capacity, which is `inf` if no cut may contain the edge. Capacities of
            parallel edges add up. At least one cut has no edge of capacity `inf`.
    """
    left: dict[Node, dict[Node, float]] = {source: {}, sink: {}}
    for a, b, capacity in edges:
        left.setdefault(a, {}).setdefault(b, 0)
        left.setdefault(b, {}).setdefault(a, 0)
        left[a][b] += capacity
    while sink in (level := _levels(left, source)):
        _augment(left, level, source, sink)
    return set(level)


def _levels(left: dict[Node, dict[Node, float]], source: Node) -> dict[Node, int]:
    """Return the nodes reachable in the residual graph, each with its distance in edges."""
    level, queue = {source: 0}, deque([source])
    while queue:
        a = queue.popleft()
        for b, capacity in left[a].items():
            if capacity > 0 and b not in level:
                level[b] = level[a] + 1
                queue.append(b)
    return level


def _augment(
    left: dict[Node, dict[Node, float]], level: dict[Node, int], source: Node, sink: Node
) -> None:
    """Send a blocking flow over edges that lead to the next level."""
    onward = {a: [b for b in left[a] if level.get(b) == level[a] + 1] for a in level}
    path = [source]
    while path:
        a = path[-1]
        if a == sink:
            steps = list(pairwise(path))
            amount = min(left[x][y] for x, y in steps)
            for x, y in steps:
                left[x][y] -= amount
                left[y][x] += amount
            path = path[: next(i for i, (x, y) in enumerate(steps) if not left[x][y]) + 1]
        elif not onward[a]:
            path.pop()
            if path:
                onward[path[-1]].pop()
        elif left[a][onward[a][-1]]:
            path.append(onward[a][-1])
        else:
            onward[a].pop()
