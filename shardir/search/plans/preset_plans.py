"""The plans of presets, compared with the searched plan by their lowered programs.

The plans of presets are solved in the cost graph (preset_solutions.py). Where the gap is large, the
search goes on from the one of the smallest sum, if that is smaller than its own: many small tensors
may be in one bucket in it. A plan of a larger sum may hide more of its communication. So the plans
of the smallest sums and those of the smallest bounds with overlap are lowered, in turns, and the
fastest program is chosen.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice

from shardir.algebra.estimates import IMPROVEMENT
from shardir.search.graph.bucket_prices import TransferPrices
from shardir.search.graph.buckets import shared_seconds
from shardir.search.graph.cost_graph import CostGraph
from shardir.search.graph.graph_bytes import argument_bytes
from shardir.search.measure.strategy_plan import MAX_MEASURED_OPS, LoweredPlans, StrategyPlan
from shardir.search.plans.preset_solutions import GroupedSolution, PresetSolutions
from shardir.search.plans.presets import ProductOfPresets, Structure, axes_of, products
from shardir.search.problem.elimination import Solution
from shardir.search.problem.memory import live

MAX_OFFERED = 12
"""How many plans of presets the search may go on from: those of the smallest sums."""

MARGIN = 1.05
"""The ratio of its sum to that of the searched plan up to which the search may go on from one."""

MAX_LOWERED = 8
"""How many plans of presets are lowered. Of 11 models on clusters (GPT, BERT, experts; h100,
ascend910, shm, pod2048) the fastest was among the first five of the smallest sums, or among the
first four of the smallest bounds."""

FEW_LOWERED = 2
"""How many are lowered at least, though they have more than MAX_MEASURED_OPS together: the first
one by each order."""

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

    def solved(
        self, graph: CostGraph, seconds: Callable[[GroupedSolution], float], longest: float
    ) -> list[SolvedProduct]:
        """Return the solutions of products, as they are and improved, that take less than `longest`
        by `seconds`, in the order of their sums. Of equal choices the first product counts."""
        if not self._products:
            return []
        solutions, every = self._in(graph)
        near = [(each, presets) for each, presets in every if seconds(each) < longest]
        near += [(solutions.improved(each), presets) for each, presets in near]
        different = dict[tuple[int, ...], SolvedProduct]()
        for solved in sorted(near, key=lambda solved: solved[0].objective):
            different.setdefault(solved[0].choices, solved)
        return [*different.values()]

    def of_sum(self, graph: CostGraph, seconds: float) -> list[list[int]]:
        """Return the choices of which the sum may be less than so many seconds."""
        near = self.solved(graph, lambda each: each.objective, MARGIN * seconds)
        return [self._in(graph)[0].choice(each) for each, _ in near[:MAX_OFFERED]]

    def plans(
        self, plan: StrategyPlan, limit: int | None, longest: float
    ) -> Iterator[StrategyPlan]:
        """Yield the plans in the graph of a plan, but that plan, that may take less than `longest`
        with overlap: in turns the one of the smallest sum and the one of the smallest bound. If the
        graph counts memory, those that keep to the limit."""
        graph = plan.graph
        held = argument_bytes(graph, self.lowered.hosted) if limit is not None else []
        by_sum = self.solved(graph, bound_with_overlap, longest)
        by_bound = sorted(by_sum, key=lambda solved: bound_with_overlap(solved[0]))
        in_turns = chain.from_iterable(zip(by_sum, by_bound, strict=True))
        for solution, presets in dict.fromkeys(in_turns):
            choice = self._in(graph)[0].choice(solution)
            if choice == plan.solution.choice:
                continue
            if limit is not None and live(held, choice).max() > limit:
                continue
            p = plan_of(graph, choice, plan.solution.bound, str(presets))
            yield replace(p, live_bytes=plan.live_bytes, budget=plan.budget)

    def fastest(
        self, plan: StrategyPlan, limit: int | None, report: Callable[[str], object]
    ) -> StrategyPlan:
        """Return the plan of the fastest program with overlap, of a searched plan and those of
        presets, within a limit of memory; of a function with more than MAX_MEASURED_OPS the
        searched plan."""
        lowered, ops = self.lowered, max(len(plan.candidates), 1)
        if ops > MAX_MEASURED_OPS:
            return plan
        many = max(FEW_LOWERED, min(MAX_LOWERED, MAX_MEASURED_OPS // ops - 1))
        best, seconds = plan, lowered.cost(plan).seconds
        for p in islice(self.plans(plan, limit, seconds), many):
            cost = lowered.cost(p)
            report(f"{p.presets}: {cost.seconds:.6g} s with overlap")
            fits = limit is None or cost.memory.peak <= limit
            if fits and cost.seconds < seconds * IMPROVEMENT:
                best, seconds = p, cost.seconds
        return best


def bound_with_overlap(solution: GroupedSolution) -> float:
    """Return the seconds of a solution whose computation and communication overlap in full."""
    return max(solution.computation, solution.objective - solution.computation)


def plan_of(graph: CostGraph, choice: list[int], bound: float, presets: str) -> StrategyPlan:
    """Return the plan of a choice, with its full cost and the bound of all plans."""
    seconds, shares = shared_seconds(graph.bucket_transfers(choice), TransferPrices(graph.mesh))
    objective = graph.problem.cost(choice) + seconds
    solution = Solution(choice, objective, min(bound, objective))
    return replace(StrategyPlan.of(graph, solution, shares), presets=presets)
