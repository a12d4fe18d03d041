"""split-stages: a step whose ops have stages -> functions for each stage, and a schedule.

    %h = nn.relu %x {train.stage = 0}        %h, %m = func.call @step_forward_0(%x)
    %m = nn.exp %x {train.stage = 0}         %h_1 = train.transfer %h from 0 to <1>
    %y = nn.neg %h {train.stage = 1}    ->   %y = func.call @step_forward_1(%h_1)
    train.backward                           train.backward
    ...                                      %d_h = func.call @step_backward_1(...)

1. A step has four parts: before the loop over microbatches, the forward part in it, the backward
   part in it, and after it. The ops of one part and stage become a function, `train.stage = 1`;
   before and after the loop they become several functions if some ops wait for other stages.
2. An op that a pass has added runs on the last stage of its operands in the forward part, on the
   first in the backward part, and elsewhere on the stage of the largest operand. Without operands
   of a stage, it runs on each stage that reads it. An op with larger results than operands, such as
   an all-gather, runs on the stage that reads the result.
3. Values are transferred from the stage that makes them to the stages that read them; so are
   updated parameters and states. Sums over microbatches, and states between them, stay in the step.
4. In the forward part values pass only to later stages, in the backward part only to earlier ones.
5. `train.schedule` on the step has the order in which each rank runs the functions of its stages on
   the microbatches: the order of the request, or of the file `schedule`, torch's CSV. For a request
   of `search`, a search finds it by the costs of these functions on the cluster, within the memory
   of a device; a line on stderr has its time and a lower bound. A forward part alone has the
   forward actions.
6. If the schedule has the actions I and W for a stage, its backward part is two functions: I makes
   the values that other stages wait for, W the remaining gradients of weights, and the fewest bytes
   are kept in between. If it also has B, for other microbatches, B is a third function, and
   `train.either` takes the value of the function that ran.
7. Ranks that would wait for each other are an error (`train.check_order`), with the cycle.
8. The mesh gets `stage` as its outermost axis. The cluster gets a level for it, with links like the
   outermost links of a stage.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp

from shardir.algebra.mesh import Mesh
from shardir.algebra.schedules import Schedule, check_actions, schedule
from shardir.analysis.functions import mesh_of, name_of, values
from shardir.cost.stages import memory_of_ranks
from shardir.diagnostics import Failure, ShardirError, coded
from shardir.dialects import train
from shardir.dialects.dist import layout_of
from shardir.dialects.symbols import find_symbol
from shardir.rewriting.copying import copied
from shardir.rewriting.meshes import with_outermost_axis
from shardir.rewriting.options import Bytes, PassOptions
from shardir.rewriting.staged_step import StagedStep
from shardir.search.stages.forward_pipeline import search_forward
from shardir.search.stages.pipeline import breadth_first, search_schedule
from shardir.syntax.files import write_text


@dataclass(frozen=True)
class SplitStages(PassOptions):
    """Makes functions of the stages of a pipelined step."""

    name = "split-stages"
    schedule: str = ""
    """The file with the order of each rank, as torch writes it; empty: the order of the request."""
    save_schedule: str = ""
    """A file for the order of each rank, as torch reads it."""
    memory: Bytes = 0
    """The memory of a device in bytes, for the search of a schedule; 0: of the cluster's devices,
    if known."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        steps = [
            f for f in op.body.ops
            if isinstance(f, FuncOp) and f.body.blocks and train.pipeline_of(f) is not None
        ]  # fmt: skip
        for f in steps:
            requested = train.pipeline_of(f)
            assert requested is not None
            order = self.schedule_of(f, requested, op)
            if self.save_schedule:
                write_text(Path(self.save_schedule), f"{order.csv()}\n")
            split(op, f, order)

    def schedule_of(self, f: FuncOp, requested: train.PipelineAttr, module: ModuleOp) -> Schedule:
        """Return the schedule of a step.

        Raises:
            Failure: the step has no loop over microbatches, or the schedule does not fit it.
        """
        loop = next((o for o in f.body.block.ops if isinstance(o, train.MicrobatchesOp)), None)
        if loop is None:
            message = "expected a loop over microbatches of a function in stages, got none"
            raise Failure([(f, coded("G14", message, use="write train.step or train.forward"))])
        numbers = requested.values
        try:
            if not self.schedule and requested.kind == train.SEARCH:
                search = self.search_forward if is_forward(f) else self.search_schedule_of
                return search(f, requested, loop.runs, module)
            if not self.schedule:
                order = schedule(requested.kind, numbers["ranks"], loop.runs, numbers["chunks"])
            else:
                order = Schedule.parse(Path(self.schedule).read_text(encoding="utf-8"))
            check_actions(order)
        except ShardirError as e:
            raise Failure([(f, str(e))]) from None
        order = order.forward() if is_forward(f) else order
        got = (order.stages, order.ranks, order.microbatches)
        expected = (requested.stages, numbers["ranks"], loop.runs)
        if got != expected:
            text = "{} stages on {} ranks with {} microbatches"
            message = f"expected a schedule of {text.format(*expected)}, got {text.format(*got)}"
            raise Failure([(f, message)])
        return order

    def search_schedule_of(
        self, f: FuncOp, requested: train.PipelineAttr, microbatches: int, module: ModuleOp
    ) -> Schedule:
        """Search for a schedule, by the costs of a copy of the step in stages.

        Raises:
            ShardirError: no schedule keeps to the memory.
        """
        ranks = requested.values["ranks"]
        trial = trial_of(module, f, ranks)

        def measure(order: Schedule) -> list[int]:
            return [use.peak for use in memory_of_ranks(*trial(order))]

        loop = tuple(stage % ranks for stage in range(requested.stages))
        step, mesh = trial(breadth_first(loop, ranks, microbatches))
        limit = self.memory or mesh.cluster_or_default.memory
        search = search_schedule(step, mesh, limit, measure)
        print(f"{self.name}: @{name_of(f)}: {search.summary}", file=sys.stderr)
        return search.schedule

    def search_forward(
        self, f: FuncOp, requested: train.PipelineAttr, microbatches: int, module: ModuleOp
    ) -> Schedule:
        """Search for a schedule of a forward part alone.

        Raises:
            ShardirError: no schedule keeps to the memory.
        """
        ranks, chunks = requested.values["ranks"], requested.values["chunks"]
        mesh = mesh_of(f, module)
        limit = self.memory or (mesh.cluster_or_default.memory if mesh is not None else None)
        trial = trial_of(module, f, ranks)
        search = search_forward(ranks, chunks, microbatches, trial, limit)
        print(f"{self.name}: @{name_of(f)}: {search.summary}", file=sys.stderr)
        return search.schedule


def trial_of(module: ModuleOp, f: FuncOp, ranks: int) -> Callable[[Schedule], tuple[FuncOp, Mesh]]:
    """Return a function that splits a copy of a step by a schedule, and returns it with its
    mesh."""

    def trial(order: Schedule) -> tuple[FuncOp, Mesh]:
        copy = copied(module)
        step = find_symbol(copy, FuncOp, name_of(f))
        assert step is not None
        split(copy, step, order)
        return step, mesh_of(step, copy) or Mesh("one", ((train.STAGE_AXIS, ranks),))

    return trial


def is_forward(f: FuncOp) -> bool:
    """Whether a function has no backward part."""
    return not any(isinstance(op, train.BackwardOp) for op in f.body.block.ops)


def split(module: ModuleOp, f: FuncOp, order: Schedule) -> None:
    """Split a step of a module into functions of its stages, which ranks run in this order.

    Raises:
        Failure: a value passes in the wrong direction, a function has the name of a new one, or
            ranks would wait for each other.
    """
    step = StagedStep(f, order, mesh_of(f, module))
    step.split()
    del f.attributes[train.PIPELINE]
    train.set_schedule(f, order)
    for function in step.functions:
        if find_symbol(module, FuncOp, name_of(function)) is not None:
            message = f"expected no function @{name_of(function)}, which this pass makes"
            raise Failure([(f, f"{message}, got one")])
        module.body.block.insert_op_before(function, f)
    if any(layout_of(v) is not None for v in values(f.body.block)):
        mesh = mesh_of(f, module)
        assert mesh is not None
        axis_ranks = dict(mesh.axes).get(train.STAGE_AXIS)
        if axis_ranks is None:  # else by another function in stages
            with_outermost_axis(module, mesh, train.STAGE_AXIS, order.ranks)
        elif axis_ranks != order.ranks:
            message = (
                f"expected stages on {axis_ranks} ranks, as of another function, got {order.ranks}"
            )
            raise Failure([(f, coded("G14", message, use="use as many, or two programs"))])
    train.check_order(f)
