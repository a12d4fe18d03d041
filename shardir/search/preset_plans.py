"""The plans of presets, compared with the searched plan by the time with overlap.

The search minimises the sum of times; another plan may hide more of its communication. The plans of
presets are solved in the cost graph (preset_solutions.py). Those that may be faster have their time
with overlap estimated (overlapped.py), and where programs are small enough the fastest of these are
lowered and measured. So no preset is faster than the result, as far as the estimates are right.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
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
"""How many plans of presets have their time with overlap estimated: those of the smallest sums."""

MAX_ESTIMATED_OPS = 20_000
"""The ops of these plans together."""

MAX_LOWERED = 8
"""How many plans of presets are lowered: those of the smallest estimates."""

MAX_LOWERED_OPS = 4000
"""The ops of all functions that are lowered to be measured; with more, the estimates decide."""

MARGIN = 1.05
"""The ratio of estimates up to which the larger one may be of the faster program."""


def with_overlap(
    plan: StrategyPlan,
    lowered: LoweredPlans,
    limit: int | None,
    report: Callable[[str], object],
) -> StrategyPlan:
    """Return the fastest of a searched plan and those of presets, with overlap, within a limit of
    memory."""
    if not axes_of(lowered.mesh):
        return plan
    timeline = StepTimeline(lowered.f.body.block, lowered.mesh)

    def estimate(p: StrategyPlan) -> float:
        return timeline.seconds(p.candidates, p.layouts, p.shares)

    base = estimate(plan)
    many = min(MAX_ESTIMATED, 1 + MAX_ESTIMATED_OPS // max(len(plan.candidates), 1))
    plans = islice(preset_plans(plan, lowered, limit, MARGIN * base), many)
    estimated = sorted(((estimate(p), p) for p in plans), key=lambda e: e[0])
    near = [(s, p) for s, p in estimated[:MAX_LOWERED] if s < MARGIN * base]
    if len(plan.candidates) * (1 + len(near)) > MAX_LOWERED_OPS:
        near = [(s, p) for s, p in near[:1] if s < base * IMPROVEMENT]
        if near and limit is None:
            seconds, best = near[0]
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


def preset_plans(
    plan: StrategyPlan, lowered: LoweredPlans, limit: int | None, longest: float
) -> Iterator[StrategyPlan]:
    """Yield the plans of products of presets that may take less than `longest` with overlap, in
    the order of their sums; if the graph counts memory, those that keep to the limit. Of products
    with the same plan the first one counts."""
    graph, structure = plan.graph, Structure(lowered.f)
    solutions = PresetSolutions(graph, graph.smallest_problem, structure)
    found: list[tuple[GroupedSolution, ProductOfPresets]] = []
    for each in products(lowered.mesh):
        presets = ProductOfPresets(each, structure, lowered.mesh)
        if presets.exists:
            solution = solutions.solve(presets)
            found.append((solution, presets))
            if _shortest(solution) < longest:
                found.append((solutions.improved(solution), presets))
    held = argument_bytes(graph, lowered.hosted) if limit is not None else []
    seen = {tuple(plan.solution.choice)}
    for solution, presets in sorted(found, key=lambda each: each[0].objective):
        choice = solutions.choice(solution)
        if _shortest(solution) < longest and tuple(choice) not in seen:
            seen.add(tuple(choice))
            if limit is not None and live(held, choice).max() > limit:
                continue
            p = plan_of(graph, choice, plan.solution.bound, str(presets))
            smallest = min(plan.solution.objective, p.solution.objective)
            yield replace(p, live_bytes=plan.live_bytes, budget=plan.budget, smallest=smallest)


def _shortest(solution: GroupedSolution) -> float:
    """Return the time of a solution of which all that can be overlaps."""
    return max(solution.computation, solution.objective - solution.computation)


def plan_of(graph: CostGraph, choice: list[int], bound: float, presets: str) -> StrategyPlan:
    """Return the plan of a choice, with its full cost and the bound of all plans."""
    seconds, shares = shared_seconds(graph.bucket_transfers(choice), TransferPrices(graph.mesh))
    objective = graph.problem.cost(choice) + seconds - graph.shared_seconds(choice)
    solution = Solution(choice, objective, min(bound, objective))
    return replace(StrategyPlan.of(graph, solution, shares), presets=presets)
