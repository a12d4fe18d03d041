"""A measured run: the times of lines as times of ops.

Ranks record when each line of program.py begins (shardir_runtime/run/trace.py). The program is
emitted again from its module, which has the op of each line. In a loop over equal blocks, the k-th
run of a line is the op of the k-th block. So measured events have the ops and rows of simulated
events (`shardir/cost/simulator.py`):

    a line that computes           an event on the row of computation
    a collective, and its wait     the wait of the device, on that row; and an event on the links,
                                   from the begin of its line to the end of its wait
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Operation

from shardir.algebra.mesh import Mesh
from shardir.analysis.loops import execution_order
from shardir.backend.torch.emit.biases import biased_product
from shardir.backend.torch.emit.program import emit_outlined, emittable, outline_copy
from shardir.backend.torch.emit.updates import is_updated_before
from shardir.cost.schedule import level_of
from shardir.cost.seconds import OpCost
from shardir.cost.simulator import COMPUTE, SharedRows, SimulatedEvent, Simulation, row_of
from shardir.diagnostics import ShardirError
from shardir.dialects import dist, nn, train
from shardir.dialects.nn.base import TensorOp

NANO = 1e-9

HANDED = (
    ReturnOp, train.Mark, train.CarryOp, train.CarriedOp, train.ItemOp, train.ItemsOp, nn.ConstantOp
)  # fmt: skip
"""Ops without events: ops of the function, loops over equal blocks, which the simulated module does
not have, and constants, which the program merges."""


class MeasuredOp(NamedTuple):
    """An op in a call: its begin and end, and its seconds of work (`run/trace.py`): of the
    computing threads if it computes; on a GPU, from its begin to its end."""

    op: Operation
    begin: float
    end: float
    work: float


OpRun = tuple[Operation, int]
"""An op, and the number of its run in a call."""


class MeasuredCall(NamedTuple):
    """A call of a function on a rank: its begin and end in seconds, its events, the recorded spans
    of a step in stages, and the seconds of work of its computation, if they differ from its
    events."""

    begin: float
    end: float
    events: list[SimulatedEvent]
    spans: list[list[Any]]
    work: Mapping[OpRun, float] = MappingProxyType({})


class ProgramLines:
    """The ops of the lines of a program.

    Args:
        module: in the local view, after all passes.
        arena: whether the program has an arena.

    Attributes:
        module: the emitted module, without composites, which has the ops.
        text: the text of the program.
    """

    def __init__(self, module: ModuleOp, arena: bool = False):
        self.module = emittable(module)
        loops = outline_copy(self.module)
        made = emit_outlined(loops, arena=arena)
        self.text = made.text
        originals = dict[Operation, list[Operation]]()
        for f, looped in zip(self.module.body.ops, loops.body.ops, strict=True):
            if isinstance(f, FuncOp) and isinstance(looped, FuncOp) and f.body.blocks:
                for op, other in zip(_run(f), _run(looped), strict=True):
                    originals.setdefault(other, []).append(op)
        self._ops = {line: originals[op] for line, op in made.lines.items() if op in originals}
        self._lined = {op for ops in self._ops.values() for op in ops}

    def check(self, program: str) -> None:
        """Raise ShardirError unless a program has these lines."""
        if program != self.text:
            raise ShardirError(
                "--trace: expected the program.py that source.ir compiles to, got another one; "
                "compile it anew"
            )

    def calls(
        self, recorded: list[dict[str, Any]], simulation: Simulation
    ) -> Iterator[MeasuredCall]:
        """Yield the calls that a rank has recorded of a function."""
        mesh = simulation.cost.mesh
        costs = {e.cost.op: e.cost for rank in simulation.ranks for e in rank.events}
        for call in recorded:
            runs = list(self._with_others(self._runs(call)))
            events = sorted(_events(runs, costs, mesh), key=lambda e: e.begin)
            spans = [[*what, a * NANO, b * NANO] for *what, a, b in call["spans"]]
            work = dict(_numbered_work(runs))
            yield MeasuredCall(call["begin"] * NANO, call["end"] * NANO, events, spans, work)

    def _with_others(self, runs: Iterator[MeasuredOp]) -> Iterator[MeasuredOp]:
        """Yield ops with the later ops that share their line: the addition of a bias to a product,
        and updates in one call."""
        for run in runs:
            yield run
            after = run.op.next_op
            while (
                after is not None
                and after not in self._lined
                and (biased_product(after) is not None or is_updated_before(after))
            ):
                yield MeasuredOp(after, run.end, run.end, 0.0)
                after = after.next_op

    def medians(self, recorded: Iterable[dict[str, Any]]) -> dict[Operation, float]:
        """Return the median seconds of work of each op in recorded calls of a function."""
        found: dict[Operation, list[float]] = {}
        for call in recorded:
            for run in self._runs(call):
                found.setdefault(run.op, []).append(run.work)
        return {op: median(seconds) for op, seconds in found.items()}

    def _runs(self, call: Mapping[str, Any]) -> Iterator[MeasuredOp]:
        """Yield the ops of a call with their begin and end; an op has one line or several."""
        counts, last = Counter[int](), 0
        op: Operation | None = None
        begin = end = work = 0.0
        ends = [*call["times"][1:], call["end"]]
        taken = [b - a for a, b in zip(call["times"], ends, strict=True)]
        work_of_line = zip(call["work"] or taken, call["own"] or taken, strict=True)
        marks = zip(call["lines"], call["times"], ends, work_of_line, strict=True)
        for line, a, b, (every, own) in marks:
            ops, run = self._ops.get(line), counts[line]
            counts[line] += 1
            now = ops[run % len(ops)] if ops else None
            s = own if isinstance(now, TensorOp) else every
            if now is not op or line <= last:  # an earlier line of the same op: its next run
                if op is not None:
                    yield MeasuredOp(op, begin, end, work)
                begin, work = a * NANO, 0.0
            op, end, last, work = now, b * NANO, line, work + s * NANO
        if op is not None:
            yield MeasuredOp(op, begin, end, work)


def _run(f: FuncOp) -> Iterator[Operation]:
    """Yield the ops of a function in the order in which they run; equal blocks, in a loop or not,
    one after the other."""
    for op, _ in execution_order(f.body.block.ops, train.RepeatOp):
        if not isinstance(op, HANDED):
            yield op


def _events(
    runs: list[MeasuredOp], costs: Mapping[Operation, OpCost], mesh: Mesh
) -> Iterator[SimulatedEvent]:
    """Yield the events of the ops of a call."""
    rows, started, flights = (
        SharedRows(),
        dict[Operation, float](),
        list[tuple[float, float, OpCost]](),
    )
    for op, begin, end, _ in runs:
        of = op.started if isinstance(op, dist.WaitOp) else op
        cost = costs.get(of) or OpCost(of, 0, 0, 0.0)
        yield SimulatedEvent(COMPUTE, begin, end, cost, waits=cost.communicates)
        if not cost.communicates:
            continue
        if dist.is_started(op):
            started[op] = begin
        else:
            flights.append((started.pop(of, begin), end, cost))
    for begin, end, cost in sorted(flights, key=lambda flight: flight[:2]):
        row = rows.free(row_of(level_of(mesh, cost.axes)), begin, end)
        yield SimulatedEvent(row, begin, end, cost)


def _numbered_work(runs: list[MeasuredOp]) -> Iterator[tuple[OpRun, float]]:
    """Yield the seconds of work of each run of each op of a call."""
    counts = Counter[Operation]()
    for op, _, _, work in runs:
        yield (op, counts[op]), work
        counts[op] += 1
