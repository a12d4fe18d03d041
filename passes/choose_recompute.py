"""choose-recompute: a policy or a budget of memory -> ops computed again in the backward part.

    %h = nn.matmul %x, %w : ...                       %h   = nn.matmul %x, %w : ...
    %p = nn.gelu %h : ...                             %p   = nn.gelu %h : ...
    train.backward              recompute=dots        train.backward
    %d = nn.gelu_grad %h, %g      ->                  %d   = nn.gelu_grad %h, %g : ...
    %e = nn.mul %p, %g                                %p_1 = nn.gelu %h {recompute} : ...
                                                      %e   = nn.mul %p_1, %g : ...

1. `recompute=full` keeps the arguments and the inputs of equal blocks, such as layers; `dots` keeps
   the results of products (matmul, einsum, attention, convolution). All other ops are repeated.
2. `recompute=6GB` is a budget: the peak of the function on a device, after the passes that follow.
   `recompute=0.6` is a fraction of the peak without recompute. The repeated ops are the fastest of
   the sets that are tried (docs/guides/recompute.md), by the time model; the peak covers every op
   and every repetition.
3. Results of collectives are kept, unless `recompute-collectives` is true, or the budget comes from
   a search (the limit of memory for which it chose the layouts).
4. A repetition draws equal random numbers, and views take no memory. Values are kept that the step
   returns, that are in another loop, in host memory, or read on another stage.
5. It concerns training steps in the local view, and on one device. Ops marked by hand were repeated
   by the pass `recompute` before. In a step with stages the budget holds for each rank, in its
   schedule (shardir/search/recompute/rank_repetitions.py).
6. A budget that every tried set exceeds is an error, with the smallest peak and its largest values.
7. With `offload`, kept values may be in host memory: activations from their last read in the
   forward part to the first in the backward part, and the states of updates throughout the step,
   with the update. Copies overlap as in the simulated step. The program is the faster of the
   choices with and without host memory.
8. The function's attribute `recompute` has the seconds of repetitions and waits for copies
   (`seconds`), a lower bound on these seconds for any set within the budget (`bound`), and the
   budget (`memory`).
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from xdsl.context import Context
from xdsl.dialects.builtin import DictionaryAttr
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Operation

from shardir.algebra.mesh import Mesh
from shardir.algebra.schedules import Schedule
from shardir.analysis.functions import is_laid_out, is_local_body, mesh_of
from shardir.analysis.roles import frees
from shardir.cost.functions import ONE_DEVICE
from shardir.cost.memory import MemoryUse, memory_of
from shardir.cost.report import op_text
from shardir.cost.schedule import seconds_in_order
from shardir.cost.seconds import works_of
from shardir.cost.stages import memory_of_ranks
from shardir.diagnostics import Located, ShardirError, report_progress
from shardir.dialects.dist import CollectiveOp
from shardir.dialects.nn.properties import float_attr, int_attr
from shardir.dialects.symbols import find_symbol
from shardir.dialects.train import (
    PIPELINE,
    SEARCH,
    STAGE_AXIS,
    BackwardOp,
    pipeline_of,
    schedule_of,
)
from shardir.rewriting.bases import Function, FunctionPass
from shardir.rewriting.copying import copied
from shardir.rewriting.marks import NO_RECOMPUTE, RECOMPUTE, SEARCHED, search_budget
from shardir.rewriting.offloading import SavedValues, save
from shardir.rewriting.options import bytes_of, float_of
from shardir.rewriting.registry import run_pipeline
from shardir.search.measure.trial import lowered
from shardir.search.recompute.activations import Activations
from shardir.search.recompute.rank_repetitions import choose_on_ranks
from shardir.search.recompute.repetition_choice import choose
from shardir.search.recompute.repetition_policies import StepBlocks, is_product
from shardir.search.recompute.repetitions import Simulator, repeated, saved_values

FULL, DOTS = "full", "dots"
"""The policies."""

REST, OVERLAP = "fuse-communication", "overlap-communication"
"""The pass that follows and may exceed the budget, and the pass that keeps to it."""

IN_STAGES = "split-stages{},fuse-communication,overlap-communication"
"""The passes that turn the step into a program in stages."""

MAX_CHOICES = 6
"""The limit on lowered programs per budget: each tightens the allowance of the next choice by the
excess of its real peak over the simulated one."""

LARGEST = 4
"""The number of values that an error names."""

TOGETHER = (1, 2, 3, 4, 6, 8)
"""Numbers of adjacent blocks that share one kept input, in the sets from which the choice
starts."""


@dataclass(frozen=True)
class ChooseRecompute(FunctionPass):
    """Chooses ops to compute again in the backward part, by a policy or within a budget."""

    name = "choose-recompute"
    recompute: str = ""
    """The ops that are repeated: all but inputs of layers (`full`), all but products (`dots`), none
    (`off`), or as many as a budget asks for: bytes on a device (`6GB`), or a fraction of the peak
    without recompute (`0.6`). Default: the budget of a search, if there is one."""
    recompute_collectives: bool = False
    """Whether collectives of the forward part are repeated too; otherwise their results are kept.
    Within the budget of a search they may be repeated."""
    offload: bool = False
    """Whether values may be kept in host memory, within a budget."""
    schedule: str = ""
    """The file with the order of each rank, as of split-stages."""
    nearest: bool = False
    """Whether the program with the smallest peak is made where none keeps to the budget; otherwise
    that is an error."""

    def concerns(self, f: Function) -> bool:
        has_backward = any(isinstance(op, BackwardOp) for op in f.block.ops)
        wanted = self.recompute != NO_RECOMPUTE and (
            self.recompute or search_budget(f.op) is not None
        )
        lacks = self.offload and SEARCHED not in f.op.attributes
        return bool(wanted or lacks) and has_backward and frees(f.op)

    def check(self, f: Function) -> Iterable[Located]:
        policy = self.recompute in (FULL, DOTS, NO_RECOMPUTE)
        if self.offload and (policy or (not self.recompute and search_budget(f.op) is None)):
            got = self.recompute or "none"
            message = f"expected a budget with offload, got {got}; use bytes, such as 6GB"
            yield f.op, f"{self.name}: {message}"
        elif not policy and _limit(self.recompute, f.op) is None:
            message = "expected full, dots, off, a budget such as 6GB, or a fraction such as 0.6"
            yield f.op, f"{self.name}: {message}, got {self.recompute!r}"
        elif is_laid_out(f.block) and not is_local_body(f.block):
            message = f"expected @{f.name} in the local view, got layouts"
            yield f.op, f"{self.name}: {message}; run lower-to-spmd before"
        elif self.offload and f.mesh is None:
            message = f"expected layouts with offload, got none in @{f.name}; use a mesh"
            yield f.op, f"{self.name}: {message}"
        elif self.offload and PIPELINE in f.op.attributes:
            message = f"expected no stages with offload, got @{f.name} in stages; use layouts"
            yield f.op, f"{self.name}: {message} `on host`"
        elif not policy and (p := pipeline_of(f.op)) and p.kind == SEARCH and not self.schedule:
            message = f"expected a policy for @{f.name}, whose schedule is searched, got a budget"
            yield f.op, f"{self.name}: {message}; name a schedule, or use recompute=full"

    def rewrite(self, f: Function) -> None:
        if RECOMPUTE in f.op.attributes:
            return  # it was chosen before
        mesh = f.mesh or ONE_DEVICE
        simulator = Simulator(Activations(f.op, mesh, self._repeats(f)))
        if self.recompute == FULL:
            groups = StepBlocks(simulator).full()
        elif self.recompute == DOTS:
            groups = frozenset(simulator.needed)
        elif PIPELINE in f.op.attributes:
            self._keep_ranks_within(f, simulator)
            return
        else:
            self._keep_within(f, mesh, simulator)
            return
        choice = simulator.run(groups)
        saved = repeated(simulator, choice.groups)
        write(f.op, saved, {"seconds": float_attr(choice.seconds)}, mesh)

    def _repeats(self, f: Function) -> Callable[[Operation], bool]:
        """Return whether an op may be repeated."""
        searched = self.recompute not in (FULL, DOTS) and search_budget(f.op) is not None
        collectives = self.recompute_collectives or searched

        def repeats(op: Operation) -> bool:
            if isinstance(op, CollectiveOp) and not collectives:
                return False
            return self.recompute != DOTS or not is_product(op)

        return repeats

    def _keep_within(self, f: Function, mesh: Mesh, simulator: Simulator) -> None:
        """Choose repetitions and values in host memory that keep the program to the budget.

        Raises:
            ShardirError: every program that was tried exceeds it.
        """
        limit = _limit(self.recompute, f.op)
        assert limit is not None
        if isinstance(limit, float):
            unchanged = Tried(SavedValues(), 0.0, 0.0)
            limit = int(limit * memory_of(_program(f, unchanged, 0), mesh).peak)
        tried = [self._within(f, mesh, simulator, limit)]
        if self.offload:
            with_host = Simulator(simulator.activations, hosted=True)
            tried.append(self._within(f, mesh, with_host, limit))
            bound = tried[1].bound
            tried = [replace(t, bound=min(t.seconds, bound)) for t in tried]
        best = min(tried, key=lambda t: (max(0, t.peak - limit), t.step))
        if best.peak <= limit or self.nearest:
            write(f.op, best.saved, best.numbers(limit), mesh)
            return
        use = best.use
        assert use is not None
        more = "microbatches, or offload=true" if f.mesh and not self.offload else "or microbatches"
        largest = [s for s in use.storages if s.value.name_hint][:LARGEST]
        raise ShardirError(
            f"{self.name}: expected a peak of at most {limit} B in @{f.name}, got {use.peak} "
            f"B as the smallest peak tried, at {op_text(use.op)}: "
            + ", ".join(f"{part} {n}" for part, n in use.parts.items() if n)
            + "; the largest are "
            + ", ".join(f"%{s.value.name_hint} {s.bytes}" for s in largest)
            + f"; use a larger budget, more devices, {more}"
        )

    def _within(self, f: Function, mesh: Mesh, simulator: Simulator, limit: int) -> "Tried":
        """Return the choice whose program keeps to a limit; otherwise the choice with the smallest
        peak."""
        blocks = StepBlocks(simulator)
        starts, equal = [blocks.full(k) for k in TOGETHER], blocks.groups()
        allowed, bound, smallest = limit, None, None
        for _ in range(MAX_CHOICES):
            chosen = choose(simulator, allowed, starts, equal)
            seconds = chosen.found.seconds
            bound = min(seconds, chosen.bound if bound is None else bound)
            hosted = sum(map(simulator.bytes, chosen.found.hosted))
            tried = Tried(saved_values(simulator, chosen.found), seconds, bound, hosted)
            use = memory_of(_program(f, tried, limit), mesh)
            report_progress(
                f"{self.name} @{f.name}: {use.peak} B of {limit}, {seconds:.3g} s more, "
                f"at least {bound:.3g} s"
            )
            tried = replace(tried, use=use)
            if use.peak <= limit:
                return replace(tried, step=self._step_seconds(f, mesh, tried, limit))
            if smallest is None or use.peak < smallest.peak:
                smallest = tried
            if chosen.found.peak > allowed:
                break
            allowed = chosen.found.peak - (use.peak - limit)
        assert smallest is not None
        return smallest

    def _step_seconds(self, f: Function, mesh: Mesh, tried: "Tried", limit: int) -> float:
        """Return the seconds of the program with overlap; 0 unless programs are compared."""
        if not self.offload:
            return 0.0
        ops = _program(f, tried, limit, f"{REST},{OVERLAP}").body.block.ops
        return seconds_in_order((w.cost(mesh) for w in works_of(list(ops), mesh)), mesh)

    def _keep_ranks_within(self, f: Function, simulator: Simulator) -> None:
        """Choose repetitions that keep each rank of a step in stages to the budget.

        Raises:
            ShardirError: a rank needs more, whatever it repeats.
        """
        limit = _limit(self.recompute, f.op)
        assert limit is not None
        schedule, peaks = self._in_stages(f, SavedValues())
        if isinstance(limit, float):
            limit = int(limit * max(peaks))

        def measure(groups: frozenset[int]) -> Sequence[int]:
            return self._in_stages(f, repeated(simulator, groups))[1] if groups else peaks

        goal = StepBlocks(simulator).full()
        choice = choose_on_ranks(simulator, goal, limit, schedule.placement, measure)
        most = max(choice.peaks)
        report_progress(f"{self.name} @{f.name}: {most} B of {limit}")
        if most > limit and not self.nearest:
            raise ShardirError(
                f"{self.name}: expected a peak of at most {limit} B on each rank of @{f.name}, got "
                f"{most} B on rank {choice.peaks.index(most)} as the smallest peak tried; use a "
                "larger budget, more stages or devices, or another schedule"
            )
        numbers: dict[str, Attribute] = {
            "seconds": float_attr(choice.seconds),
            "memory": int_attr(limit),
        }
        write(f.op, repeated(simulator, choice.groups), numbers, f.mesh or ONE_DEVICE)

    def _in_stages(self, f: Function, saved: SavedValues) -> tuple[Schedule, Sequence[int]]:
        """Return the schedule of the step in stages with a choice of saved values, and the peak
        bytes of each rank."""
        module = copied(f.module)
        step = find_symbol(module, FuncOp, f.name)
        assert step is not None
        ops = dict(zip(f.block.ops, step.body.block.ops, strict=True))
        write(step, saved.on(ops), {}, f.mesh or ONE_DEVICE)
        options = f"{{schedule={json.dumps(self.schedule)}}}" if self.schedule else ""
        run_pipeline(IN_STAGES.format(options), Context(), module)
        schedule = Schedule.parse(schedule_of(step) or "")
        mesh = mesh_of(step, module) or Mesh("one", ((STAGE_AXIS, schedule.ranks),))
        return schedule, [use.peak for use in memory_of_ranks(step, mesh)]


def budget(text: str) -> int | float | None:
    """Return the bytes of a budget, or its fraction of the peak without recompute; None if the text
    is neither."""
    if (size := bytes_of(text)) is not None:
        return size
    fraction = float_of((text,))
    return fraction if fraction is not None and 0 < fraction <= 1 else None


def _limit(text: str, f: FuncOp) -> int | float | None:
    """Return the budget of a text; if the text is empty, the budget of a search."""
    return budget(text) if text else search_budget(f)


def write(f: FuncOp, saved: SavedValues, numbers: dict[str, Attribute], mesh: Mesh) -> None:
    """Repeat ops in the backward part of a function, keep values in host memory, and record the
    numbers of the choice."""
    save(f, saved, mesh)
    f.attributes[RECOMPUTE] = DictionaryAttr(numbers)


def _program(f: Function, tried: "Tried", limit: int, passes: str = REST) -> FuncOp:
    """Return a copy of the function with a choice applied, after the passes that follow."""

    def write_on(copy: FuncOp) -> None:
        ops = dict(zip(f.block.ops, copy.body.block.ops, strict=True))
        write(copy, tried.saved.on(ops), tried.numbers(limit), f.mesh or ONE_DEVICE)

    (copy,) = lowered(f.module, f.op, write_on, passes)
    return copy


@dataclass(frozen=True)
class Tried:
    """A choice within a budget.

    Attributes:
        saved: repeated ops and values in host memory.
        seconds: time of repetitions and copies.
        bound: lower bound on `seconds` for any choice.
        hosted: bytes of activations and states in host memory.
        use: peak memory of the program.
        step: seconds of the program with overlap, where programs are compared.
    """

    saved: SavedValues
    seconds: float
    bound: float
    hosted: int = 0
    use: MemoryUse | None = None
    step: float = 0.0

    @property
    def peak(self) -> int:
        assert self.use is not None
        return self.use.peak

    def numbers(self, limit: int) -> dict[str, Attribute]:
        """Return the numbers of the choice as attributes of its function."""
        numbers = {"seconds": float_attr(self.seconds), "bound": float_attr(self.bound)}
        hosted = {"hosted": int_attr(self.hosted)} if self.hosted else {}
        return {**numbers, **hosted, "memory": int_attr(limit)}
