"""The search for the plan of a function: the fastest one, or the fastest one whose lowered program
fits in the memory.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp

from shardir.algebra.mesh import Mesh
from shardir.analysis.functions import name_of
from shardir.diagnostics import ShardirError
from shardir.search.bucket_prices import TransferPrices
from shardir.search.buckets import MAX_SCALINGS, Solve, smallest_shares, solve_with_buckets
from shardir.search.candidates import candidate_source
from shardir.search.cost_graph import CostGraph
from shardir.search.graph_bytes import argument_bytes, live_bytes
from shardir.search.memory import live
from shardir.search.memory_limit import solve_within
from shardir.search.preset_plans import with_overlap
from shardir.search.solver import solve
from shardir.search.strategy_plan import LoweredPlans, StrategyPlan
from shardir.search.value_layouts import Ties

MEMORY_GAP = 2e-3
"""The smallest gap at which a plan that keeps to the memory is looked for."""

MAX_MEMORY_PLANS = 5
"""How many plans are looked for whose program keeps to the memory."""

LIMIT_STEP = 0.02
"""The part of a plan's live bytes by which the limit of the next plan's differs, at least."""

ReportLine = Callable[[str], object]
"""Receives lines on the progress."""


def search_plan(
    module: ModuleOp,
    f: FuncOp,
    mesh: Mesh,
    ties: Ties,
    limit: int | None,
    cap: int,
    gap: float,
    overlap: bool,
    report: ReportLine,
) -> StrategyPlan:
    """Return the fastest plan of a function; with a limit, the fastest one found whose program
    keeps to it. The bound is that of all plans whose arguments keep to it: the search counts more
    bytes of other values than some programs need, and a bound for plans of few counted bytes is
    none for those.

    Args:
        limit: bytes of a device.
        cap: entries of the solver's largest table.
        overlap: whether plans of presets are compared with it by the time with overlap.

    Raises:
        ShardirError: no plan keeps to the limit.
    """
    lowered = LoweredPlans(module, f, mesh)
    plan = _searched(lowered, ties, limit, cap, gap, report)
    return with_overlap(plan, lowered, limit, report) if overlap else plan


def _searched(
    lowered: LoweredPlans,
    ties: Ties,
    limit: int | None,
    cap: int,
    gap: float,
    report: ReportLine,
) -> StrategyPlan:
    """Return the plan with the smallest sum of times."""

    def solver(gap: float) -> Solve:
        def progress(objective: float, bound: float) -> None:
            report(f"{objective:.6g} s, bound {bound:.6g} s")

        return lambda problem: solve(problem, cap, gap, progress)

    mesh = lowered.mesh
    unlimited = mesh.cluster and replace(mesh.cluster, memory=None)  # no price depends on it
    source, block = candidate_source(replace(mesh, cluster=unlimited)), lowered.f.body.block
    plan = fastest_plan(CostGraph(block, source, ties), solver(gap))
    if limit is None or (used := lowered.bytes(plan)) <= limit:
        return plan
    graph, gap = CostGraph(block, source, ties, counts_memory=True), max(gap, MEMORY_GAP)
    bound = bound_within(plan, limit, gap, solver(gap / 2))
    best: StrategyPlan | None = None
    fewest, choices = used, list[list[int]]()
    allowed, low, high = limit, 1, inf  # of the bytes that are counted
    for _ in range(MAX_MEMORY_PLANS):
        report(f"a program of {used} B, of which {limit} B fit")
        found = plan_within(graph, allowed, gap, solver(gap / 2), choices)
        used = lowered.bytes(found)
        fewest = min(fewest, used)
        solution, counted = found.solution, found.live_bytes
        report(
            f"{solution.objective:.6g} s with {counted} B of values; bound with {allowed} B: "
            f"{solution.bound:.6g} s"
        )
        if used > limit:
            if counted > allowed:
                break
            high = int(counted * (1 - LIMIT_STEP))
        elif best is None or solution.objective < best.solution.objective:
            best, low = found, int(max(allowed, counted) * (1 + LIMIT_STEP))
        else:
            break
        allowed = int(min(counted + limit - used, high))
        if allowed < low:
            break
    if best is not None:
        solution = best.solution
        return replace(best, solution=replace(solution, bound=min(bound, solution.objective)))
    raise ShardirError(
        f"@{name_of(lowered.f)}: expected a plan within {limit} B on a device, got {fewest} B in "
        "the smallest program found; use more devices, smaller batches, or microbatches"
    )


def fastest_plan(graph: CostGraph, solve: Solve, scalings: int = MAX_SCALINGS) -> StrategyPlan:
    """Return the fastest plan that is found."""
    solution, shares = solve_with_buckets(
        graph.problem_with, graph.bucket_transfers, graph.max_late_transfers,
        TransferPrices(graph.mesh), solve, scalings,
    )  # fmt: skip
    return StrategyPlan.of(graph, solution, shares)


def bound_within(plan: StrategyPlan, limit: int, gap: float, solve: Solve) -> float:
    """Return a bound of all plans with at most `limit` bytes of arguments, from the fastest plan
    without a limit."""
    held = argument_bytes(plan.graph)
    if live(held, plan.solution.choice).max() <= limit:
        return plan.solution.bound
    problem = plan.graph.problem_with(smallest_shares(plan.graph.max_late_transfers))
    choices = [plan.solution.choice]
    return max(plan.solution.bound, solve_within(problem, held, limit, solve, gap, choices).bound)


def plan_within(
    graph: CostGraph, limit: int, gap: float, solve: Solve, choices: list[list[int]]
) -> StrategyPlan:
    """Return the fastest plan found with at most `limit` live bytes on a device; if there is none,
    the one with the fewest.

    Args:
        gap: the relative gap that is enough.
        choices: solutions to begin with; those that are found are added.
    """
    held = live_bytes(graph)
    plan = fastest_plan(
        graph, lambda problem: solve_within(problem, held, limit, solve, gap, choices), 1
    )
    return replace(plan, live_bytes=int(live(held, plan.solution.choice).max()))
