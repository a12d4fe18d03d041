"""Reopening: of two propagations of a graph, the mixture of minimum estimated time.

    activations first   %h = %x %w1, %y = %h %w2 keep the batch's axis: %w1 and %w2 are gathered
    parameters first    they have the weights' axis: %x is redistributed, and %y back
    reopened            each value has its layout in the one or in the other

The time of a mixture is a sum of costs (problem.py), whose minimum is found (solver.py):

1. A variable for each value whose layouts differ: the two layouts. What several nodes need of a
   value may be made once, for all of them.
2. A variable for each node that touches such values, or shares an operand with one that does: its
   placements, one for each combination of the layouts of its values, with the time to compute it.
3. Between them the redistributions, from a value's layout to the one that a placement needs, and
   from the one that a placement makes to the value's. Of a value that gets a cotangent those of the
   cotangent too, and its reduction: it is partial over the axes of the factors that the operand
   lacks.

Of equal times that of the first propagation is chosen, value by value; and if little is gained, all
of it. Annotations and barriers hold in both propagations, and so in each mixture of them.

It is an estimate, and the lowered step may be slower than that of the first propagation: additions
of the cotangents of a value with several users are left out, a product of which one operand gets no
cotangent counts two backward products, and values that nothing uses count as differentiated.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from shardir.algebra.factors import OpSharding, choose_op_sharding
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes
from shardir.algebra.propagation import PropagationState, propagate
from shardir.algebra.propagation.graph import GraphValue, PropagationGraph
from shardir.algebra.redistribution import estimated_seconds, plan
from shardir.algebra.steps import step_forms
from shardir.search.problem import CostProblem, Table
from shardir.search.solver import solve

MAX_COMBINATIONS = 64
"""The maximum number of combinations of layouts for which a node is placed; of more, only those in
which all values have the layouts of one propagation."""

BACKWARD = 3
"""How often a node is computed that has a backward part, which takes about twice the time."""

EXCLUDED = 1e9
"""The seconds of a placement with layouts that it is not for."""

PREFERENCE = 1e-12
"""The seconds by which another layout than that of the first propagation must be faster."""


class Need(NamedTuple):
    """The layout in which a placement needs an operand, and the axes over which its cotangent is
    partial."""

    layout: Layout
    partial: Axes = ()


class Choice(NamedTuple):
    """The layout of a value, and what is made of it for several nodes at once."""

    layout: Layout
    shared: Need | None = None


class NodePlacement(NamedTuple):
    """The sharding of a node, and the layouts of its values for which it is chosen; none of a node
    with a strategy, whose sharding is the same for all."""

    sharding: OpSharding
    layouts: tuple[Layout, ...] = ()

    def allows(self, i: int, layout: Layout) -> bool:
        """Whether value i may have a layout."""
        return not self.layouts or self.layouts[i] == layout


Choices = tuple[Choice, ...]
Placements = tuple[NodePlacement, ...]


def reopened(graph: PropagationGraph) -> PropagationState:
    """Propagate a graph; where proposals of parameters are refused, at minimum estimated time.

    Raises:
        ContradictionError: annotations of a group's values contradict each other.
    """
    state = propagate(graph)
    if state.refusing:
        other = propagate(graph, parameters_first=True)
        state = state.mixed(other, Reopening(state, other).cheaper())
    return state


class Reopening:
    """The choice between the layouts of two propagations of a graph.

    Attributes:
        problem: the sum of costs.
        choices: of each value at a node that has a variable.
        variable: of each value that has several choices; those of a group have one.
    """

    def __init__(self, first: PropagationState, other: PropagationState):
        self.first, self.other = first, other
        self.graph, self.mesh = first.graph, first.mesh
        self.problem = CostProblem()
        self.choices: dict[int, Choices] = {}
        self.variable: dict[int, int] = {}
        self._made: dict[tuple, tuple] = {}
        self._tables: dict[tuple, Table] = {}
        self._build()

    def cheaper(self) -> list[int]:
        """Return the values that are to have the other propagation's layout."""
        first = [np.arange(len(costs)) for costs in self.problem.unary]
        for v, i in self.variable.items():
            first[i] = np.flatnonzero([not other for other in self._is_other(v)])
        found, now = solve(self.problem), solve(self.problem.restricted(first))
        if found.objective > now.objective - self._minimum_gain():
            return []
        return [v for v, i in self.variable.items() if self._is_other(v)[found.choice[i]]]

    def _is_other(self, v: int) -> list[bool]:
        """Return whether each choice of a value has the other propagation's layout."""
        return [c.layout != self.choices[v][0].layout for c in self.choices[v]]

    def _minimum_gain(self) -> float:
        """Return the time that must be gained: that of the smallest all-reduce between all devices,
        since it is not known yet which collectives will share a latency."""
        mesh, scalar = self.mesh, Layout(self.mesh.name, ())
        return estimated_seconds(
            (), mesh, scalar.with_partial(mesh.simplify(mesh.names)), scalar, 4
        )

    def _build(self) -> None:
        nodes, touching = self.graph.nodes, self.graph.touching
        differing = [v for v, dims in enumerate(self.first.dims) if dims != self.other.dims[v]]
        near = dict.fromkeys(n for v in differing for n in touching[v])
        operands = dict.fromkeys(v for n in near for v in nodes[n].operands)
        users = (n for v in operands for n in touching[v] if v in nodes[n].operands)
        placed = [n for n in dict.fromkeys((*near, *users)) if self._is_placed(n)]
        placements = {n: self.placements(n) for n in placed}
        needs = self._needs(placements)
        for n in placed:  # what others need costs nothing
            others = (
                {l.layout for l, by in needs[v].items() if by != {n}} for v in nodes[n].operands
            )
            shared = tuple([tuple(sorted(layouts, key=str)) for layouts in others])
            if any(shared):
                placements[n] = self.placements(n, shared)
        needs = self._needs(placements)
        for n, found in placements.items():
            for v in (*nodes[n].operands, *nodes[n].results):
                if v not in self.choices:
                    self._add_value(v, [l for l, by in needs[v].items() if len(by) > 1])
            self._add_node(n, found)
        for n in near:
            if n not in placements and len(nodes[n].operands) == len(nodes[n].results) == 1:
                self._add_barrier(*nodes[n].operands, *nodes[n].results)

    def _needs(self, placements: dict[int, Placements]) -> dict[int, dict[Need, set[int]]]:
        """Return what nodes need of each value, with the nodes."""
        needs: dict[int, dict[Need, set[int]]] = defaultdict(dict)
        for n, found in placements.items():
            node = self.graph.nodes[n]
            for p in found if not node.decomposes else ():
                for k, v in enumerate(node.operands):
                    needs[v].setdefault(self._need(v, p.sharding, k), set()).add(n)
        return needs

    def _is_placed(self, n: int) -> bool:
        """Whether a node has a placement: it is no mark of a group, and no barrier."""
        node = self.graph.nodes[n]
        return bool(node.strategy or (node.factors and node.forward and node.backward))

    # ---- layouts and placements ----

    def layouts(self, v: int) -> tuple[Layout, ...]:
        """Return the layout of a value in the first propagation, then that of the other one."""
        mesh, annotation = self.mesh, self.first.annotations[v]
        found = dict.fromkeys((self.first.dims[v], self.other.dims[v]))
        layouts = [Layout(mesh.name, dims) for dims in found]
        if annotation is not None:
            given = annotation.layout
            layouts = [l.with_partial(given.partial, given.reduction) for l in layouts]
        return tuple(layouts)

    def placements(self, n: int, shared: tuple[tuple[Layout, ...], ...] = ()) -> Placements:
        """Return the placements of a node for the combinations of the layouts of its values, and
        those if its operands are also to be had in the layouts `shared`."""
        node, values = self.graph.nodes[n], self.graph.values
        if node.strategy is not None:
            return (NodePlacement(node.strategy),)
        touched = (*node.operands, *node.results)
        layouts = {v: self.layouts(v) for v in touched}
        shapes = tuple([values[v].shape for v in touched])
        sizes = tuple([values[v].itemsize for v in touched])
        places = tuple([touched.index(v) for v in touched])
        key = node.factors, places, tuple(layouts.values()), shapes, sizes, shared
        if key not in self._made:
            assert node.factors is not None
            k, found = len(node.operands), dict[tuple, NodePlacement]()
            for combination in _combinations(list(layouts.values())):
                of = dict(zip(layouts, combination, strict=True))
                now = tuple([of[v] for v in touched])
                for copies in dict.fromkeys(((), shared)):
                    p = choose_op_sharding(
                        node.factors, now[:k], now[k:], self.mesh, shapes, sizes, copies
                    )
                    found.setdefault((now, p.operands, p.results), NodePlacement(p, now))
            self._made[key] = tuple(found.values())
        return self._made[key]

    # ---- variables and tables ----

    def _add_value(self, v: int, shared: Sequence[Need]) -> None:
        """Add the choices of a value, and its variable, if there are several."""
        layouts, members, value = self.layouts(v), self.first.members[v], self.graph.values[v]
        key = layouts, tuple(shared) if len(members) == 1 else ()
        if key not in self._made:
            of_all = [Choice(l, need) for l in layouts for need in key[1] if need != Need(l)]
            self._made[key] = (*map(Choice, layouts), *of_all)
        choices = self.choices[v] = self._made[key]
        if len(choices) == 1:
            return
        known = next((self.variable[w] for w in members if w in self.variable), None)
        if known is None:

            def costs() -> Table:
                made = [self._uses(value, l, need) if need else 0.0 for l, need in choices]
                return np.array(made) + PREFERENCE * np.array(self._is_other(v))

            known = self.problem.variable(self._table((id(choices), *_signature(value)), costs))
        self.variable[v] = known

    def _add_node(self, n: int, placements: Placements) -> None:
        """Add the variable of a node, and the redistributions at its edges."""
        node, values = self.graph.nodes[n], self.graph.values
        times = BACKWARD if any(values[v].is_active for v in node.results) else 1
        costs = tuple([times * node.seconds(p.sharding.axes) for p in placements])
        i = self.problem.variable(self._table(("computes", costs), lambda: np.array(costs)))
        for v in dict.fromkeys(node.operands):
            at = tuple([j for j, w in enumerate(node.operands) if w == v])

            def uses(c: Choice, p: NodePlacement, v: int = v, at: tuple[int, ...] = at) -> float:
                if not p.allows(at[0], c.layout):
                    return EXCLUDED
                needs = dict.fromkeys(self._need(v, p.sharding, j) for j in at)
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
            ("barrier", id(ours), id(theirs), *_signature(value)),
            lambda: np.array(
                [[self._makes(value, a.layout, b.layout) for b in theirs] for a in ours]
            ),
        )
        if v in self.variable and w in self.variable:
            self.problem.add(self.variable[v], self.variable[w], table)
        else:
            one = v in self.variable
            i, costs = self.variable[v if one else w], table[:, 0] if one else table[0]
            self.problem.unary[i] = self.problem.plus(self.problem.unary[i], costs)

    def _add(
        self, v: int, i: int, placements: Placements, kind: tuple,
        seconds: Callable[[Choice, NodePlacement], float],
    ) -> None:  # fmt: skip
        """Add the redistributions between a value and the node of variable i."""
        choices = self.choices[v]
        key = id(choices), id(placements), kind, *_signature(self.graph.values[v])
        table = self._table(
            key, lambda: np.array([[seconds(c, p) for p in placements] for c in choices])
        )
        if v in self.variable:
            self.problem.add(self.variable[v], i, table)
        else:
            self.problem.unary[i] = self.problem.plus(self.problem.unary[i], table[0])

    # ---- seconds ----

    def _need(self, v: int, p: OpSharding, k: int) -> Need:
        """Return what a placement needs of a value at operand k."""
        layout = p.operands[k]
        if not self.graph.values[v].is_active:
            return Need(layout)
        partial = [
            a
            for axes in p.axes.values()
            for a in axes
            if not any(self.mesh.overlap(a, b) for b in layout.used)
        ]
        return Need(layout, self.mesh.simplify(tuple(sorted(partial, key=self.mesh.order))))

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

    def _table(self, key: tuple, make: Callable[[], Table]) -> Table:
        if key not in self._tables:
            self._tables[key] = make()
        return self._tables[key]

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


def _combinations(layouts: Sequence[tuple[Layout, ...]]) -> Iterable[tuple[Layout, ...]]:
    """Return the combinations of the layouts of several values."""
    if prod(map(len, layouts)) <= MAX_COMBINATIONS:
        return product(*layouts)
    return [tuple([of_value[side] for of_value in layouts]) for side in (0, -1)]
