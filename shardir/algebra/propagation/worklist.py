"""The fixed point: nodes are visited level by level, as long as one of them refines a value.

All nodes are visited forward, then the nodes at refined values. The nodes of a level see one state,
and their proposals for a value are granted together, so their order does not matter.
"""

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from shardir.algebra.propagation.along_factors import NodeUpdate, OperandState, update
from shardir.algebra.propagation.graph import Node
from shardir.algebra.propagation.state import PropagationState, Provenance, SourceDim
from shardir.algebra.sharding import DimAxes


class Proposal(NamedTuple):
    """The axes that a node proposes for a value.

    Attributes:
        position: the index of the value among the node's operands and results.
    """

    dims: DimAxes
    node: int
    position: int
    update: NodeUpdate


class Worklist:
    """The iteration of a state to its fixed point."""

    def __init__(self, state: PropagationState):
        self.state, self.graph = state, state.graph

    def run(self, nodes: Iterable[int]) -> None:
        """Visit nodes, and then all nodes that their refinements affect."""
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
        """Visit nodes of a level, and return the values that they refine, each with the node that
        need not be visited again for it."""
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
                present = state.dims[v]
                if dims is not present and dims != present:
                    first = state.members[v][0]
                    proposals.setdefault(first, []).append(Proposal(dims, n, i, found))
        refined: list[tuple[int, int | None]] = []
        for first, of_value in proposals.items():
            members, before = state.members[first], state.dims[first]
            dims = state.grant(first, [p.dims for p in of_value])
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
        states = [self.state.operand_state(v) for v in (*node.operands, *node.results)]
        if node.forward and node.backward:
            return tuple(states)
        for i, s in enumerate(states):
            proposes, changes = node.forward, node.backward
            if i >= len(node.operands):
                proposes, changes = changes, proposes
            silent = s.silent if proposes else frozenset(range(len(s.shape)))
            states[i] = s._replace(silent=silent, open=s.open if changes else frozenset())
        return tuple(states)

    def record(self, proposal: Proposal, d: int) -> None:
        """Record the provenance of the axes granted for dimension d."""
        node = self.graph.nodes[proposal.node]
        assert node.factors is not None
        touched = (*node.operands, *node.results)
        dims = (*node.factors.operands, *node.factors.results)
        names = dims[proposal.position][d]
        sources = proposal.update.sources
        proposed_by = [sources[f] for f in names if f in sources]
        origins = dict.fromkeys(SourceDim(touched[i], e, axes) for i, e, axes in proposed_by)
        provenance = Provenance("factors", proposal.node, tuple(origins))
        self.state.record(touched[proposal.position], d, provenance)


class _Sweep:
    """A queue of nodes by level, the lowest first. Nodes of higher levels may be added."""

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
