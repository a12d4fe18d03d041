"""choose-recompute: a policy or a budget of memory -> ops computed again in the backward part.

    %h = nn.matmul %x, %w : ...                       %h   = nn.matmul %x, %w : ...
    %p = nn.gelu %h : ...                             %p   = nn.gelu %h : ...
    train.backward              recompute=dots        train.backward
    %d = nn.gelu_grad %h, %g      ->                  %d   = nn.gelu_grad %h, %g : ...
    %e = nn.mul %p, %g                                %p_1 = nn.gelu %h {recompute} : ...
                                                      %e   = nn.mul %p_1, %g : ...

1. `recompute=full` keeps the arguments and the inputs of equal blocks, such as layers; `dots` the
   results of products (matmul, einsum, attention, convolution). The rest is repeated.
2. `recompute=6GB` is a budget: the peak of the function on a device, after the passes that follow.
   `recompute=0.6` is that part of the peak without recompute. The repeated ops are the fastest set
   by the time model, of those that are tried (docs/recompute.md); the peak is that of every op, and
   of every repetition.
3. Results of collectives are kept, unless `recompute-collectives` is true, or the budget is that of
   a search: without the option, the limit of memory that layouts were chosen for.
4. Random numbers are the same again, and views take no memory; values that the step returns, that
   are in another loop, in host memory, or read on another stage, are kept.
5. It concerns training steps in the local view, and on one device. What is marked by hand was
   repeated by the pass `recompute` before. In a step with stages a budget is that of each rank, in
   its schedule (shardir/search/rank_repetitions.py).
6. A budget that no tried set keeps to is an error, with the smallest peak and what is in it.
7. The function's attribute `recompute` has the seconds that repetitions take (`seconds`), a lower
   bound on that of any set within the budget (`bound`), and the budget (`memory`).
"""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import DictionaryAttr
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Operation

from shardir.algebra.mesh import Mesh
from shardir.algebra.schedules import Schedule
from shardir.analysis.functions import is_laid_out, is_local_body, mesh_of
from shardir.analysis.roles import frees
from shardir.analysis.storages import live_ops
from shardir.cost.functions import ONE_DEVICE
from shardir.cost.memory import MemoryUse, memory_of
from shardir.cost.report import called
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
from shardir.rewriting import nested
from shardir.rewriting.bases import Function, FunctionPass
from shardir.rewriting.copying import copied
from shardir.rewriting.marks import NO_RECOMPUTE, RECOMPUTE, search_budget
from shardir.rewriting.options import bytes_of, float_of
from shardir.rewriting.repeating import repeat
from shardir.search.activations import Activations
from shardir.search.rank_repetitions import choose_on_ranks
from shardir.search.repetition_choice import choose
from shardir.search.repetition_policies import StepBlocks, is_product
from shardir.search.repetitions import Simulator
from shardir.search.trial import lowered

FULL, DOTS = "full", "dots"
"""The policies."""

REST = "fuse-communication"
"""The passes that follow and may need more memory than the budget; overlap-communication keeps to
it."""

IN_STAGES = "split-stages{},fuse-communication,overlap-communication"
"""The passes that make the program of a step with stages."""

MAX_CHOICES = 6
"""How many sets are looked for whose program keeps to the budget."""

LARGEST = 4
"""The number of values that an error names."""

TOGETHER = (1, 2, 3, 4, 6, 8)
"""How many blocks have one input that is kept, in the sets to begin with."""


@dataclass(frozen=True)
class ChooseRecompute(FunctionPass):
    """Chooses what is computed again in the backward part, by a policy or within a budget."""

    name = "choose-recompute"
    recompute: str = ""
    """What is repeated: all but inputs of layers (`full`), all but products (`dots`), nothing
    (`off`), or what keeps to a budget: bytes on a device (`6GB`), or a part of the peak without it
    (`0.6`); by default what a search relies on."""
    recompute_collectives: bool = False
    """Whether collectives of the forward part are repeated too; else their results are kept. In the
    budget of a search they may be."""
    schedule: str = ""
    """A file with the order of each rank, as of split-stages."""
    nearest: bool = False
    """Whether the program with the smallest peak is made if none keeps to the budget; else that is
    an error."""

    def concerns(self, f: Function) -> bool:
        has_backward = any(isinstance(op, BackwardOp) for op in f.block.ops)
        wanted = self.recompute != NO_RECOMPUTE and (
            self.recompute or search_budget(f.op) is not None
        )
        return bool(wanted) and has_backward and frees(f.op)

    def check(self, f: Function) -> Iterable[Located]:
        policy = self.recompute in (FULL, DOTS)
        if not policy and _limit(self.recompute, f.op) is None:
            message = (
                "expected full, dots, off, a budget such as 6GB, or a part of the peak such as 0.6"
            )
            yield f.op, f"{self.name}: {message}, got {self.recompute!r}"
        elif is_laid_out(f.block) and not is_local_body(f.block):
            message = f"expected @{f.name} in the local view, got layouts"
            yield f.op, f"{self.name}: {message}; run lower-to-spmd before"
        elif not policy and (p := pipeline_of(f.op)) and p.kind == SEARCH and not self.schedule:
            message = f"expected a policy for @{f.name}, whose schedule is searched, got a budget"
            yield f.op, f"{self.name}: {message}; name a schedule, or use recompute=full"

    def rewrite(self, f: Function) -> None:
        if RECOMPUTE in f.op.attributes:
            return  # it was chosen before
        mesh = f.mesh or ONE_DEVICE
        simulator = Simulator(Activations(f.op, mesh, self._repeats(f)))
        if self.recompute == FULL:
            groups = StepBlocks(simulator.activations).full()
        elif self.recompute == DOTS:
            groups = frozenset(simulator.needed)
        elif PIPELINE in f.op.attributes:
            self._keep_ranks_within(f, simulator)
            return
        else:
            self._keep_within(f, mesh, simulator)
            return
        found = simulator.run(groups)
        write(f.op, _ops(simulator, found.groups), {"seconds": float_attr(found.seconds)})

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
        """Repeat what keeps the program to the budget.

        Raises:
            ShardirError: no program that was tried keeps to it.
        """
        limit = _limit(self.recompute, f.op)
        assert limit is not None
        if isinstance(limit, float):
            limit = int(limit * _program(f, mesh, (), {}).peak)
        blocks = StepBlocks(simulator.activations)
        starts, equal = [blocks.full(k) for k in TOGETHER], blocks.groups()
        allowed, bound = limit, None
        smallest: tuple[MemoryUse, list[Operation], dict[str, Attribute]] | None = None
        for _ in range(MAX_CHOICES):
            chosen = choose(simulator, allowed, starts, equal)
            ops, seconds = _ops(simulator, chosen.found.groups), chosen.found.seconds
            bound = min(seconds, chosen.bound if bound is None else bound)
            numbers: dict[str, Attribute] = {
                "seconds": float_attr(seconds),
                "bound": float_attr(bound),
                "memory": int_attr(limit),
            }
            use = _program(f, mesh, ops, numbers)
            report_progress(
                f"{self.name} @{f.name}: {use.peak} B of {limit}, {seconds:.3g} s of repetitions, "
                f"at least {bound:.3g} s"
            )
            if use.peak <= limit:
                write(f.op, ops, numbers)
                return
            if smallest is None or use.peak < smallest[0].peak:
                smallest = use, ops, numbers
            if chosen.found.peak > allowed:
                break
            allowed = chosen.found.peak - (use.peak - limit)
        assert smallest is not None
        use, ops, numbers = smallest
        if self.nearest:
            write(f.op, ops, numbers)
            return
        largest = [s for s in use.storages if s.value.name_hint][:LARGEST]
        raise ShardirError(
            f"{self.name}: expected a peak of at most {limit} B in @{f.name}, got {use.peak} "
            f"B as the smallest that was found, at {called(use.op)}: "
            + ", ".join(f"{part} {n}" for part, n in use.parts.items() if n)
            + "; the largest are "
            + ", ".join(f"%{s.value.name_hint} {s.bytes}" for s in largest)
            + "; use a larger budget, more devices, or microbatches"
        )

    def _keep_ranks_within(self, f: Function, simulator: Simulator) -> None:
        """Repeat what keeps each rank of a step in stages to the budget.

        Raises:
            ShardirError: a rank needs more, whatever it repeats.
        """
        limit = _limit(self.recompute, f.op)
        assert limit is not None
        schedule, peaks = self._in_stages(f, ())
        if isinstance(limit, float):
            limit = int(limit * max(peaks))

        def measure(groups: frozenset[int]) -> Sequence[int]:
            return self._in_stages(f, _ops(simulator, groups))[1] if groups else peaks

        goal = StepBlocks(simulator.activations).full()
        found = choose_on_ranks(simulator, goal, limit, schedule.placement, measure)
        most = max(found.peaks)
        report_progress(f"{self.name} @{f.name}: {most} B of {limit}")
        if most > limit and not self.nearest:
            raise ShardirError(
                f"{self.name}: expected a peak of at most {limit} B on each rank of @{f.name}, got "
                f"{most} B on rank {found.peaks.index(most)} as the smallest that was found; use a "
                "larger budget, more stages or devices, or another schedule"
            )
        numbers: dict[str, Attribute] = {
            "seconds": float_attr(found.seconds),
            "memory": int_attr(limit),
        }
        write(f.op, _ops(simulator, found.groups), numbers)

    def _in_stages(
        self, f: Function, marked: Collection[Operation]
    ) -> tuple[Schedule, Sequence[int]]:
        """Return the schedule of the step in stages, if ops are repeated, and the bytes that each
        rank needs."""
        module = copied(f.module)
        step = find_symbol(module, FuncOp, f.name)
        assert step is not None
        ops = dict(zip(f.block.ops, step.body.block.ops, strict=True))
        write(step, [ops[op] for op in marked], {})
        given = f"{{schedule={json.dumps(self.schedule)}}}" if self.schedule else ""
        nested.run(IN_STAGES.format(given), Context(), module)
        schedule = Schedule.parse(schedule_of(step) or "")
        mesh = mesh_of(step, module) or Mesh("one", ((STAGE_AXIS, schedule.ranks),))
        return schedule, [use.peak for use in memory_of_ranks(step, mesh)]


def budget(text: str) -> int | float | None:
    """Return the bytes of a budget, or the part of the peak without recompute; None for any other
    text."""
    if (found := bytes_of(text)) is not None:
        return found
    part = float_of((text,))
    return part if part is not None and 0 < part <= 1 else None


def _limit(text: str, f: FuncOp) -> int | float | None:
    """Return the budget of a text; if it is empty, that of a search."""
    return budget(text) if text else search_budget(f)


def _ops(simulator: Simulator, groups: Iterable[int]) -> list[Operation]:
    return [op for n in groups for op in simulator.groups[n].ops]


def write(f: FuncOp, marked: Collection[Operation], numbers: dict[str, Attribute]) -> None:
    """Repeat ops in the backward part of a function, and record the numbers of the choice."""
    ops = list(f.body.block.ops)
    start = max(i for i, op in enumerate(ops) if isinstance(op, BackwardOp))
    after = set(ops[start + 1 :])
    repeat(f.body.block, set(marked), [op for op in live_ops(ops) if op in after])
    f.attributes[RECOMPUTE] = DictionaryAttr(numbers)


def _program(
    f: Function, mesh: Mesh, marked: Collection[Operation], numbers: dict[str, Attribute]
) -> MemoryUse:
    """Return the memory of the function after the passes that follow, if ops are repeated."""

    def write_on(copy: FuncOp) -> None:
        ops = dict(zip(f.block.ops, copy.body.block.ops, strict=True))
        write(copy, [ops[op] for op in marked], numbers)

    (copy,) = lowered(f.module, f.op, write_on, REST)
    return memory_of(copy, mesh)
