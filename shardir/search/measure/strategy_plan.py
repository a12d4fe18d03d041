"""The plan of a function: a candidate for each op and a layout for each value.

write           the plan, in the IR
LoweredPlans    its programs, lowered to be measured
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from xdsl.dialects.builtin import DictionaryAttr, ModuleOp, StringAttr, TensorType, UnitAttr
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Block, Operation, SSAValue

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.analysis.functions import mesh_of, name_of, values
from shardir.analysis.roles import frees
from shardir.compat.xdsl import set_type
from shardir.cost.report import FunctionCost, cost_of_function
from shardir.dialects.dist import StrategyAttr, with_layout
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.properties import float_attr, int_attr
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import PIPELINE, BackwardOp
from shardir.rewriting.functions import update_signature
from shardir.rewriting.marks import BUDGET, NO_RECOMPUTE, PRESETS, RECOMPUTE, SEARCHED, SMALLEST
from shardir.search.graph.candidates import Candidate
from shardir.search.graph.cost_graph import CostGraph
from shardir.search.graph.latency_shares import LatencyShares
from shardir.search.graph.live_bytes import shard_bytes, storages_of
from shardir.search.measure.trial import lowered
from shardir.search.problem.elimination import Solution
from shardir.search.problem.problem import CostProblem
from shardir.search.recompute.offloads import updates

LOWERING = "lower-plan{{recompute={} offload={} nearest=true}}"
"""The pipeline that makes the program of a plan, with what the caller asks `choose-recompute` for;
if nothing keeps to its budget, what is nearest to it."""


MAX_MEASURED_OPS = 4000
"""The ops of the largest function that is lowered for its objective, or compared with presets:
lowering takes about a millisecond for each op."""


@dataclass(frozen=True)
class StrategyPlan:
    """A solution of a cost graph, with shares of buckets.

    Attributes:
        live_bytes: the live bytes on a device, if the graph counts memory. Then what is
            redistributed in the forward part is redistributed again in the backward part, and not
            saved.
        presets: the product of presets that the plan is of; empty if it was searched for.
        smallest: the objective of the plan that it was chosen before, since it is faster with
            overlap.
    """

    candidates: Mapping[TensorOp, Candidate]
    layouts: Mapping[SSAValue, Layout]
    solution: Solution
    graph: CostGraph
    shares: LatencyShares
    live_bytes: int = 0
    presets: str = ""
    smallest: float | None = None
    budget: int | None = None

    @staticmethod
    def of(graph: CostGraph, solution: Solution, shares: LatencyShares) -> "StrategyPlan":
        """Return the plan of a solution."""
        choice = solution.choice
        candidates = {
            op: graph.candidates[op][choice[i]]
            for op, i in graph.op_variable.items() if isinstance(op, TensorOp)
        }  # fmt: skip
        layouts = {v: graph.layouts[v][choice[i]] for v, i in graph.value_variable.items()}
        for op, candidate in candidates.items():
            for v, layout in zip(op.results, candidate.results, strict=True):
                layouts.setdefault(v, layout)
        return StrategyPlan(candidates, layouts, solution, graph, shares)

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


class LoweredPlans:
    """The cost of the lowered programs of a function's plans, each lowered once.

    Args:
        recompute: what is asked of `choose-recompute`; empty: the budgets of plans.
        offload: whether programs within budgets may have values in host memory.
    """

    def __init__(
        self, module: ModuleOp, f: FuncOp, mesh: Mesh, recompute: str = "", offload: bool = False
    ):
        self.module, self.f, self.mesh, self.recompute = module, f, mesh, recompute
        may = PIPELINE not in f.attributes and frees(f)
        self.repeats = may and recompute != NO_RECOMPUTE
        """Whether programs may compute anything again."""
        self.budgets = may and not recompute
        """Whether they do to keep to the budgets of their plans."""
        self.offload = offload and self.budgets
        may_be_hosted = (v for _, states in updates(f) for v in states)
        self.hosted = frozenset(may_be_hosted if self.offload else ())
        """The states that may be in host memory."""
        self._costs: dict[tuple, tuple[StrategyPlan, FunctionCost]] = {}

    def cost(self, plan: StrategyPlan) -> FunctionCost:
        """Return the cost of the lowered program of a plan."""
        key = _identity(plan)
        if key not in self._costs:
            self._costs[key] = plan, self._lowered(plan)  # the plan too, so that the ids are its
        return self._costs[key][1]

    def measured(self, plan: StrategyPlan) -> StrategyPlan:
        """Return a plan whose objective is the time of its lowered program, one op after the other.
        Of a function with more than MAX_MEASURED_OPS, whose program is not lowered yet, it stays
        the sum of the graph."""
        if len(plan.candidates) > MAX_MEASURED_OPS and _identity(plan) not in self._costs:
            return plan
        seconds = sum(c.seconds for c in self.cost(plan).ops)
        solution = plan.solution
        bound = min(solution.bound, seconds)
        return replace(plan, solution=replace(solution, objective=seconds, bound=bound))

    def may_fit(self, plan: StrategyPlan, ties: Mapping[SSAValue, SSAValue], limit: int) -> bool:
        """Whether the program of a plan without a budget may keep to a limit of bytes: not where
        what it saves for the backward part exceeds it."""
        return not self.budgets or saved_bytes(self.f.body.block, ties, plan) <= limit

    def bytes(self, plan: StrategyPlan) -> int:
        """Return the peak of a device's memory in the lowered program of a plan."""
        return self.cost(plan).memory.peak

    def _lowered(self, plan: StrategyPlan) -> FunctionCost:
        def write_on(copy: FuncOp) -> None:
            block, copied = self.f.body.block, copy.body.block
            ops = dict(zip(block.ops, copied.ops, strict=True))
            write(copy, plan.on(ops, dict(zip(values(block), values(copied), strict=True))))

        offload = self.offload and plan.budget is not None
        pipeline = LOWERING.format(json.dumps(self.recompute), json.dumps(offload))
        functions = lowered(self.module, self.f, write_on, pipeline, in_stages=True)
        program = next(g for g in functions if name_of(g) == name_of(self.f))
        trial = program.parent_op()
        assert isinstance(trial, ModuleOp)
        return cost_of_function(program, mesh_of(program, trial) or self.mesh)


def _identity(plan: StrategyPlan) -> tuple:
    """Return a key that is equal for plans with the same program."""
    return id(plan.candidates), id(plan.layouts), plan.budget, plan.live_bytes > 0


def saved_bytes(block: Block, ties: Mapping[SSAValue, SSAValue], plan: StrategyPlan) -> int:
    """Return at least the bytes that a device holds where the backward part begins, if nothing is
    computed again: of each storage that is live there the fewest of its values in their layouts; 0
    of a function without a backward part."""
    storages, mesh = storages_of(block, ties), plan.graph.mesh
    start = next((i for i, op in enumerate(block.ops) if isinstance(op, BackwardOp)), -1)
    found = defaultdict[SSAValue, set[Layout]](set)
    for v, layout in plan.layouts.items():
        found[v].add(layout)
    for op, candidate in plan.candidates.items():
        for v, layout in (
            *zip(op.operands, candidate.operands, strict=True),
            *zip(op.results, candidate.results, strict=True),
        ):
            found[v].add(layout)
    total = 0
    for root, span in storages.spans().items():
        if span.start < start < span.end and isinstance(root.type, TensorType):
            total += min(
                (
                    shard_bytes(unsharded_type(v), layout, mesh)
                    for v in storages.members(root) for layout in found[v]
                ),
                default=0,
            )  # fmt: skip
    return total


def write(f: FuncOp, plan: StrategyPlan) -> None:
    """Write a plan into the IR: strategies, layouts, and the attribute `search` of the function."""
    for op, candidate in plan.candidates.items():
        if op.operands:
            op.properties["strategy"] = StrategyAttr(candidate.strategy)
    for v, layout in plan.layouts.items():
        set_type(v, with_layout(unsharded_type(v), layout))
    update_signature(f)
    s = plan.solution
    figures = {"objective": s.objective, "bound": s.bound, "gap": s.gap}
    found: dict[str, Attribute] = {k: float_attr(x) for k, x in figures.items()}
    if plan.budget is not None:
        found[BUDGET] = int_attr(plan.budget)
    if plan.presets:
        found[PRESETS] = StringAttr(plan.presets)
    if plan.smallest is not None:
        found[SMALLEST] = float_attr(plan.smallest)
    if plan.live_bytes:
        found[RECOMPUTE] = UnitAttr()
    f.attributes[SEARCHED] = DictionaryAttr(found)
