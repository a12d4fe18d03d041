"""The plan of a function: a candidate for each op and a layout for each value.

search_plan     the fastest plan, or the fastest one whose lowered program fits in the memory
write           the plan, in the IR
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from xdsl.context import Context
from xdsl.dialects.builtin import DictionaryAttr, ModuleOp, UnitAttr
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Operation, SSAValue

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.analysis.functions import name_of, values
from shardir.cost import memory_of
from shardir.diagnostics import ShardirError
from shardir.dialects.dist import StrategyAttr, with_layout
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.properties import float_attr
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting import nested
from shardir.rewriting.functions import update_signature
from shardir.rewriting.marks import RECOMPUTE, SEARCHED
from shardir.rewriting.rewriter import erase, set_type
from shardir.search.buckets import MAX_SCALINGS, Solve, solve_with_buckets
from shardir.search.candidates import Candidate, CandidateSource
from shardir.search.cost_graph import CostGraph
from shardir.search.elimination import Solution
from shardir.search.memory import live
from shardir.search.memory_limit import TightError, solve_within
from shardir.search.problem import CostProblem
from shardir.search.solver import solve
from shardir.search.transfer_costs import LatencyShares, bucket_price
from shardir.search.value_layouts import Ties

MEMORY_GAP = 2e-3
"""The smallest gap at which a plan that keeps to the memory is looked for."""

MAX_MEMORY_PLANS = 5
"""How many plans are looked for whose program keeps to the memory."""

LIMIT_STEP = 0.02
"""The part of a plan's live bytes by which the limit of the next plan's differs, at least."""

LOWERING = "lower-plan"
"""The pipeline that makes the program of a plan."""

ReportLine = Callable[[str], object]
"""Receives lines on the progress."""


@dataclass(frozen=True)
class StrategyPlan:
    """The candidates of ops and the layouts of values, for a solution of a cost graph with shares
    of buckets.

    `live_bytes`: the live bytes on a device, if the graph counts memory. Then what is redistributed
    in the forward part is redistributed again in the backward part, and not saved.
    """

    candidates: Mapping[TensorOp, Candidate]
    layouts: Mapping[SSAValue, Layout]
    solution: Solution
    graph: CostGraph
    shares: LatencyShares
    live_bytes: int = 0

    @property
    def problem(self) -> CostProblem:
        """The problem in which the solution has its cost."""
        return self.graph.problem_with(self.shares)

    def on(
        self, ops: Mapping[Operation, Operation], values: Mapping[SSAValue, SSAValue]
    ) -> "StrategyPlan":
        """Return the plan of a copy of the function."""
        candidates = {ops[op]: c for op, c in self.candidates.items()}
        layouts = {values[v]: layout for v, layout in self.layouts.items()}
        return replace(self, candidates=candidates, layouts=layouts)


def search_plan(
    module: ModuleOp,
    f: FuncOp,
    mesh: Mesh,
    ties: Ties,
    limit: int | None,
    cap: int,
    gap: float,
    report: ReportLine,
) -> StrategyPlan:
    """Return the fastest plan of a function; with a limit, the fastest one found whose program
    keeps to it.

    Args:
        limit: bytes of a device.
        cap: entries of the solver's largest table.

    Raises:
        ShardirError: no plan keeps to the limit.
    """

    def solver(gap: float) -> Solve:
        def progress(objective: float, bound: float) -> None:
            report(f"{objective:.6g} s, bound {bound:.6g} s")

        return lambda problem: solve(problem, cap, gap, progress)

    source = CandidateSource(mesh)
    plan = fastest_plan(CostGraph(f.body.block, source, ties), solver(gap))
    if limit is None or (used := program_bytes(module, f, plan, mesh)) <= limit:
        return plan
    graph = CostGraph(f.body.block, source, ties, counts_memory=True)
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
        used = program_bytes(module, f, found, mesh)
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
        f"@{name_of(f)}: expected a plan within {limit} B on a device, got {needed}; "
        "use more devices, smaller batches, or microbatches"
    )


def fastest_plan(graph: CostGraph, solve: Solve, scalings: int = MAX_SCALINGS) -> StrategyPlan:
    """Return the fastest plan that is found."""
    max_transfers = sum(edge.max_transfers for edge in graph.bucket_edges)
    solution, shares = solve_with_buckets(
        graph.problem_with, graph.bucket_transfers, max_transfers,
        lambda transfer, shares: bucket_price(graph.mesh, transfer, shares), solve, scalings,
    )  # fmt: skip
    choice = solution.choice
    candidates = {
        op: graph.candidates[op][choice[i]]
        for op, i in graph.op_variable.items() if isinstance(op, TensorOp)
    }  # fmt: skip
    layouts = {v: graph.layouts[v][choice[i]].layout for v, i in graph.value_variable.items()}
    for op, candidate in candidates.items():
        for v, layout in zip(op.results, candidate.results, strict=True):
            layouts.setdefault(v, layout)
    return StrategyPlan(candidates, layouts, solution, graph, shares)


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


def program_bytes(module: ModuleOp, f: FuncOp, plan: StrategyPlan, mesh: Mesh) -> int:
    """Return the peak of a device's memory in the lowered program of a plan."""
    trial = module.clone()
    copy = next(g for g in trial.body.ops if isinstance(g, FuncOp) and name_of(g) == name_of(f))
    for other in trial.body.ops:
        if isinstance(other, FuncOp) and other is not copy:
            erase(other)
    ops = dict(zip(f.body.block.ops, copy.body.block.ops, strict=True))
    pairs = zip(values(f.body.block), values(copy.body.block), strict=True)
    write(copy, plan.on(ops, dict(pairs)))
    nested.run(LOWERING, Context(), trial)
    return memory_of(copy, mesh).peak


def write(f: FuncOp, plan: StrategyPlan) -> None:
    """Write a plan into the IR: strategies, layouts, and the attribute `search` of the function."""
    for op, candidate in plan.candidates.items():
        if op.operands:
            op.properties["strategy"] = StrategyAttr(candidate.strategy)
        if candidate.times > 1:
            op.attributes[RECOMPUTE] = UnitAttr()
    for v, layout in plan.layouts.items():
        set_type(v, with_layout(unsharded_type(v), layout))
    update_signature(f)
    s = plan.solution
    figures = {"objective": s.objective, "bound": s.bound, "gap": s.gap}
    found: dict[str, Attribute] = {k: float_attr(x) for k, x in figures.items()}
    if plan.live_bytes:
        found[RECOMPUTE] = UnitAttr()
    f.attributes[SEARCHED] = DictionaryAttr(found)
