"""The search for the plan of a function: the fastest one, or the fastest one whose lowered program
fits in the memory.
"""

from collections.abc import Callable
from dataclasses import replace

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp

from shardir.algebra.mesh import Mesh
from shardir.analysis.functions import name_of
from shardir.diagnostics import ShardirError
from shardir.search.buckets import MAX_SCALINGS, Solve, solve_with_buckets
from shardir.search.candidates import CandidateSource
from shardir.search.cost_graph import CostGraph
from shardir.search.memory import live
from shardir.search.memory_limit import TightError, solve_within
from shardir.search.preset_plans import with_overlap
from shardir.search.solver import solve
from shardir.search.strategy_plan import LoweredPlans, StrategyPlan
from shardir.search.transfer_costs import bucket_price
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
    keeps to it.

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

    source, block = CandidateSource(lowered.mesh), lowered.f.body.block
    plan = fastest_plan(CostGraph(block, source, ties), solver(gap))
    if limit is None or (used := lowered.bytes(plan)) <= limit:
        return plan
    graph = CostGraph(block, source, ties, counts_memory=True)
    gap = max(gap, MEMORY_GAP)
    best: StrategyPlan | None = None
    fewest, needed, choices = used, "", list[list[int]]()
    allowed, below = (
        limit,
        2 * limit,
    )  # of the bytes that are counted; those of a program include others
    for _ in range(MAX_MEMORY_PLANS):
        report(f"a program of {used} B, of which {limit} B fit")
        try:
            found = plan_within(graph, allowed, gap, solver(gap / 2), choices)
        except TightError as e:
            needed = f"{e.needed} B of values in the smallest plan" if allowed >= limit else ""
            break
        used = lowered.bytes(found)
        fewest = min(fewest, used)
        if used > limit:
            below = int(found.live_bytes * (1 - LIMIT_STEP))
        elif best is None or found.solution.objective < best.solution.objective:
            best = found
        else:
            break
        following = min(found.live_bytes + limit - used, below)
        if used <= limit and following < allowed * (1 + LIMIT_STEP):
            break
        allowed = following
    if best is not None:
        return best
    needed = needed or f"{fewest} B in the smallest program"
    raise ShardirError(
        f"@{name_of(lowered.f)}: expected a plan within {limit} B on a device, got {needed}; "
        "use more devices, smaller batches, or microbatches"
    )


def fastest_plan(graph: CostGraph, solve: Solve, scalings: int = MAX_SCALINGS) -> StrategyPlan:
    """Return the fastest plan that is found."""
    max_transfers = sum(edge.max_transfers for edge in graph.bucket_edges)
    solution, shares = solve_with_buckets(
        graph.problem_with, graph.bucket_transfers, max_transfers,
        lambda transfer, shares: bucket_price(graph.mesh, transfer, shares), solve, scalings,
    )  # fmt: skip
    return StrategyPlan.of(graph, solution, shares)


def plan_within(
    graph: CostGraph, limit: int, gap: float, solve: Solve, choices: list[list[int]]
) -> StrategyPlan:
    """Return the fastest plan found with at most `limit` live bytes on a device.

    Args:
        gap: the relative gap that is enough.
        choices: solutions to begin with; those that are found are added.

    Raises:
        TightError: none was found.
    """
    held = graph.live_bytes()
    plan = fastest_plan(
        graph, lambda problem: solve_within(problem, held, limit, solve, gap, choices), 1
    )
    return replace(plan, live_bytes=int(live(held, plan.solution.choice).max()))
