"""The layouts in mixtures of two propagations: of values, and those that nodes need and make.

    %h in [{dp}, {}] or [{}, {dp}], and one node needs it in [{}, {}]
 -> choices of %h: [{dp}, {}]; [{}, {dp}]; each also with [{}, {}] made once for several nodes
 -> placements of a node: one for each combination of the layouts of its values

Nodes of repeated layers have the same objects, so that their costs are computed once.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from shardir.algebra.factors import Factors, OpSharding
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes
from shardir.algebra.op_sharding import choose_op_sharding
from shardir.algebra.propagation import PropagationState

MAX_COMBINATIONS = 64
"""The maximum number of combinations of layouts for which a node is placed; of more, only those in
which all values have the layouts of one propagation."""


class Need(NamedTuple):
    """The layout in which a placement needs an operand, and the axes over which its cotangent is
    partial."""

    layout: Layout
    partial: Axes = ()


class Choice(NamedTuple):
    """The layout of a value, and what is made of it for several nodes at once."""

    layout: Layout
    shared: Need | None = None


@dataclass(frozen=True, eq=False)
class Choices:
    """The choices of a value, those with the first propagation's layout first."""

    items: tuple[Choice, ...]

    def is_other(self) -> list[bool]:
        """Return whether each has the other propagation's layout."""
        return [c.layout != self.items[0].layout for c in self.items]


class NodePlacement(NamedTuple):
    """The sharding of a node, and the layouts of its values for which it is chosen; none of a node
    with a strategy, whose sharding is the same for all."""

    sharding: OpSharding
    layouts: tuple[Layout, ...] = ()

    def allows(self, i: int, layout: Layout) -> bool:
        """Whether value i may have a layout."""
        return not self.layouts or self.layouts[i] == layout


@dataclass(frozen=True, eq=False)
class Placements:
    """The placements of a node."""

    items: tuple[NodePlacement, ...]


class _Placed(NamedTuple):
    """The facts that the placements of a node follow from; those of values operands first."""

    factors: Factors
    places: tuple[int, ...]
    """Where each value is first: a value may be several operands."""
    layouts: tuple[tuple[Layout, ...], ...]
    shapes: tuple[Shape, ...]
    itemsizes: tuple[int, ...]
    shared: tuple[tuple[Layout, ...], ...]
    """The layouts in which operands are also to be had."""


class MixtureLayouts:
    """The choices and placements of a graph that is propagated in two ways."""

    def __init__(self, first: PropagationState, other: PropagationState):
        self.first, self.other = first, other
        self.graph, self.mesh = first.graph, first.mesh
        self._choices: dict[tuple[tuple[Layout, ...], tuple[Need, ...]], Choices] = {}
        self._placements: dict[Hashable, Placements] = {}

    def of_value(self, v: int) -> tuple[Layout, ...]:
        """Return the layout of a value in the first propagation, then that of the other one."""
        annotation = self.first.annotations[v]
        found = dict.fromkeys((self.first.dims[v], self.other.dims[v]))
        layouts = [Layout(self.mesh.name, dims) for dims in found]
        if annotation is not None:
            given = annotation.layout
            layouts = [l.with_partial(given.partial, given.reduction) for l in layouts]
        return tuple(layouts)

    def choices(self, v: int, shared: Iterable[Need]) -> Choices:
        """Return the choices of a value, of which several nodes may need `shared`. A value of a
        group is made for each of them alone."""
        layouts, is_alone = self.of_value(v), len(self.first.members[v]) == 1
        key = layouts, tuple(shared) if is_alone else ()
        if key not in self._choices:
            of_all = [Choice(l, need) for l in layouts for need in key[1] if need != Need(l)]
            self._choices[key] = Choices((*map(Choice, layouts), *of_all))
        return self._choices[key]

    def placements(self, nodes: Iterable[int]) -> dict[int, Placements]:
        """Return the placements of each node. What others need of an operand costs nothing."""
        found = {n: self._placed(n) for n in nodes}
        needs = self.needs(found)
        for n in found:
            others = (
                {l.layout for l, by in needs[v].items() if by != {n}}
                for v in self.graph.nodes[n].operands
            )
            shared = tuple([tuple(sorted(layouts, key=str)) for layouts in others])
            if any(shared):
                found[n] = self._placed(n, shared)
        return found

    def needs(self, placements: dict[int, Placements]) -> dict[int, dict[Need, set[int]]]:
        """Return what nodes need of each value, with the nodes."""
        needs: dict[int, dict[Need, set[int]]] = defaultdict(dict)
        for n, found in placements.items():
            node = self.graph.nodes[n]
            for p in found.items if not node.decomposes else ():
                for k, v in enumerate(node.operands):
                    needs[v].setdefault(self.need(v, p.sharding, k), set()).add(n)
        return needs

    def need(self, v: int, p: OpSharding, k: int) -> Need:
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

    def _placed(self, n: int, shared: tuple[tuple[Layout, ...], ...] = ()) -> Placements:
        """Return the placements of a node for the combinations of the layouts of its values, and
        those if its operands are also to be had in the layouts `shared`."""
        node, values = self.graph.nodes[n], self.graph.values
        if node.strategy is not None:
            one = Placements((NodePlacement(node.strategy),))
            return self._placements.setdefault(_key(node.strategy), one)
        assert node.factors is not None
        touched = (*node.operands, *node.results)
        key = _Placed(
            node.factors,
            tuple([touched.index(v) for v in touched]),
            tuple([self.of_value(v) for v in touched]),
            tuple([values[v].shape for v in touched]),
            tuple([values[v].itemsize for v in touched]),
            shared,
        )
        if key not in self._placements:
            every = self._placements_of(key, len(node.operands))
            found = {(p.layouts, _key(p.sharding)): p for p in every}
            self._placements[key] = Placements(tuple(found.values()))
        return self._placements[key]

    def _placements_of(self, of: _Placed, operands: int) -> Iterator[NodePlacement]:
        """Yield the placements of a node with this many operands."""
        alone = dict.fromkeys(of.places)
        for combination in _combinations([of.layouts[i] for i in alone]):
            chosen = dict(zip(alone, combination, strict=True))
            now = tuple([chosen[i] for i in of.places])
            for copies in dict.fromkeys(((), of.shared)):
                p = choose_op_sharding(
                    of.factors, now[:operands], now[operands:], self.mesh, of.shapes,
                    of.itemsizes, copies,
                )  # fmt: skip
                yield NodePlacement(p, now)


def _key(p: OpSharding) -> Hashable:
    """Return what distinguishes shardings."""
    return tuple(p.axes.items()), p.operands, p.results


def _combinations(layouts: Sequence[tuple[Layout, ...]]) -> Iterable[tuple[Layout, ...]]:
    """Return the combinations of the layouts of several values."""
    if prod(map(len, layouts)) <= MAX_COMBINATIONS:
        return product(*layouts)
    return [tuple([of_value[side] for of_value in layouts]) for side in (0, -1)]
