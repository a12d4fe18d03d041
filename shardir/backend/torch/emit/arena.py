"""The arena of a program: one block of memory for values of its functions, at planned offsets.

    h = x @ w1                ->    h = torch.matmul(x, w1, out=slots.h)
    for i in range(4):              for i in range(4):
        a = b.exp()                     a = torch.exp(b, out=slots.a[i])

A slot is the memory of a value in the block. A value of a loop over layers has a slot for each run.
A collective has a slot for each result (a reduction one for all results) and one for its buffers. A
slot is live from the op that makes its value to the last op that may read its memory, by the alias
relation that also decides writes in place (`Storages.joined`); lists and collectives in flight
extend it. Outside the arena are

1. results of functions, which outlive the call, and values that pass between microbatches;
2. values of ops that torch cannot write into given memory (out_forms.py), scalars, and values in
   host memory.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import ReturnOp
from xdsl.ir import Operation, SSAValue

from shardir.algebra.allocation import (
    Allocation,
    LiveBuffer,
    aligned,
    allocate,
    live_bytes_bound,
)
from shardir.analysis.loops import execution_order
from shardir.analysis.storages import reads
from shardir.backend.torch.emit.loops import LoopScope
from shardir.backend.torch.emit.names import Names
from shardir.cost.collective_work import collective_work
from shardir.cost.memory_plan import ALIGNMENT, MAX_WORK
from shardir.diagnostics import size_text
from shardir.dialects import dist, train
from shardir.dialects.nn.types import element_name, size_of

BUFFERS = "buffers"

PLACED_COLLECTIVES = (dist.AllGatherOp, dist.AllReduceOp, dist.AllToAllOp, dist.ReduceScatterOp)
"""The collectives that the runtime runs in given memory."""


@dataclass(eq=False)
class Life:
    """The lifetime of a piece of memory in a run of a function."""

    value: SSAValue
    """The value in this memory; the first result for a collective."""
    bytes: int
    start: int
    end: int
    """The first and the last op that needs the memory, by their indices."""
    part: int | str | None = None
    """The part of a collective: the index of a result, or BUFFERS."""
    outlives: bool = False
    """Whether the memory outlives the call."""

    @property
    def key(self) -> tuple[SSAValue, int | str | None]:
        """The value and the part, which all runs of a loop share."""
        return self.value, self.part

    @property
    def range(self) -> LiveBuffer:
        return LiveBuffer(self.start, self.end + 1, self.bytes)


class FunctionRun:
    """One run of a function, op by op, with the memory that it allocates. Loops over layers run all
    their iterations, loops over microbatches one."""

    def __init__(self, s: LoopScope, placed: Collection[SSAValue]):
        """`placed`: the values that have slots."""
        self.s, self.placed = s, placed
        self.lives: list[Life] = []
        self.copied: set[SSAValue] = set()
        """Returned scalars in slots: they share a collective with other results."""
        self.now = 0
        self._memory: dict[SSAValue, frozenset[Life]] = {}
        """The memory that may hold each value."""
        self._flying: dict[SSAValue, frozenset[Life]] = {}
        """The memory that a collective in flight needs, by its results."""
        self._loop_start: int | None = None
        """The start of the loop over microbatches."""
        self._crossing: set[Life] = set()
        """The memory from before the loop that the loop reads."""
        for self.now, (op, run) in enumerate(execution_order(s.ops, train.RepeatOp)):
            for v in (op.values[run],) if isinstance(op, train.ItemOp) else reads(op):
                self._read(v)
            self._run(op, run)

    def _run(self, op: Operation, run: int) -> None:
        match op:
            case train.MicrobatchesOp():
                self._loop_start = self.now
                for total in self.s.totals_of(op):
                    self._memory[total.out] = frozenset((self._new(total.out, size_of(total.out)),))
            case train.EndMicrobatchesOp():
                for life in self._crossing:
                    life.end = self.now
                self._loop_start = None
            case train.OfMicrobatches():
                self._read(op.out)
            case train.ItemOp():
                self._same(op.out, op.values[run])
            case train.ItemsOp():
                self._same(op.outs[run], op.x)
            case train.CarriedOp():
                if run == 0:
                    self._same(op.out, op.x)
            case train.CarryOp():
                self._same(op.carried, op.x)
                self._same(op.out, op.x)
                if isinstance(self.s.around(op), train.MicrobatchesOp):
                    self._outlives(op.x)
            case ReturnOp() | dist.SendOp():  # sent values are kept to the end of the call
                for v in op.operands:
                    if self.s.shape_of(v) or isinstance(op, dist.SendOp):
                        self._outlives(v)
                    elif any(life.value in self.placed for life in self._of(v)):
                        self.copied.add(v)
            case dist.CollectiveOp() if op.outs[0] in self.placed:
                self._collective(op)
            case _:
                self._results(op)

    def _collective(self, op: dist.CollectiveOp) -> None:
        """Allocate the results (one buffer for a reduction) and the buffers."""
        assert self.s.mesh is not None
        first, sizes = op.outs[0], [aligned(size_of(v), ALIGNMENT) for v in op.outs]
        reduces = isinstance(op, dist.FusibleOp) and op.record.reduces
        outs = [self._new(first, n, k) for k, n in enumerate([sum(sizes)] if reduces else sizes)]
        buffers = self._new(first, collective_work(op, self.s.mesh).buffers, BUFFERS)
        for k, v in enumerate(op.outs):
            self._memory[v] = frozenset((outs[0 if reduces else k],))
            if dist.is_started(op):
                self._flying[v] = frozenset((buffers,)).union(*map(self._of, op.operands))

    def _results(self, op: Operation) -> None:
        for v in op.results:
            others = self.s.storages.joined.get(v)
            if v not in self.placed and others:
                self._memory[v] = frozenset[Life]().union(*map(self._of, others))
            elif v in self.s.sums:
                self._same(v, self.s.sums[v])
            elif v not in self.s.numbers:
                self._memory[v] = frozenset((self._new(v, size_of(v)),))
            if dist.is_started(op):
                self._flying[v] = frozenset[Life]().union(*map(self._of, op.operands))

    def _new(self, v: SSAValue, size: int, part: int | str | None = None) -> Life:
        self.lives.append(Life(v, size, self.now, self.now, part))
        return self.lives[-1]

    def _of(self, v: SSAValue) -> frozenset[Life]:
        return self._memory.get(v, frozenset())

    def _same(self, v: SSAValue, other: SSAValue) -> None:
        self._memory[v] = self._of(other)
        self._flying[v] = self._flying.get(other, frozenset())

    def _read(self, v: SSAValue) -> None:
        for life in self._of(v) | self._flying.get(v, frozenset()):
            life.end = self.now
            if self._loop_start is not None and life.start < self._loop_start:
                self._crossing.add(life)

    def _outlives(self, v: SSAValue) -> None:
        for life in self._of(v) | self._flying.get(v, frozenset()):
            life.outlives = True


@dataclass(frozen=True)
class FunctionArena:
    """The arena of one function."""

    names: dict[SSAValue, str]
    """The name of the slot of each value."""
    repeated: set[SSAValue]
    """The values with a slot for each run of a loop."""
    copied: set[SSAValue]
    """The scalars that are copied when the function returns."""
    within: list[Life]
    """The memory in the arena, whose offsets are in `allocation`."""
    outside: list[Life]
    """The memory outside of the arena."""
    allocation: Allocation

    @classmethod
    def of(cls, s: LoopScope) -> "FunctionArena":
        """Return the arena of a function that was emitted in `s` without one."""
        lives = FunctionRun(s, s.placeable).lives
        outliving = {life.key for life in lives if life.outlives}
        placed = {life.value for life in lives if life.key not in outliving and life.bytes}
        slot_names = Names()
        names = {v: slot_names.new(*_hints(v)) for v in s.placeable if v in placed}
        run, within, outside = FunctionRun(s, names), list[Life](), list[Life]()
        for life in run.lives:
            is_within = life.value in names and life.key not in outliving
            (within if is_within else outside).append(life)
            if not (is_within or s.frees):
                life.end = run.now
        allocation = allocate([life.range for life in within], ALIGNMENT, max_work=MAX_WORK)
        repeated = {v for v in names if s.placeable[v]}
        return cls(names, repeated, run.copied, within, outside, allocation)

    @property
    def others(self) -> int:
        """The peak of the bytes outside of the arena in a call."""
        return live_bytes_bound([life.range for life in self.outside if life.bytes])

    def about(self) -> str:
        """The sizes of the arena, as a comment."""
        inside, rest = (sum(x.bytes for x in lives) for lives in (self.within, self.outside))
        sizes = (self.allocation.size, self.allocation.bound, inside, inside + rest, self.others)
        size, bound, within, total, others = map(size_text, sizes)
        return (
            f"arena of {size}, lower bound {bound}, for {within} of the {total} that a call makes; "
            f"the others need at most {others}"
        )

    def slots(self) -> dict[str, dict[str, Any]]:
        """Return the slots by name, for plan.json: element type, bytes, whether each run has one;
        and for each run the offset, and the first and last op."""
        slots: dict[str, dict[str, Any]] = {}
        for life, offset in zip(self.within, self.allocation.offsets, strict=True):
            v = life.value
            name = self.names[v] if life.part is None else f"{self.names[v]}.{life.part}"
            if name not in slots:
                assert isinstance(v.type, TensorType)
                slots[name] = {
                    "dtype": element_name(v.type.element_type), "bytes": life.bytes,
                    "each_run": v in self.repeated, "offsets": [], "live": [],
                }  # fmt: skip
            slots[name]["offsets"].append(offset)
            slots[name]["live"].append([life.start, life.end])
        return slots


def _hints(v: SSAValue) -> tuple[str | None, str]:
    """The name of a value, if it is the op's only result, and the op's kind."""
    assert isinstance(v.owner, Operation)
    is_alone = len(v.owner.results) == 1
    return v.name_hint if is_alone else None, v.owner.name.rpartition(".")[2]


def arena_plan(arenas: Mapping[str, FunctionArena]) -> dict[str, Any]:
    """Return the arena of a program, for plan.json: its functions run one after the other, and
    share the memory."""
    return {
        "bytes": max((arena.allocation.size for arena in arenas.values()), default=0),
        "others": max((arena.others for arena in arenas.values()), default=0),
        "functions": {name: arena.slots() for name, arena in arenas.items()},
    }
