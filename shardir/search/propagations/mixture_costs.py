"""The mixture of two propagations of minimum estimated time.

The time of a mixture is a sum of costs (problem.py), whose minimum is found (solver.py):

1. A variable for each value whose layouts differ: the two layouts. What several nodes need of a
   value may be made once, for all of them.
2. A variable for each node that touches such values, or shares an operand with one that does: its
   placements, one for each combination of the layouts of its values, with the time to compute it.
3. Between them the redistributions, from a value's layout to the one that a placement needs, and
   from the one that a placement makes to the value's. Of a value that gets a cotangent those of the
   cotangent too, and its reduction: it is partial over the axes of the factors that the operand
   lacks.

It is an estimate of the lowered program: cotangents of a value with several users are added in the
layout that several of them need, or the value's; a node's cotangents take the time of the node for
each of at most two operands; and which collectives will share a latency is not known.
"""

from collections.abc import Callable, Hashable, Sequence
from math import prod

import numpy as np

from shardir.algebra.arrays import Table
from shardir.algebra.layout import Layout
from shardir.algebra.propagation import PropagationState
from shardir.algebra.propagation.graph import GraphValue
from shardir.algebra.redistribution import estimated_seconds, plan
from shardir.algebra.steps import step_forms
from shardir.cost.seconds import computation_seconds
from shardir.dialects.nn import AddOp
from shardir.search.problem.problem import CostProblem
from shardir.search.problem.solver import solve
from shardir.search.propagations.mixture_layouts import (
    Choice,
    Choices,
    MixtureLayouts,
    Need,
    NodePlacement,
    Placements,
)

MAX_COTANGENTS = 2
"""For how many operands the time of a node counts again, to compute their cotangents."""

EXCLUDED = 1e9
"""The seconds of a placement with layouts that it is not for."""

PREFERENCE = 1e-12
"""The seconds by which another layout than that of the first propagation must be faster."""


class MixtureCosts:
    """The costs of the mixtures of two propagations of a graph.

    Attributes:
        problem: the sum of costs.
        choices: of each value at a node that has a variable.
        variable: of each value that has several choices; those of a group have one.
    """

    def __init__(self, first: PropagationState, other: PropagationState):
        self.first, self.graph, self.mesh = first, first.graph, first.mesh
        self.layouts = MixtureLayouts(first, other)
        self.problem = CostProblem()
        self.choices: dict[int, Choices] = {}
        self.variable: dict[int, int] = {}
        self._tables: dict[Hashable, Table] = {}
        self._build([v for v, dims in enumerate(first.dims) if dims != other.dims[v]])

    def cheapest(self) -> list[int]:
        """Return the values that have the other propagation's layout in the mixture of minimum
        time; none if less is gained than the time of the smallest all-reduce between all devices,
        since it is not known yet which collectives will share a latency."""
        first = [np.arange(len(costs)) for costs in self.problem.unary]
        for v, i in self.variable.items():
            first[i] = np.flatnonzero([not other for other in self.choices[v].is_other()])
        found, now = solve(self.problem), solve(self.problem.restricted(first))
        mesh, scalar = self.mesh, Layout(self.mesh.name, ())
        partial = scalar.with_partial(mesh.simplify(mesh.names))
        if now.objective - found.objective < estimated_seconds((), mesh, partial, scalar, 4):
            return []
        return [v for v, i in self.variable.items() if self.choices[v].is_other()[found.choice[i]]]

    # ---- variables and tables ----

    def _build(self, differing: Sequence[int]) -> None:
        nodes, touching = self.graph.nodes, self.graph.touching
        near = dict.fromkeys(n for v in differing for n in touching[v])
        operands = dict.fromkeys(v for n in near for v in nodes[n].operands)
        users = (n for v in operands for n in touching[v] if v in nodes[n].operands)
        placed = [n for n in dict.fromkeys((*near, *users)) if self._is_placed(n)]
        placements = self.layouts.placements(placed)
        needs = self.layouts.needs(placements)
        for n, found in placements.items():
            for v in (*nodes[n].operands, *nodes[n].results):
                if v not in self.choices:
                    self._add_value(v, [l for l, by in needs[v].items() if len(by) > 1])
            self._add_node(n, found)
        for n in near:
            if n not in placements and len(nodes[n].operands) == len(nodes[n].results) == 1:
                self._add_barrier(*nodes[n].operands, *nodes[n].results)

    def _is_placed(self, n: int) -> bool:
        """Whether a node has a placement: it is no mark of a group, and no barrier."""
        node = self.graph.nodes[n]
        return bool(node.strategy or (node.factors and node.forward and node.backward))

    def _add_value(self, v: int, shared: Sequence[Need]) -> None:
        """Add the choices of a value, and its variable, if there are several."""
        members, value = self.first.members[v], self.graph.values[v]
        choices = self.choices[v] = self.layouts.choices(v, shared)
        if len(choices.items) == 1:
            return
        known = next((self.variable[w] for w in members if w in self.variable), None)
        if known is None:
            uses = self._uses_of(v)

            def seconds(c: Choice) -> float:
                made = self._uses(value, c.layout, c.shared) if c.shared else 0.0
                return made + self._adds(value, (c.shared or c).layout, uses)

            def costs() -> Table:
                preference = PREFERENCE * np.array(choices.is_other())
                return np.array([seconds(c) for c in choices.items]) + preference

            known = self.problem.variable(self._table((choices, uses, *_signature(value)), costs))
        self.variable[v] = known

    def _uses_of(self, v: int) -> int:
        """Return how many operands a value is."""
        return sum(self.graph.nodes[n].operands.count(v) for n in self.graph.touching[v])

    def _add_node(self, n: int, placements: Placements) -> None:
        """Add the variable of a node, and the redistributions at its edges."""
        node, values = self.graph.nodes[n], self.graph.values
        times = 1
        if any(values[v].is_active for v in node.results):
            times += min(sum(values[v].is_active for v in node.operands), MAX_COTANGENTS)
        costs = tuple([times * node.seconds(p.sharding.axes) for p in placements.items])
        i = self.problem.variable(self._table(costs, lambda: np.array(costs)))
        for v in dict.fromkeys(node.operands):
            at = tuple([j for j, w in enumerate(node.operands) if w == v])

            def uses(c: Choice, p: NodePlacement, v: int = v, at: tuple[int, ...] = at) -> float:
                if not p.allows(at[0], c.layout):
                    return EXCLUDED
                needs = dict.fromkeys(self.layouts.need(v, p.sharding, j) for j in at)
                made = None if node.decomposes else c.shared
                return sum(self._uses(values[v], c.layout, need) for need in needs if need != made)

            self._add(v, i, placements, ("uses", at, node.decomposes), uses)
        for j, v in enumerate(node.results):

            def makes(c: Choice, p: NodePlacement, v: int = v, j: int = j) -> float:
                if not p.allows(len(node.operands) + j, c.layout):
                    return EXCLUDED
                return self._makes(values[v], p.sharding.results[j], c.layout)

            self._add(v, i, placements, ("makes", j), makes)

    def _add_barrier(self, v: int, w: int) -> None:
        """Add the redistribution between a barrier's operand and its result."""
        for x in (v, w):
            if x not in self.choices:
                self._add_value(x, ())
        if v not in self.variable and w not in self.variable:
            return
        value, ours, theirs = self.graph.values[v], self.choices[v], self.choices[w]
        table = self._table(
            (ours, theirs, *_signature(value)),
            lambda: np.array(
                [[self._makes(value, a.layout, b.layout) for b in theirs.items] for a in ours.items]
            ),
        )
        if v in self.variable and w in self.variable:
            self.problem.add(self.variable[v], self.variable[w], table)
        else:
            one = v in self.variable
            i, costs = self.variable[v if one else w], table[:, 0] if one else table[0]
            self.problem.unary[i] = self.problem.plus(self.problem.unary[i], costs)

    def _add(
        self, v: int, i: int, placements: Placements, kind: Hashable,
        seconds: Callable[[Choice, NodePlacement], float],
    ) -> None:  # fmt: skip
        """Add the redistributions between a value and the node of variable i."""
        choices = self.choices[v]
        table = self._table(
            (choices, placements, kind, *_signature(self.graph.values[v])),
            lambda: np.array([[seconds(c, p) for p in placements.items] for c in choices.items]),
        )
        if v in self.variable:
            self.problem.add(self.variable[v], i, table)
        else:
            self.problem.unary[i] = self.problem.plus(self.problem.unary[i], table[0])

    def _table(self, key: Hashable, make: Callable[[], Table]) -> Table:
        if key not in self._tables:
            self._tables[key] = make()
        return self._tables[key]

    # ---- seconds ----

    def _uses(self, value: GraphValue, layout: Layout, need: Need) -> float:
        """Return the time to make what a placement needs, and to return its cotangent."""
        cotangent = need.layout.complete.with_partial(need.partial)
        there = self._seconds(value, layout, need.layout, value.is_bundled and not value.is_active)
        if not value.is_active:
            return there
        return there + self._seconds(value, cotangent, layout.complete, value.is_bundled)

    def _makes(self, value: GraphValue, made: Layout, layout: Layout) -> float:
        """Return the time to bring a result into its layout, and its cotangent into the op's."""
        there = self._seconds(value, made, layout, value.is_bundled and not value.is_active)
        if not value.is_active:
            return there
        return there + self._seconds(value, layout.complete, made.complete, value.is_bundled)

    def _adds(self, value: GraphValue, layout: Layout, uses: int) -> float:
        """Return the time to add the cotangents of a value with this many uses."""
        if not value.is_active or uses < 2:
            return 0.0
        touched = 3 * value.itemsize * prod(layout.local_shape(self.mesh, value.shape))
        one = computation_seconds(self.mesh.cluster_or_default, AddOp, "f32", 0, touched)
        return (uses - 1) * one

    def _seconds(
        self, value: GraphValue, source: Layout, target: Layout, is_bundled: bool
    ) -> float:
        """Return the time of a redistribution; `is_bundled`: without latencies."""
        if source == target:
            return 0.0
        shape, size = value.shape, value.itemsize
        if not is_bundled:
            return estimated_seconds(shape, self.mesh, source, target, size)
        seconds = 0.0
        for step in plan(shape, self.mesh, source, target, size):
            rates = [form.rate for form in step_forms(self.mesh, shape, source, step)]
            seconds += min(rates, default=0.0) * prod(shape) * size
            source = step.layout
        return seconds


def _signature(value: GraphValue) -> tuple:
    """Return what the time of a redistribution depends on."""
    return value.shape, value.itemsize, value.is_active, value.is_bundled
