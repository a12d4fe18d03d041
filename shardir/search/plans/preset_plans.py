"""The plans of presets, compared with the searched plan by their lowered programs.

The plans of presets are solved in the cost graph (preset_solutions.py). A plan of a larger sum may
hide more of its communication, or have more tensors in a bucket. So the plans of the smallest sums
and those of the smallest bounds with overlap are lowered, in turns, and the fastest program is
chosen.
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

    def _solve(self, solutions: PresetSolutions, longest: float) -> list[SolvedProduct]:
        """Return the solutions of products, and these improved, whose bounds with overlap are below
        `longest` seconds, in the order of their sums. Of equal choices the first product counts."""
        solved = [(solutions.solve(presets), presets) for presets in self._products]
        near = [(s, presets) for s, presets in solved if bound_with_overlap(s) < longest]
        near += [(solutions.improved(s), presets) for s, presets in near]
        different = dict[tuple[int, ...], SolvedProduct]()
        for s, presets in sorted(near, key=lambda product: product[0].objective):
            different.setdefault(s.choices, (s, presets))
        return [*different.values()]

    def plans(
        self, plan: StrategyPlan, limit: int | None, longest: float
    ) -> Iterator[StrategyPlan]:
        """Yield the plans in the graph of a plan, but that plan, that may take less than `longest`
        with overlap: in turns the one of the smallest sum and the one of the smallest bound. If the
        graph counts memory, those that keep to the limit."""
        if not self._products:
            return
        graph = plan.graph
        solutions = PresetSolutions(graph, graph.smallest_problem, self._structure)
        held = argument_bytes(graph, self.lowered.hosted) if limit is not None else []
        by_sum = self._solve(solutions, longest)
        by_bound = sorted(by_sum, key=lambda solved: bound_with_overlap(solved[0]))
        in_turns = chain.from_iterable(zip(by_sum, by_bound, strict=True))
        for solution, presets in dict.fromkeys(in_turns):
            choice = solutions.choice(solution)
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
