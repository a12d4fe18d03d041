"""The fixed point: nodes are visited level by level, as long as one refines a value.

First all nodes forward, then those that touch a value that was refined. The nodes of a level find
the same values, and what they propose for one value is granted together: so it does not matter
which of them stands first.
"""

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from shardir.algebra.propagation.along_factors import NodeUpdate, OperandState, update
from shardir.algebra.propagation.graph import Node
from shardir.algebra.propagation.state import PropagationState, Provenance, SourceDim
from shardir.algebra.sharding import DimAxes


class Proposal(NamedTuple):
    """The axes that a node proposes for a value."""

    dims: DimAxes
    node: int
    position: int
    """Which of the node's values it is for, operands first."""
    update: NodeUpdate


class Worklist:
    """Iterates a state to its fixed point."""

    def __init__(self, state: PropagationState):
        self.state, self.graph = state, state.graph

    def run(self, nodes: Iterable[int]) -> None:
        """Visit these nodes, then whatever they have an effect on."""
        levels, touching = self.graph.levels, self.graph.touching
        todo = dict.fromkeys(nodes)
        while todo:
            sweep, todo = _Sweep(levels, todo), {}
            for level, batch in sweep:
                for v, by in self.visit(batch):
                    for n in touching[v]:
                        if n == by:
                            continue
                        if levels[n] <= level:
                            todo[n] = None
                        else:
                            sweep.add(n)

    def visit(self, nodes: Iterable[int]) -> list[tuple[int, int | None]]:
        """Return the values that these nodes refine, each with the node that need not be visited
        again for it."""
        state, proposals = self.state, dict[int, list[Proposal]]()
        for n in nodes:
            node = self.graph.nodes[n]
            if node.factors is None:
                continue
            found = update(node.factors, self.operands(node), state.mesh, state.parameters_first)
            (state.refusing.add if found.refuses else state.refusing.discard)(n)
            if found.conflict:
                state.node_conflicts[n] = found.conflict
            touched = (*node.operands, *node.results)
            for i, (v, dims) in enumerate(zip(touched, found.dims, strict=True)):
                mine = state.dims[v]
                if dims is not mine and dims != mine:
                    first = state.members[v][0]
                    proposals.setdefault(first, []).append(Proposal(dims, n, i, found))
        refined: list[tuple[int, int | None]] = []
        for first, of_value in proposals.items():
            members, before = state.members[first], state.dims[first]
            dims = state.granted(first, [p.dims for p in of_value])
            state.assign(first, dims)
            for p in of_value:
                for d, axes in enumerate(dims):
                    if axes == p.dims[d] != before[d]:
                        self.record(p, d)
            alone = of_value[0].node if len(of_value) == len(members) == 1 else None
            refined += [(v, alone) for v in members]
        return refined

    def operands(self, node: Node) -> tuple[OperandState, ...]:
        """Return the states of a node's values, operands first."""
        found = tuple([self.state.operand_state(v) for v in (*node.operands, *node.results)])
        if node.forward and node.backward:
            return found
        found = list(found)
        for i, s in enumerate(found):
            mine, theirs = node.forward, node.backward
            if i >= len(node.operands):
                mine, theirs = theirs, mine
            silent = s.silent if mine else frozenset(range(len(s.shape)))
            found[i] = s._replace(silent=silent, open=s.open if theirs else frozenset())
        return tuple(found)

    def record(self, proposal: Proposal, d: int) -> None:
        """Record the provenance of the axes that are granted for dimension d."""
        node = self.graph.nodes[proposal.node]
        assert node.factors is not None
        touched = (*node.operands, *node.results)
        dims = (*node.factors.operands, *node.factors.results)
        names = dims[proposal.position][d]
        sources = proposal.update.sources
        proposed_by = [sources[f] for f in names if f in sources]
        found = dict.fromkeys(SourceDim(touched[i], e, axes) for i, e, axes in proposed_by)
        provenance = Provenance("factors", proposal.node, tuple(found))
        self.state.record(touched[proposal.position], d, provenance)


class _Sweep:
    """Nodes by their level, the lowest first; others may be added above that."""

    def __init__(self, levels: list[int], nodes: Iterable[int]):
        self.levels = levels
        self.waiting: dict[int, dict[int, None]] = {}
        self.heap: list[int] = []
        for n in nodes:
            self.add(n)

    def add(self, n: int) -> None:
        level = self.levels[n]
        if level not in self.waiting:
            self.waiting[level] = {}
            heappush(self.heap, level)
        self.waiting[level][n] = None

    def __iter__(self) -> Iterator[tuple[int, Iterable[int]]]:
        while self.heap:
            level = heappop(self.heap)
            yield level, self.waiting.pop(level)
