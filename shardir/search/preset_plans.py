"""The plans of presets, compared with the searched plan by their sums and by the time with overlap.

The plans of presets are solved in the cost graph (preset_solutions.py). Where the gap is large, the
search goes on from the one of the smallest sum, if that is smaller than its own: many small tensors
may be in one bucket in it. Another plan than that of the smallest sum may hide more of its
communication. Those that may be faster have their time with overlap estimated (overlapped.py), and
where programs are small enough the fastest of these are lowered and measured. So no preset is
faster than the result, as far as the estimates are right.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import islice

from shardir.algebra.estimates import IMPROVEMENT
from shardir.search.bucket_prices import TransferPrices
from shardir.search.buckets import shared_seconds
from shardir.search.cost_graph import CostGraph
from shardir.search.elimination import Solution
from shardir.search.graph_bytes import argument_bytes
from shardir.search.memory import live
from shardir.search.overlapped import StepTimeline
from shardir.search.preset_solutions import GroupedSolution, PresetSolutions
from shardir.search.presets import ProductOfPresets, Structure, axes_of, products
from shardir.search.strategy_plan import LoweredPlans, StrategyPlan

MAX_ESTIMATED = 12
"""How many plans of presets have their time estimated: those of the smallest sums."""

MAX_ESTIMATED_OPS = 20_000
"""The ops of these plans together."""

MAX_LOWERED = 8
"""How many plans of presets are lowered: those of the smallest estimates."""

MAX_LOWERED_OPS = 4000
"""The ops of all functions that are lowered to be measured; with more, the estimates decide."""

MARGIN = 1.05
"""The ratio of estimates up to which the larger one may be of the faster program."""

MAX_SHORT = 1.3
"""How much longer a program takes than its estimate, at most, as far as is known."""

SolvedProduct = tuple[GroupedSolution, ProductOfPresets]


class PresetPlans:
    """The plans of products of presets of a function, in its cost graphs."""

    def __init__(self, lowered: LoweredPlans):
        self.lowered = lowered
        self._in_graphs: dict[CostGraph, tuple[PresetSolutions, list[SolvedProduct]]] = {}

    @cached_property
    def _structure(self) -> Structure:
        return Structure(self.lowered.f)

    @cached_property
    def _products(self) -> list[ProductOfPresets]:
        """The products that exist."""
        mesh = self.lowered.mesh
        every = products(mesh) if axes_of(mesh) else ()
        found = (ProductOfPresets(each, self._structure, mesh) for each in every)
        return [presets for presets in found if presets.exists]

    def _in(self, graph: CostGraph) -> tuple[PresetSolutions, list[SolvedProduct]]:
        """Return what solves products in a graph, and the solution of each."""
        if graph not in self._in_graphs:
            solutions = PresetSolutions(graph, graph.smallest_problem, self._structure)
            solved = [(solutions.solve(presets), presets) for presets in self._products]
            self._in_graphs[graph] = solutions, solved
        return self._in_graphs[graph]

    def choices(
        self, graph: CostGraph, seconds: Callable[[GroupedSolution], float], longest: float
    ) -> Iterator[tuple[list[int], ProductOfPresets]]:
        """Yield the different choices of products that take less than `longest` by `seconds`, as
        they are and improved, in the order of their sums. Of products with the same choice the
        first one counts."""
        if not self._products:
            return
        solutions, solved = self._in(graph)
        found = [(each, presets) for each, presets in solved if seconds(each) < longest]
        found += [(solutions.improved(each), presets) for each, presets in found]
        seen = set[tuple[int, ...]]()
        for solution, presets in sorted(found, key=lambda each: each[0].objective):
            choice = solutions.choice(solution)
            if seconds(solution) < longest and tuple(choice) not in seen:
                seen.add(tuple(choice))
                yield choice, presets

    def of_sum(self, graph: CostGraph, seconds: float) -> list[list[int]]:
        """Return the choices of which the sum may be less than so many seconds."""
        every = self.choices(graph, lambda found: found.objective, MARGIN * seconds)
        return [choice for choice, _ in islice(every, MAX_ESTIMATED)]

    def plans(
        self, plan: StrategyPlan, limit: int | None, longest: float
    ) -> Iterator[StrategyPlan]:
        """Yield the plans in the graph of a plan that may take less than `longest` with overlap,
        but that plan; if the graph counts memory, those that keep to the limit."""
        graph = plan.graph
        held = argument_bytes(graph, self.lowered.hosted) if limit is not None else []
        for choice, presets in self.choices(graph, _shortest, longest):
            if choice == plan.solution.choice:
                continue
            if limit is not None and live(held, choice).max() > limit:
                continue
            p = plan_of(graph, choice, plan.solution.bound, str(presets))
            yield replace(p, live_bytes=plan.live_bytes, budget=plan.budget)


def with_overlap(
    plan: StrategyPlan, presets: PresetPlans, limit: int | None, report: Callable[[str], object]
) -> StrategyPlan:
    """Return the fastest of a searched plan and those of presets, with overlap, within a limit of
    memory."""
    lowered = presets.lowered
    timeline = StepTimeline(lowered.f.body.block, lowered.mesh)

    def estimate(p: StrategyPlan) -> float:
        return timeline.seconds(p.candidates, p.layouts, p.shares)

    base, ops = estimate(plan), max(len(plan.candidates), 1)
    programs = min(MAX_LOWERED, MAX_LOWERED_OPS // ops - 1)  # beside the plan's own
    many = min(MAX_ESTIMATED, 1 + MAX_ESTIMATED_OPS // ops)
    longest = (MAX_SHORT if programs > 0 else MARGIN) * base
    estimated = ((estimate(p), p) for p in islice(presets.plans(plan, limit, longest), many))
    near = sorted((e for e in estimated if e[0] < longest), key=lambda e: e[0])
    if near and programs > 0:
        base = max(base, lowered.cost(plan).seconds)
        near = [(s, p) for s, p in near[:programs] if s < MARGIN * base]
    elif near:
        near = [(s, p) for s, p in near[:1] if s < base * IMPROVEMENT]
        if near and limit is None:
            ((seconds, best),) = near
            report(f"{best.presets}: about {seconds:.6g} s with overlap, not {base:.6g} s")
            return best
    best = plan
    for _, p in near:
        cost = lowered.cost(p)
        report(f"{p.presets}: {cost.seconds:.6g} s with overlap")
        fits = limit is None or lowered.bytes(p) <= limit
        if fits and cost.seconds < lowered.cost(best).seconds * IMPROVEMENT:
            best = p
    return best


def _shortest(solution: GroupedSolution) -> float:
    """Return the time of a solution of which all that can be overlaps."""
    return max(solution.computation, solution.objective - solution.computation)


def plan_of(graph: CostGraph, choice: list[int], bound: float, presets: str) -> StrategyPlan:
    """Return the plan of a choice, with its full cost and the bound of all plans."""
    seconds, shares = shared_seconds(graph.bucket_transfers(choice), TransferPrices(graph.mesh))
    objective = graph.problem.cost(choice) + seconds
    solution = Solution(choice, objective, min(bound, objective))
    return replace(StrategyPlan.of(graph, solution, shares), presets=presets)
