"""search-strategies: nothing or a few pins -> the strategies and layouts of least cost.

    %y = nn.matmul %x, %w : (tensor<8x4xf32>, tensor<4x6xf32>) -> tensor<8x6xf32>
 -> %y = nn.matmul %x, %w strategy<@m, (({dp}, {}), ({}, {tp}))> : ...

After distributed-autodiff, so that gradients and updates count: the layouts of a training step are
those of forward and backward part together.

1. Every op gets a strategy, every value a layout; insert-redistributions follows them, and what it
   makes takes the seconds that the search counted. A mesh without rates calculates as Gloo's ranks
   (cost/ready/gloo.ir) do.
2. What the text states, a layout of a value or a strategy of an op, stays; values of a sharding
   group lie alike, and barriers say nothing here.
3. The plan is the least in the modelled seconds of calculation and communication, of all plans in
   which an axis splits one dimension of an op, as a whole and evenly; or one that is above the
   least by no more than the gap that is stated: where the solver's tables would be too large, and
   where what is communicated at the end of a step goes into buckets, whose latency many share.
4. Parameters and states lie as the updates leave them, and may be split.
5. The program of the plan, made and measured, holds no more than a device does (`memory`, or what
   the cluster says). Where the quickest plan holds more, the next is the quickest of those that
   gather for the backward part again what they gathered for the forward part, and hold less.
6. The function's `search` attribute says the seconds (`objective`), the bound, the gap, and whether
   redistributions are made again (`recompute`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from xdsl.context import Context
from xdsl.dialects.builtin import DictionaryAttr, ModuleOp, TensorType, UnitAttr
from xdsl.dialects.func import CallOp, FuncOp
from xdsl.ir import Attribute, Block, Operation, SSAValue

from shardir.algebra.factors import FactorAxes, Factors
from shardir.algebra.mesh import Mesh
from shardir.analysis.functions import name_of, values
from shardir.analysis.groups import contradiction, sharding_groups
from shardir.analysis.roles import ties
from shardir.cost import memory_of, op_seconds
from shardir.cost.functions import rated
from shardir.diagnostics import Failure, Located, ShardirError, report_progress
from shardir.dialects.dist import (
    CollectiveOp,
    PropagationBarrierOp,
    RedistributeOp,
    StrategyAttr,
    layout_of,
    with_layout,
)
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.properties import float_attr
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import GradientOp, StepOp
from shardir.rewriting import nested
from shardir.rewriting.bases import Function, GlobalPass, collect_errors
from shardir.rewriting.composites import expand
from shardir.rewriting.functions import update_signature
from shardir.rewriting.marks import RECOMPUTE, SEARCHED, resolve_markers
from shardir.rewriting.options import Bytes
from shardir.rewriting.placement import strategy_op_sharding
from shardir.rewriting.rewriter import erase, set_type
from shardir.search.choices import CandidateSource
from shardir.search.drawing import form_of
from shardir.search.elimination import DEFAULT_GAP, MAX_TABLE_ENTRIES, solve
from shardir.search.graph import Graph, StrategyPlan
from shardir.search.memory import Solve, TightError
from shardir.search.picture import Described, described
from shardir.syntax.files import write_text
from shardir.syntax.printer import value_names

Ties = Mapping[SSAValue, SSAValue]
"""Values that lie as another does, each with that other."""


@dataclass(frozen=True)
class SearchStrategies(GlobalPass):
    """Finds the strategies and layouts of least cost."""

    name = "search-strategies"
    entries: int = MAX_TABLE_ENTRIES
    """The entries of the solver's largest table: memory for exactness."""
    gap: float = DEFAULT_GAP
    """How far from the least a plan may be, as a part of it, for the solver to end; what buckets
    leave open comes besides."""
    memory: Bytes = 0
    """The bytes that a device may hold; 0: those of the cluster's devices, if it says."""
    graph: str | None = None
    """A file for the graph of costs: .json, .dot or .svg."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        if self.memory < 0 or self.entries < 1 or not 0 <= self.gap < 1:
            raise Failure(
                f"{self.name}: memory is a number of bytes (0: the cluster's), entries at least 1, "
                f"gap from 0.0 to below 1.0; not memory={self.memory} entries={self.entries} "
                f"gap={self.gap}"
            )
        super().apply(ctx, op)

    def concerns(self, f: Function) -> bool:
        return super().concerns(f) and f.mesh is not None

    def check(self, f: Function) -> Iterator[Located]:
        requests = [o for o in f.module.body.ops if isinstance(o, StepOp | GradientOp)]
        if f.name in {o.function.root_reference.data for o in requests}:
            message = "is still to be differentiated; run distributed-autodiff before"
            yield f.op, f"@{f.name} {message}, so that its gradients count"
        assert f.mesh is not None
        yield from _wrong(f.op, f.block, f.mesh)

    def rewrite_all(self, functions: Sequence[Function]) -> None:
        form = None if self.graph is None else form_of(Path(self.graph))
        graphs: list[Described] = []

        def search(f: Function) -> None:
            assert f.mesh is not None
            tied = alike(f.op, f.block)
            resolve_markers(f.block, None)
            expand(f.block, None)
            plan = self.decide(f.module, f.op, f.mesh, tied)
            if form is not None:
                graphs.append(described(f.name, f.mesh, value_names(f.block), plan))
            write(f.op, plan)

        collect_errors(functions, search)
        if self.graph is not None and form is not None:
            if not graphs:
                raise Failure("no function has a mesh, so there is no graph of costs")
            write_text(Path(self.graph), form(graphs))

    def decide(self, module: ModuleOp, f: FuncOp, mesh: Mesh, tied: Ties) -> StrategyPlan:
        """The least costly plan, or of those that keep to the memory."""
        limit, choices = self.memory or mesh.cluster_or_default.memory, offers(mesh)
        plan = Graph(f.body.block, choices, tied).plan(self.solver(f, self.gap))
        if limit is None or (used := needed(module, f, plan, mesh)) <= limit:
            return plan
        graph = Graph(f.body.block, choices, tied, tight=True)
        allowed, solver = limit, self.solver(f, max(self.gap, MEMORY_GAP))
        for _ in range(ATTEMPTS):
            report_progress(f"{self.name} @{name_of(f)}: {used} B are needed, {limit} there")
            try:
                plan = graph.plan_within(allowed, solver)
            except TightError as e:
                least = f"the values of the smallest need {e.needed} B"
                break
            if (used := needed(module, f, plan, mesh)) <= limit:
                return plan
            least = f"the smallest needs {used} B"
            allowed = int(plan.held * min(limit / used, ALMOST))
        raise ShardirError(
            f"no plan of @{name_of(f)} was found that keeps to {limit} B on a device; {least}: "
            "use more devices, smaller batches, or microbatches"
        )

    def solver(self, f: FuncOp, gap: float) -> Solve:
        def say(objective: float, bound: float) -> None:
            report_progress(f"{self.name} @{name_of(f)}: {objective:.6g} s, at least {bound:.6g}")

        return lambda problem: solve(problem, self.entries, gap, say)


MEMORY_GAP = 2e-3
"""The gap of each of the many problems that are solved for a plan that keeps to the memory."""

ATTEMPTS, ALMOST = 5, 0.98
"""How often a plan is looked for whose program keeps to the memory, and by how much less is allowed
each time at least."""

LOWERING = "lower-plan"
"""The pipeline that makes the program of a plan."""


def needed(module: ModuleOp, f: FuncOp, plan: StrategyPlan, mesh: Mesh) -> int:
    """The bytes that a device holds at most while the program of a plan runs."""
    trial = module.clone()
    made = next(g for g in trial.body.ops if isinstance(g, FuncOp) and name_of(g) == name_of(f))
    for other in trial.body.ops:
        if isinstance(other, FuncOp) and other is not made:
            erase(other)
    ops = dict(zip(f.body.block.ops, made.body.block.ops, strict=True))
    pairs = zip(values(f.body.block), values(made.body.block), strict=True)
    write(made, plan.on(ops, dict(pairs)))
    nested.run(LOWERING, Context(), trial)
    return memory_of(made, mesh).peak


def offers(mesh: Mesh) -> CandidateSource:
    """What may be chosen on a mesh, in the time model's seconds."""
    on = rated(mesh)

    def seconds(
        kind: type[TensorOp], factors: Factors, chosen: FactorAxes, types: Sequence[TensorType]
    ) -> float:
        return op_seconds(kind, factors, chosen, types, on)

    return CandidateSource(on, seconds)


def _wrong(f: FuncOp, block: Block, mesh: Mesh) -> list[tuple[Operation | None, str]]:
    """What is wrong with what the text states, for a search."""
    errors: list[tuple[Operation | None, str]] = []
    for op in block.ops:
        match op:
            case RedistributeOp() | CollectiveOp() | CallOp():
                message = (
                    "the search decides on communication; leave it out, and state layouts or "
                    "strategies instead"
                )
            case PropagationBarrierOp() if layout_of(op.out) not in (None, layout_of(op.value)):
                message = "nothing spreads that it could hold back; leave it out"
            case TensorOp() if op.strategy is not None:
                try:
                    strategy_op_sharding(op, mesh)
                    continue
                except ShardirError as e:
                    message = str(e)
            case _:
                continue
        errors.append((op, f"{op.name} in @{name_of(f)}: {message}"))
    try:
        groups = sharding_groups(block)
    except Failure as e:
        return errors + e.errors
    for members in groups:
        stated = {v: l.simplified(mesh) for v in members if (l := layout_of(v)) is not None}
        for (v, mine), (w, theirs) in pairwise(stated.items()):
            if mine.dims != theirs.dims:
                errors.append((members[w], contradiction(members[w], (w, theirs), (v, mine))))
    return errors


def alike(f: FuncOp, block: Block) -> dict[SSAValue, SSAValue]:
    """The values that lie as another does, each with the first of them: new values of parameters
    and states, and those of a group."""
    order = {v: i for i, v in enumerate(values(block))}
    found: dict[SSAValue, set[SSAValue]] = {}
    for together in [*ties(f).items(), *sharding_groups(block)]:
        joined = set(together).union(*(found[v] for v in together if v in found))
        found.update(dict.fromkeys(joined, joined))
    firsts = {id(s): min(s, key=order.__getitem__) for s in found.values()}
    return {v: first for v, s in found.items() if (first := firsts[id(s)]) is not v}


def write(f: FuncOp, plan: StrategyPlan) -> None:
    """The plan, in the IR."""
    for op, choice in plan.choices.items():
        if op.operands:
            op.properties["strategy"] = StrategyAttr(choice.strategy)
        if choice.times > 1:
            op.attributes[RECOMPUTE] = UnitAttr()
    for v, layout in plan.layouts.items():
        set_type(v, with_layout(unsharded_type(v), layout))
    update_signature(f)
    s = plan.solution
    numbers = {"objective": s.objective, "bound": s.bound, "gap": s.gap}
    found: dict[str, Attribute] = {k: float_attr(x) for k, x in numbers.items()}
    if plan.held:
        found[RECOMPUTE] = UnitAttr()
    f.attributes[SEARCHED] = DictionaryAttr(found)
