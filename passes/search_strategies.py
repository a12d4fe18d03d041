"""search-strategies: no annotations, or a few -> the strategies and layouts of minimum cost.

    %y = nn.matmul %x, %w : (tensor<8x4xf32>, tensor<4x6xf32>) -> tensor<8x6xf32>
 -> %y = nn.matmul %x, %w strategy<@m, (({dp}, {}), ({}, {tp}))> : ...

It runs after distributed-autodiff, so that the cost of gradients and updates counts: the forward
and the backward part of a training step get their layouts together.

1. Every op gets a strategy, every value a layout. Plans of a small sum of estimated times are
   proposed; the objective is the time of the lowered program of the plan that is chosen.
2. Annotated layouts and strategies stay, except strategies of composites, which a warning names.
   Redistributions, for example of a plan's `uses`, stay too, and their time counts
   (shardir/search/graph/pins.py). An annotation with open dimensions gets a layout that it allows.
   The values of a sharding group get one layout. A barrier has no effect, but an annotation of its
   result is one of its operand, or its result is redistributed where the operand's contradicts it.
3. The proposed plan is the one of the smallest sum among all plans of the candidates of
   docs/understand/search.md: an axis splits one dimension of an op, evenly or nearly so, and is
   undivided, or the only one of its mesh and divided in two; or one near to it: where the solver's
   tables would be too large, and where collectives at the end of a step share buckets, each with
   one latency.
4. Parameters and states have the layouts that their updates leave, and may be sharded. A function
   that trains a parameter decides on its layout in all functions.
5. The lowered program of the plan, after `choose-recompute`, needs at most the memory of a device
   (`memory`, or the cluster's). If the program of the fastest plan needs more, the search chooses
   layouts and recompute together, with `offload` also values in host memory, and takes the fastest
   program it finds within the memory.
6. If the program of a product of presets (docs/understand/search.md) is faster with overlap, its
   plan is chosen instead, unless `overlap` is false.
7. The function's attribute `search` has the estimated time of the plan's program, one op after the
   other (`objective`); a lower bound on this time for every plan (`bound`; with a limit of memory,
   for every plan whose arguments, except arguments that may be in host memory, keep to it); the
   gap; the plan's product of presets, if any (`presets`), with the smallest objective found
   (`smallest`); whether redistributions are repeated (`recompute`); and the bytes to which
   `choose-recompute` must bring the program (`memory`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import CallOp
from xdsl.ir import Operation

from shardir.algebra.garbage import no_gc
from shardir.algebra.mesh import Mesh
from shardir.algebra.sharding import Sharding
from shardir.analysis.functions import is_laid_out, values
from shardir.analysis.groups import contradiction, sharding_groups
from shardir.compat.xdsl import set_type
from shardir.diagnostics import Failure, Located, ShardirError, report_progress
from shardir.dialects.blocks import of_kind, ops_of
from shardir.dialects.dist import (
    CollectiveOp,
    PropagationBarrierOp,
    layout_of,
    sharding_of,
    with_layout,
    with_sharding,
)
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import GradientOp, StepOp
from shardir.rewriting.bases import Function, GlobalPass, warn_without_mesh
from shardir.rewriting.composites import expand, warn_of_lost_strategies
from shardir.rewriting.functions import update_signature
from shardir.rewriting.marks import SEARCHED, resolve_markers
from shardir.rewriting.options import Bytes, bytes_of
from shardir.rewriting.placement import strategy_op_sharding
from shardir.rewriting.retained_layouts import decide_layouts
from shardir.search.graph.value_layouts import tied_values
from shardir.search.measure.strategy_plan import LoweredPlans, write
from shardir.search.plans.drawing import writer_of
from shardir.search.plans.picture import Described, described
from shardir.search.plans.plan import search_plan
from shardir.search.problem.solver import DEFAULT_GAP, MAX_TABLE_ENTRIES
from shardir.syntax.files import write_text
from shardir.syntax.printer import value_names
from shardir.syntax.source import warn


@dataclass(frozen=True)
class SearchStrategies(GlobalPass):
    """Finds the strategies and layouts of minimum cost."""

    name = "search-strategies"
    entries: int = MAX_TABLE_ENTRIES
    """The entries of the solver's largest table: with more, larger problems are solved exactly."""
    gap: float = DEFAULT_GAP
    """The relative gap between objective and bound at which the solver stops; with buckets up to
    twice as large."""
    memory: Bytes = 0
    """The memory of a device in bytes; 0: of the cluster's devices, if known."""
    recompute: str = ""
    """The ops to compute again, as in choose-recompute; by default, and with bytes, as many as the
    memory requires."""
    offload: bool = False
    """Whether the plan may rely on host memory to keep to the memory, as in choose-recompute."""
    overlap: bool = True
    """Whether presets whose programs are faster with overlap are chosen instead."""
    graph: str | None = None
    """A file for the cost graph: .json, or .dot of Graphviz."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        if self.memory < 0 or self.entries < 1 or not 0 <= self.gap < 1:
            raise Failure(
                f"{self.name}: expected memory of at least 0 B (0: the cluster's), at least 1 "
                f"entry, and a gap from 0.0 to below 1.0, got memory={self.memory} "
                f"entries={self.entries} gap={self.gap}"
            )
        warn_without_mesh(op)
        super().apply(ctx, op)

    def concerns(self, f: Function) -> bool:
        is_searched = SEARCHED in f.op.attributes and is_laid_out(f.block)  # by a saved plan
        return super().concerns(f) and f.mesh is not None and not is_searched

    def check(self, f: Function) -> Iterator[Located]:
        requests = [o for o in f.module.body.ops if isinstance(o, StepOp | GradientOp)]
        if f.name in {o.function.root_reference.data for o in requests}:
            message = "expected gradients, whose cost counts too, got a function without them"
            yield f.op, f"@{f.name}: {message}; run distributed-autodiff before"
        assert f.mesh is not None
        yield from _annotation_errors(f, f.mesh)

    def rewrite_all(self, functions: Sequence[Function]) -> None:
        writer = None if self.graph is None else writer_of(Path(self.graph))
        graphs: list[Described] = []

        def search(f: Function) -> None:
            assert f.mesh is not None

            def report(line: str) -> None:
                report_progress(f"{self.name} @{f.name}: {line}")

            warn_of_lost_strategies(f.block)
            expand(f.block, None)
            _annotate_operands(f, f.mesh)
            ties = tied_values(f.op, f.block)
            resolve_markers(f.block, f.mesh)
            budget = bytes_of(self.recompute)
            policy = self.recompute if budget is None else ""
            lowered = LoweredPlans(f.module, f.op, f.mesh, policy, self.offload)
            limits = self.memory or f.mesh.cluster_or_default.memory, budget
            limit = min((n for n in limits if n), default=None)
            plan = search_plan(lowered, ties, limit, self.entries, self.gap, self.overlap, report)
            if writer is not None:
                graphs.append(described(f.name, f.mesh, value_names(f.block), plan))
            write(f.op, plan)
            _warn_of_replication(f, f.mesh)

        with no_gc():  # tables, layouts and the programs that are measured live to its end
            decide_layouts(functions, search)
        if self.graph is not None and writer is not None:
            if not graphs:
                message = "expected a function with a mesh for the cost graph, got none"
                raise Failure(f"{message}; declare a mesh with dist.mesh")
            write_text(Path(self.graph), writer(graphs))


def _warn_of_replication(f: Function, mesh: Mesh) -> None:
    """Warn of a plan in which the devices all compute the same."""
    ops = [op for op in f.block.ops if isinstance(op, TensorOp)]
    layouts = [l for v in values(f.block) if (l := layout_of(v)) is not None]
    if ops and mesh.size > 1 and not any(axes for l in layouts for axes in l.dims):
        warn(
            f.op,
            f"expected a plan for @{f.name} that splits something over the {mesh.size} devices of "
            f"@{mesh.name}, got one that replicates all values: by the time model of the cluster "
            "no split is faster; use a larger batch, or the cluster of the devices (dist.cluster)",
        )


def _annotate_operands(f: Function, mesh: Mesh) -> None:
    """Give the operand of each barrier the annotation of its result, since a search does not
    propagate. Where its own contradicts that, both get the layouts nearest to each other, and the
    result is redistributed."""
    for op in reversed(of_kind(ops_of(f.block), PropagationBarrierOp)):
        own, wanted = sharding_of(op.value), sharding_of(op.out)
        if wanted is None:
            continue
        both = wanted if own is None else own.meet(wanted, mesh)
        if both is None:
            assert own is not None
            both = Sharding(own.nearest(wanted.layout, mesh))
            layout = wanted.nearest(own.layout, mesh)
        else:
            layout = None
        set_type(op.value, with_sharding(unsharded_type(op.value), both))
        set_type(op.out, with_layout(unsharded_type(op.out), layout))
    update_signature(f.op)


def _annotation_errors(f: Function, mesh: Mesh) -> list[tuple[Operation | None, str]]:
    """Return the errors of a function's annotations for a search."""
    errors: list[tuple[Operation | None, str]] = []
    for op in f.block.ops:
        match op:
            case CollectiveOp() | CallOp():
                message = (
                    f"{op.name} in @{f.name}: expected no calls and no communication other than "
                    "dist.redistribute, since the search decides on it; remove the op, or run "
                    "inline-calls before"
                )
            case TensorOp() if op.strategy is not None:
                try:
                    strategy_op_sharding(op, mesh)
                    continue
                except ShardirError as e:
                    message = f"{op.name} in @{f.name}: {e}"
            case _:
                continue
        errors.append((op, message))
    try:
        groups = sharding_groups(f.block)
    except Failure as e:
        return errors + e.errors
    for members in groups:
        annotated = [(v, s.simplified(mesh)) for v in members if (s := sharding_of(v)) is not None]
        together = annotated[0][1] if annotated else None
        for one, other in pairwise(annotated):
            together = together and together.meet(other[1], mesh)
            if together is None:
                marker = members[other[0]]
                errors.append((marker, contradiction(marker, other, one)))
                break
    return errors
