"""The solutions of a cost graph in which ops split what presets say.

    data * megatron     %h = nn.matmul %x, %w1: the candidate with the batch over dp and the columns
                        over tp; the layouts of values for which the sum of costs is smallest

Ops and values of repeated layers get equal solutions: variables are grouped, and each group is
solved once for a product of presets.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from xdsl.ir import SSAValue

from shardir.algebra.arrays import Table
from shardir.algebra.estimates import IMPROVEMENT
from shardir.algebra.factors import FactorAxes
from shardir.algebra.mesh import Axes, Axis
from shardir.dialects.nn.base import TensorOp, strategy_factors
from shardir.dialects.nn.types import unsharded_type
from shardir.search.graph.candidates import Candidates
from shardir.search.graph.cost_graph import CostGraph
from shardir.search.plans.presets import OpRoles, ProductOfPresets, Structure
from shardir.search.problem.problem import CostProblem

SWEEPS = 2
"""How many times each choice is changed to the cheapest one."""

CandidateKey = tuple[frozenset[tuple[str, Axes]], Axes]
"""The axes of factors, and those over which operands are partial."""


class _OpGroup(NamedTuple):
    """Ops with equal candidates and roles. `makers`: of those whose operands may be partial sums,
    the groups of the ops that make them, each with the number of the result."""

    candidates: Candidates
    keys: Mapping[CandidateKey, int]
    roles: OpRoles
    makers: tuple[tuple[int, int], ...]


class _ValueGroup(NamedTuple):
    """Values with equal costs, and the tables that they share with groups of ops, each with the
    group and their number; of parameters the axes that their layouts use."""

    unary: Table
    tables: tuple[tuple[Table, int, int], ...]
    used: Sequence[frozenset[Axis]]

    def choice(self, chosen: Sequence[int], presets: ProductOfPresets) -> int:
        """Return the cheapest layout; of a parameter one of those in which `zero-3` retains it."""
        costs = self.unary + sum(n * t[:, chosen[g]] for t, g, n in self.tables)
        retained = [axes.issuperset(presets.retained) for axes in self.used]
        if any(retained):
            costs = np.where(retained, costs, np.inf)
        return int(costs.argmin())


class GroupedSolution(NamedTuple):
    """The choice of each group, the computation of its ops, and the sum of costs."""

    choices: tuple[int, ...]
    computation: float
    objective: float


class PresetSolutions:
    """The solutions for products of presets of a problem of a cost graph."""

    def __init__(self, graph: CostGraph, problem: CostProblem, structure: Structure):
        self.graph, self.problem = graph, problem
        self._groups: list[_OpGroup | _ValueGroup] = []
        self._group_of = [-1] * len(problem.unary)
        self._keys: dict[int, Mapping[CandidateKey, int]] = {}
        self._add_ops(structure)
        self._add_values(structure)
        of = self._group_of
        self._unary = Counter((id(u), of[i]) for i, u in enumerate(problem.unary))
        self._pairs = Counter((id(t), of[i], of[j]) for (i, j), t in problem.pairs.items())
        self._tables = {id(t): t for t in (*problem.unary, *problem.pairs.values())}

    # ---- groups ----

    def _add_ops(self, structure: Structure) -> None:
        numbers: dict[tuple, int] = {}
        summed = dict[SSAValue, tuple[int, int]]()  # values that may be partial sums
        for op, candidates in self.graph.candidates.items():
            assert isinstance(op, TensorOp)
            factors = structure.classes.factors[op]
            given = [v for v in op.operands if v in summed or unsharded_type(v).get_shape()]
            linear = bool(factors.linear) and all(v in summed for v in given)
            makers = tuple(summed[v] for v in given) if linear else ()
            key = id(candidates), structure.roles[op], makers
            if key not in numbers:
                numbers[key] = len(self._groups)
                keys = self._keys_of(op, candidates)
                self._groups.append(_OpGroup(candidates, keys, structure.roles[op], makers))
            self._group_of[self.graph.op_variable[op]] = numbers[key]
            if factors.reduced or makers:
                summed.update((v, (numbers[key], i)) for i, v in enumerate(op.results))

    def _keys_of(self, op: TensorOp, candidates: Candidates) -> Mapping[CandidateKey, int]:
        """Return the number of each candidate, by what it splits."""
        if id(candidates) not in self._keys:
            factors, found = strategy_factors(op), dict[CandidateKey, int]()
            for i, c in enumerate(candidates):
                axes = factors.axes_of([*c.operands, *c.results], self.graph.mesh)
                over = c.operands[0].partial if c.operands else ()
                found.setdefault((frozenset(axes.items()), over), i)
            self._keys[id(candidates)] = found
        return self._keys[id(candidates)]

    def _add_values(self, structure: Structure) -> None:
        """Add the groups of values: their neighbours are ops only."""
        numbers: dict[tuple, int] = {}
        graph = self.graph
        parameters = {
            i: graph.layouts[v] for v, i in graph.value_variable.items()
            if structure.owner.get(v) is v
        }  # fmt: skip
        neighbours = self.problem.neighbours()
        for i, group in enumerate(self._group_of):
            if group >= 0:
                continue
            near = Counter((id(t), self._group_of[j]) for j, t in neighbours[i])
            unary, layouts = self.problem.unary[i], parameters.get(i, ())
            key = id(unary), id(layouts), frozenset(near.items())
            if key not in numbers:
                numbers[key] = len(self._groups)
                tables = {id(t): t for _, t in neighbours[i]}
                of = tuple([(tables[t], g, n) for (t, g), n in near.items()])
                used = [frozenset(l.used) for l in layouts]
                self._groups.append(_ValueGroup(unary, of, used))
            self._group_of[i] = numbers[key]

    # ---- solutions ----

    def solve(self, presets: ProductOfPresets) -> GroupedSolution:
        """Return the solution for a product of presets."""
        chosen: list[int] = []
        for group in self._groups:
            if isinstance(group, _OpGroup):
                chosen.append(self._candidate(group, presets, chosen))
            else:
                chosen.append(group.choice(chosen, presets))
        return self._costed(chosen)

    def improved(self, found: GroupedSolution) -> GroupedSolution:
        """Return the solution with each group's choice changed in turn to the cheapest one."""
        chosen = list(found.choices)
        for _ in range(SWEEPS):
            for g, (unary, near) in enumerate(self._near):
                costs = unary + sum(n * t[:, chosen[h]] for t, h, n in near)
                if costs.min() < costs[chosen[g]] * IMPROVEMENT:
                    chosen[g] = int(costs.argmin())
        return self._costed(chosen)

    @cached_property
    def _near(self) -> list[tuple[Table, list[tuple[Table, int, int]]]]:
        """Of each group the costs of its choices, and the tables that it shares with others, each
        with the other group and their number."""
        found = [(np.zeros(1), list[tuple[Table, int, int]]()) for _ in self._groups]
        for (u, g), n in self._unary.items():
            found[g] = n * self._tables[u], []
        for (t, g, h), n in self._pairs.items():
            table = self._tables[t]
            if g == h:
                found[g] = found[g][0] + n * np.diagonal(table), found[g][1]
            else:
                found[g][1].append((table, h, n))
                found[h][1].append((table.T, g, n))
        return found

    def _costed(self, chosen: list[int]) -> GroupedSolution:
        costs = [n * float(self._tables[u][chosen[g]]) for (u, g), n in self._unary.items()]
        computation = sum(
            cost for cost, (_, g) in zip(costs, self._unary, strict=True)
            if isinstance(self._groups[g], _OpGroup)
        )  # fmt: skip
        pairs = (
            n * float(self._tables[t][chosen[g], chosen[h]]) for (t, g, h), n in self._pairs.items()
        )
        return GroupedSolution(tuple(chosen), computation, sum(costs) + sum(pairs))

    def choice(self, found: GroupedSolution) -> list[int]:
        """Return the choice of each variable."""
        return [found.choices[g] for g in self._group_of]

    def _candidate(self, group: _OpGroup, presets: ProductOfPresets, chosen: Sequence[int]) -> int:
        """Return the candidate that splits what the presets say, as far as there is one. A linear
        op passes partial sums on."""
        split = presets.split(group.roles)
        if group.makers:
            made = {self._made(g, chosen[g], i) for g, i in group.makers}
            over = made.pop()
            if over and not made:
                rest = {f: left for f, axes in split.items() if (left := _without(axes, over))}
                found = group.keys.get((frozenset(rest.items()), over))
                if found is not None:
                    return found
        kept: FactorAxes = {}
        for f, axes in split.items():
            if (frozenset({**kept, f: axes}.items()), ()) in group.keys:
                kept[f] = axes
        return group.keys.get((frozenset(kept.items()), ()), 0)

    def _made(self, group: int, choice: int, i: int) -> Axes:
        """Return the axes over which a result of a group's ops is partial."""
        ops = self._groups[group]
        assert isinstance(ops, _OpGroup)
        return ops.candidates[choice].results[i].partial


def _without(axes: Axes, over: Axes) -> Axes:
    return tuple(a for a in axes if a not in over)
