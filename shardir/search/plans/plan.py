"""The search for the plan of a function: the fastest one, or the fastest one whose lowered program
fits in the memory.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from math import inf

from xdsl.ir import SSAValue

from shardir.algebra.estimates import IMPROVEMENT
from shardir.analysis.functions import name_of
from shardir.diagnostics import ShardirError
from shardir.search.graph.bucket_prices import TransferPrices
from shardir.search.graph.buckets import Solve, SolveAgain, solve_with_buckets
from shardir.search.graph.candidates import candidate_source
from shardir.search.graph.cost_graph import CostGraph
from shardir.search.graph.graph_bytes import argument_bytes, live_bytes
from shardir.search.graph.value_layouts import Ties
from shardir.search.measure.strategy_plan import LoweredPlans, StrategyPlan
from shardir.search.plans.preset_plans import PresetPlans
from shardir.search.problem.elimination import Solution
from shardir.search.problem.memory import live
from shardir.search.problem.memory_limit import solve_within
from shardir.search.problem.problem import CostProblem
from shardir.search.problem.solver import solve

UNPRICED_GAPS = 2
"""The gap of buckets, in gaps of the solver."""

MEMORY_GAP = 2e-3
"""The smallest gap at which a plan that keeps to the memory is looked for."""

MAX_MEMORY_PLANS = 5
"""How many plans are looked for whose program keeps to the memory."""

MAX_TRIED_OPS = 2000
"""The ops of a function of which the fastest plan of all is tried within the memory too, although
others keep to it: with more, its program takes long to make."""

LIMIT_STEP = 0.02
"""The part of a plan's live bytes by which the limit of the next plan's differs, at least."""

ReportLine = Callable[[str], object]
"""Receives lines on the progress."""


def search_plan(
    lowered: LoweredPlans,
    ties: Ties,
    limit: int | None,
    cap: int,
    gap: float,
    overlap: bool,
    report: ReportLine,
) -> StrategyPlan:
    """Return the fastest plan of a function; with a limit, the one with the fastest program of
    those found that keep to it, with what `choose-recompute` repeats. The bound is that of all
    plans whose arguments keep to it: programs need these, whatever they compute again.

    Args:
        lowered: makes the programs.
        limit: bytes of a device.
        cap: entries of the solver's largest table.
        overlap: whether plans of presets are compared with it by the time with overlap.

    Raises:
        ShardirError: no plan keeps to the limit.
    """
    plan = _searched(lowered, ties, limit, cap, gap, report)
    best = PresetPlans(lowered).fastest(plan, limit, report) if overlap else plan
    found = lowered.measured(best)
    if best is not plan:
        smallest = min(p.solution.objective for p in (lowered.measured(plan), found))
        found = replace(found, smallest=smallest)
    return found


def _searched(
    lowered: LoweredPlans,
    ties: Ties,
    limit: int | None,
    cap: int,
    gap: float,
    report: ReportLine,
) -> StrategyPlan:
    """Return the plan with the smallest sum of times; within memory the one whose program is
    fastest."""

    def solver(gap: float, bounds: bool = True) -> Solve:
        def progress(objective: float, bound: float) -> None:
            report(f"{objective:.6g} s, bound {bound:.6g} s")

        return lambda problem: solve(problem, cap, gap, progress, bounds)

    source, block = candidate_source(lowered.mesh.without_memory), lowered.f.body.block
    unpriced = UNPRICED_GAPS * gap

    def again(problem: CostProblem, enough: float) -> Solution:
        return solve(problem, cap, unpriced, bounds=False, enough=enough)

    graph = CostGraph(block, source, ties)
    plan = fastest_plan(graph, solver(gap), again, unpriced)
    if limit is None:
        return plan
    if lowered.may_fit(plan, ties, limit):
        if lowered.bytes(plan) <= limit:
            return plan
        report(f"a program of {lowered.bytes(plan)} B, of which {limit} B fit")
    gap = max(gap, MEMORY_GAP)
    bound = bound_within(plan, lowered.hosted, limit, gap, solver(gap / 2))
    found = PlansWithin(lowered, limit, report)
    graph = CostGraph(block, source, ties, counts_memory=True, repeats=lowered.repeats)
    every_hosted = dict.fromkeys((frozenset[SSAValue](), lowered.hosted))
    solves = solver(gap / 2, bounds=False)
    for hosted in every_hosted:
        within = partial(plan_within, graph, hosted, gap=gap, solve=solves, choices=[])
        try_within(found, within)
    few = len(plan.candidates) <= MAX_TRIED_OPS or found.best is None
    if lowered.budgets and few and found.may_be_faster(plan):
        found.offer(plan)
    smallest = PlansWithin(lowered, 1, report)
    if found.best is None:  # of plans that depend on no limit: the bytes that it needs are enough
        few_bytes = [plan_within(graph, hosted, 1, gap, solves, []) for hosted in every_hosted]
        for each in few_bytes:
            found.offer(each)
        for each in (*few_bytes, plan):
            smallest.offer(each)
    best = found.best
    if best is not None:
        solution = best.solution
        return replace(best, solution=replace(solution, bound=min(bound, solution.objective)))
    more = (
        "microbatches, or offload=true"
        if lowered.budgets and not lowered.offload
        else "or microbatches"
    )
    raise ShardirError(
        f"@{name_of(lowered.f)}: expected a plan within {limit} B on a device, got "
        f"{smallest.fewest} B in the smallest program found{smallest.uncounted}; use more devices, "
        f"smaller batches, {more}"
    )


def fastest_plan(
    graph: CostGraph, solve: Solve, again: SolveAgain, unpriced: float
) -> StrategyPlan:
    """Return the fastest plan that is found. `again` solves the problems after the first, to a gap
    of `unpriced`."""
    prices, first = TransferPrices(graph.mesh), graph.smallest_problem
    solution, shares = solve_with_buckets(graph, first, prices, solve, again, unpriced)
    bound = solve(graph.bounding_problem).bound
    solution = replace(solution, bound=min(bound, solution.objective))
    return StrategyPlan.of(graph, solution, shares)


def bound_within(
    plan: StrategyPlan, hosted: Collection[SSAValue], limit: int, gap: float, solve: Solve
) -> float:
    """Return a bound of all plans with at most `limit` bytes of arguments, but those that may be
    in host memory, from the fastest plan without a limit."""
    held = argument_bytes(plan.graph, hosted)
    if live(held, plan.solution.choice).max() <= limit:
        return plan.solution.bound
    problem, choices = plan.graph.bounding_problem, [plan.solution.choice]
    return max(plan.solution.bound, solve_within(problem, held, limit, solve, gap, choices).bound)


def plan_within(
    graph: CostGraph, hosted: Collection[SSAValue], limit: int, gap: float, solve: Solve,
    choices: list[list[int]],
) -> StrategyPlan:  # fmt: skip
    """Return the fastest plan found with at most `limit` live bytes on a device; if there is none,
    the one with the fewest. Its bound is one of the sum alone: that of `bound_within` counts.

    Args:
        hosted: the arguments that may be in host memory, and do not count.
        gap: the relative gap that is enough.
        choices: solutions to begin with; those that are found are added.
    """
    held = live_bytes(graph, hosted)

    def within(problem: CostProblem, _: float = -inf) -> Solution:
        return solve_within(problem, held, limit, solve, gap, choices)

    prices, first = TransferPrices(graph.mesh), graph.smallest_problem
    solution, shares = solve_with_buckets(graph, first, prices, within, within, gap / 2, scalings=1)
    once = graph.computed_once(solution.choice)
    seconds = solution.objective + graph.problem.cost(once) - graph.problem.cost(solution.choice)
    plan = StrategyPlan.of(graph, Solution(once, seconds, min(solution.bound, seconds)), shares)
    return replace(plan, live_bytes=int(live(held, solution.choice).max()))


class PlansWithin:
    """The plans that are tried within a limit of memory.

    Attributes:
        best: the one with the fastest program that keeps to the limit, if one does.
        fewest: the bytes of the smallest program.
        counted: the bytes of that program that the search counted.
    """

    def __init__(self, lowered: LoweredPlans, limit: int, report: ReportLine):
        self.lowered, self.limit, self.report = lowered, limit, report
        self.best: StrategyPlan | None = None
        self.fewest, self.counted = inf, 0

    @property
    def uncounted(self) -> str:
        """The bytes of the smallest program that the search did not count, as a text: a plan may be
        missed because of them. Empty if there are none."""
        more = self.fewest - self.counted if self.counted else 0
        return f" ({more} B of it are not counted by the search, and may hide a plan)" * (more > 0)

    def offer(self, plan: StrategyPlan) -> int:
        """Return the bytes of a plan's program; it becomes the best one if it is."""
        if self.lowered.budgets:
            plan = replace(plan, budget=self.limit)
        cost = self.lowered.cost(plan)
        used = cost.memory.peak
        self.report(f"{cost.seconds:.6g} s with overlap, {used} B of which {self.limit} B fit")
        if used < self.fewest:
            self.fewest, self.counted = used, plan.live_bytes
        if used <= self.limit and (self.best is None or self._is_faster(cost.seconds)):
            self.best = plan
        return used

    def may_be_faster(self, plan: StrategyPlan) -> bool:
        """Whether the program of a plan would be the best one if it had to repeat nothing."""
        return self.best is None or self._is_faster(self.lowered.cost(plan).seconds)

    def _is_faster(self, seconds: float) -> bool:
        assert self.best is not None
        return seconds < self.lowered.cost(self.best).seconds * IMPROVEMENT


def try_within(found: PlansWithin, within: Callable[[int], StrategyPlan]) -> None:
    """Offer plans whose counted bytes are moved to where their programs keep to the limit.

    Args:
        within: returns the fastest plan of which at most so many bytes are counted.
    """
    limit, first = found.limit, found.best
    allowed, low, high = limit, 1, inf  # of the bytes that are counted
    for _ in range(MAX_MEMORY_PLANS):
        near, before = within(allowed), found.best
        used, counted = found.offer(near), near.live_bytes
        if used > limit and counted > allowed:  # no plan counts fewer
            if found.best is not first:
                break
            low = max(low, counted)
        elif used > limit:
            high = int(counted * (1 - LIMIT_STEP))
        elif found.best is not before:
            low = int(max(allowed, counted) * (1 + LIMIT_STEP))
        else:
            break
        allowed = int(min(counted + limit - used, high))
        if allowed < 1:  # what is not counted needs more than the limit: less of it with less else
            allowed = int(min(counted * limit / used, high))
        if found.best is first and allowed < low <= high < inf:
            allowed = int((low + high) / 2)
        if allowed < low:
            break
