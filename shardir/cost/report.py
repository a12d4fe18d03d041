"""The cost of a program in the local view: Python values, and a table for each function.

@step on @m <dp = 2, tp = 2>: 0.000905 s
  op                           location  flops  bytes   seconds  exposed
  %y = nn.matmul               x.ir:5      192    176  5.02e-06        -
  %s = dist.all_reduce         x.ir:6        -      6    0.0009   0.0009  ring over {dp, tp}
  computation                              192    176  5.02e-06        -
  communication over {dp, tp}                -      6    0.0009   0.0009
  recomputed: 2 ops, 4.1e-06 s, 96 B that are not kept
  memory: at most 304 B, at %y = nn.matmul x.ir:5
    parameters 48, inputs 64, activations 192
    largest: %y 192, %x 64, %w 48
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation

from shardir.algebra.cluster import Cluster
from shardir.algebra.mesh import Axes, Mesh, axes_text
from shardir.algebra.schedules.gantt import as_svg
from shardir.analysis.aliasing import views
from shardir.cost.functions import functions, is_global, narrowest_float, on_cluster
from shardir.cost.memory import MemoryUse, memory_of
from shardir.cost.memory_plan import PlannedMemory, planned_memory
from shardir.cost.pipeline import bound_of_loop
from shardir.cost.record import record
from shardir.cost.schedule import TimedOp, device_waits, makespan, schedule
from shardir.cost.seconds import OpCost, works_of
from shardir.cost.stages import TimedRun, memory_of_ranks, times_of_step
from shardir.cost.summary import SummaryRow, communication_row, html, seconds_row, summary
from shardir.diagnostics import size_text
from shardir.dialects import dist, nn, train
from shardir.dialects.blocks import ops_of
from shardir.dialects.locations import short_location
from shardir.dialects.nn.types import size_of
from shardir.rewriting.marks import RECOMPUTE, hosted_bytes, recompute_bound, recompute_budget

LARGEST = 8
"""The number of largest storages that a table names."""

MAX_RANKS = 8
"""The number of ranks of a step in stages that a summary shows."""

Rows = list[tuple[str, ...]]
HEAD = ("op", "location", "flops", "bytes", "seconds", "exposed", "")
"""The names of the columns of ops."""


@dataclass(frozen=True)
class Recomputed:
    """The rematerialised ops of the backward part.

    Attributes:
        ops: their number.
        seconds: of these ops.
        bytes: of their results, views aside.
        bound: a lower bound on the seconds within `budget`, from `choose-recompute`; with host
            memory, on the seconds of repetitions and of waits for host copies.
        budget: of `choose-recompute`, in bytes.
        hosted: bytes that are kept in host memory instead.
    """

    ops: int
    seconds: float
    bytes: int
    bound: float | None = None
    budget: int | None = None
    hosted: int = 0

    def __str__(self) -> str:
        line = f"{self.ops} ops, {_s(self.seconds)} s, {self.bytes} B that are not kept"
        if self.hosted:
            line += f", {self.hosted} B in host memory"
        if self.bound is None:
            return line
        return f"{line}; at least {_s(self.bound)} s within {self.budget} B"


@dataclass(frozen=True)
class FunctionCost:
    """The cost of one call of a function on a device."""

    name: str
    mesh: Mesh
    ops: tuple[OpCost, ...]
    memory: MemoryUse
    planned: PlannedMemory | None = None
    recomputed: "Recomputed | None" = None

    @cached_property
    def times(self) -> tuple[TimedOp, ...]:
        """The times of each op on the device, and of each collective on its links."""
        return tuple(schedule(self.ops, self.mesh))

    @cached_property
    def seconds(self) -> float:
        """The makespan: less than the sum of the ops if collectives overlap with computation."""
        return makespan(self.times)

    @cached_property
    def exposed(self) -> dict[Operation, float]:
        """By collective and copy, the seconds in which the device waits for it once the last device
        has begun it."""
        exposed = {c.op: 0.0 for c in self.ops if c.communicates}
        for wait in device_waits(self.times):
            exposed[wait.cost.op] += wait.end - wait.begun
        return exposed

    @property
    def late(self) -> float:
        """The seconds in which the device waits for the last device to begin a collective."""
        return sum(t.late for t in self.times)

    @property
    def overlapped(self) -> float:
        """The seconds that overlap saves: those of all ops and of `late`, less the makespan."""
        return sum(c.seconds for c in self.ops) + self.late - self.seconds

    @property
    def flops(self) -> int:
        return sum(c.flops for c in self.ops)

    @property
    def peak_share(self) -> float | None:
        """The share of the device's peak rate of the narrowest float type, from 0 to 1; None
        without a rate of the mesh's own cluster."""
        rates = {} if self.mesh.cluster is None else self.mesh.cluster.rates
        peak = rates.get(narrowest_float(c.op for c in self.ops))
        return self.flops / peak / self.seconds if peak and self.seconds else None

    @property
    def computation(self) -> float:
        """The seconds of the ops that do not communicate."""
        return sum(c.seconds for c in self.ops if not c.communicates)

    @property
    def communication(self) -> dict[Axes, tuple[int, float]]:
        """Bytes received, and seconds, by the axes of the communication."""
        by_axes: dict[Axes, tuple[int, float]] = {}
        for c in self.ops:
            if c.communicates:
                received, seconds = by_axes.get(c.axes, (0, 0.0))
                by_axes[c.axes] = received + c.bytes, seconds + c.seconds
        return by_axes

    def exposed_over(self, axes: Axes) -> float:
        """The exposed seconds of the communication over some axes."""
        return sum(self.exposed[c.op] for c in self.ops if c.communicates and c.axes == axes)

    @property
    def busy(self) -> list[float]:
        """Of a step in stages, the seconds in which each rank works; none of others."""
        return []

    @property
    def memories(self) -> tuple[MemoryUse, ...]:
        """Of a step in stages, the memory of each rank; none of others."""
        return ()

    def __str__(self) -> str:
        """The summary; `table` has all ops."""
        return summary(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return html(self)

    def record(self) -> dict[str, Any]:
        """Return the cost as values of JSON: seconds, bytes, shares from 0 to 1; by layer, by kind
        and of each op."""
        return record(self)

    def parts(self) -> Iterator[SummaryRow]:
        """Yield the rows of a summary with the parts of the time."""
        is_once = any(isinstance(c.op, nn.WhileOp) for c in self.ops)
        note = "of nn.while one run" if is_once else ""
        yield seconds_row("computation", self.computation, self.seconds, note)
        if any(c.communicates for c in self.ops):
            yield communication_row(self)
        if self.late:
            yield seconds_row("waits", self.late, self.seconds, "for the last device")

    def table(self) -> str:
        """Return a table of all ops, of the sums, and of the memory at its peak."""
        head = f"@{self.name} on {self.mesh}: {_s(self.seconds)} s"
        tables = [line for rows in self._tables() for line in table(rows)]
        again = [f"  recomputed: {self.recomputed}"] if self.recomputed else []
        return "\n".join([head, *tables, *again, *self._memory()])

    def _tables(self) -> Iterator[Rows]:
        rows = [HEAD]
        rows += [_row(c, self.exposed.get(c.op)) for c in self.ops if c.seconds]
        touched, seconds = sum(c.bytes for c in self.ops if not c.communicates), self.computation
        rows.append(("computation", "", str(self.flops), str(touched), _s(seconds), "-", ""))
        for axes, (received, seconds) in self.communication.items():
            what = f"communication over {axes_text(axes)}" if axes else "copies from and to hosts"
            exposed = _s(self.exposed_over(axes))
            rows.append((what, "", "-", str(received), _s(seconds), exposed, ""))
        if self.late:
            rows.append(("waits for the last device", "", "-", "-", _s(self.late), "-", ""))
        if any(dist.is_started(c.op) for c in self.ops):
            rows.append(("overlapped", "", "-", "-", _s(-self.overlapped), "-", ""))
        yield rows

    def _memory(self) -> Iterator[str]:
        use, holds = self.memory, self.mesh.cluster_or_default.memory
        more = f", more than the {holds} B of a device" if holds and use.peak > holds else ""
        at = f"{op_text(use.op)} {short_location(use.op)}".rstrip()
        yield f"  memory: at most {use.peak} B, at {at}{more}"
        yield "    " + ", ".join(f"{part} {n}" for part, n in use.parts.items() if n)
        if use.host:
            yield f"    in the memory of its host: at most {use.host} B"
        named = [s for s in use.storages if s.value.name_hint][:LARGEST]
        if named:
            shown = ", ".join(f"%{s.value.name_hint} {s.bytes}" for s in named)
            yield f"    largest: {shown}"
        if (plan := self.planned) is not None:
            sizes = f"a block of {plan.size} B, lower bound {plan.bound} B"
            yield f"    plan, arguments aside: {sizes}, gap {plan.gap:.1%}"


@dataclass(frozen=True)
class StagedCost(FunctionCost):
    """The cost of a step in stages: `ops` of all stages, `memory` of the rank that needs most."""

    ranks: tuple[Sequence[TimedRun], ...] = ()
    """The runs of stages' functions on each rank, in order."""
    memories: tuple[MemoryUse, ...] = ()
    bound: float = 0.0
    """A lower bound, in seconds, on the loop over the microbatches in any order."""

    @cached_property
    def seconds(self) -> float:
        """The time from the first function to the end of the last, over all ranks."""
        return max(runs[-1].end for runs in self.ranks if runs)

    @property
    def busy(self) -> list[float]:
        """The seconds in which each rank computes, or communicates within its stages."""
        return [sum(t.end - t.begin for t in runs) for runs in self.ranks]

    @property
    def peak_share(self) -> float | None:
        """None: ranks have other ops."""
        return None

    def parts(self) -> Iterator[SummaryRow]:
        for rank, (runs, busy) in enumerate(zip(self.ranks, self.busy, strict=True)):
            if rank == MAX_RANKS:
                yield SummaryRow(f"{len(self.ranks) - rank} more ranks", "", None)
                return
            waits = 1 - busy / self.seconds if self.seconds else 0.0
            stages = ", ".join(map(str, sorted({t.run.stage for t in runs})))
            memory = size_text(self.memories[rank].peak)
            note = f"waits {waits:.0%}; stages {stages}; {memory}"
            yield seconds_row(f"rank {rank}", busy, self.seconds, note)

    @property
    def loop(self) -> float:
        """The time to the end of the loop over the microbatches."""
        return max(t.end for runs in self.ranks for t in runs if t.run.action is not None)

    def svg(self) -> str:
        """Return a drawing of the loop over the microbatches: a row for each rank."""
        return as_svg([
            [(begin, end, a) for begin, end, run in runs if (a := run.action) is not None]
            for runs in self.ranks
        ])  # fmt: skip

    def _tables(self) -> Iterator[Rows]:
        rows: Rows = [("rank", "stages", "seconds", "waits", "memory", "")]
        for rank, (runs, busy) in enumerate(zip(self.ranks, self.busy, strict=True)):
            stages = sorted({t.run.stage for t in runs})
            waits = 1 - busy / self.seconds if self.seconds else 0.0
            memory = f"{self.memories[rank].peak} B"
            named = ", ".join(map(str, stages))
            rows.append((str(rank), named, _s(busy), f"{waits:.1%}", memory, ""))
        yield rows
        gap = f", gap {abs(self.loop / self.bound - 1):.1%}" if self.bound else ""
        yield [(f"microbatches: {_s(self.loop)} s, lower bound {_s(self.bound)} s{gap}",)]
        rows = [HEAD, *(_row(c, None) for c in self.ops if c.communicates)]
        at = HEAD.index("exposed")  # the waits of ranks, above, are the exposed time of transfers
        yield [(*row[:at], *row[at + 1 :]) for row in rows]


def report(module: ModuleOp, cluster: Cluster | None = None) -> list[FunctionCost]:
    """Return the costs of the functions in the local view, and of functions without layouts.

    Args:
        cluster: devices and links, by default the meshes' own.

    Raises:
        ShardirError: a mesh is no part of the cluster, or an op has no cost.
    """
    return [
        cost_of_function(f, on_cluster(mesh, cluster))
        for f, mesh in functions(module)
        if not is_global(f)
    ]


def cost_of_function(f: FuncOp, mesh: Mesh) -> FunctionCost:
    """Return the cost of a function in the local view on the mesh's cluster."""
    ops = tuple(w.cost(mesh) for w in works_of(ops_of(f.body.block), mesh))
    name, planned = f.sym_name.data, planned_memory(f)
    if train.schedule_of(f) is None:
        return FunctionCost(name, mesh, ops, memory_of(f, mesh), planned, recomputed(f, ops, mesh))
    memories = tuple(memory_of_ranks(f, mesh))
    most = max(memories, key=lambda use: use.peak)
    ranks = tuple(times_of_step(f, mesh).ranks)
    bound = bound_of_loop(f, mesh, ranks)
    return StagedCost(name, mesh, ops, most, planned, None, ranks, memories, bound)


def recomputed(f: FuncOp, costs: Sequence[OpCost], mesh: Mesh) -> Recomputed | None:
    """Return the rematerialised ops of a function; None without any, and without host memory."""
    ops = ops_of(f.body.block)
    start = next((i for i, op in enumerate(ops) if isinstance(op, train.BackwardOp)), len(ops))
    repeated = {op for op in ops[start:] if RECOMPUTE in op.attributes}
    hosted = hosted_bytes(f)
    if not repeated and not hosted:
        return None
    seconds = sum(c.seconds for c in costs if c.op in repeated)
    results = [v for op in repeated for v in op.results if v not in dict(views(op, mesh))]
    bound, budget = recompute_bound(f), recompute_budget(f)
    return Recomputed(len(repeated), seconds, sum(map(size_of, results)), bound, budget, hosted)


def _row(c: OpCost, exposed: float | None) -> tuple[str, ...]:
    how = f"{c.form} over {axes_text(c.axes)}" if c.axes else c.form
    how += ", async" if dist.is_started(c.op) else ""
    flops = "-" if c.communicates else str(c.flops)
    shown = "-" if exposed is None else _s(exposed)
    return op_text(c.op), short_location(c.op), flops, str(c.bytes), _s(c.seconds), shown, how


def op_text(op: Operation) -> str:
    """Return the names of the results and of the op: `%y = nn.matmul`."""
    names = [f"%{v.name_hint}" for v in op.results if v.name_hint]
    shown = names if len(names) < 4 else [names[0], "...", names[-1]]
    return f"{', '.join(shown)}{' = ' if names else ''}{op.name}"


def table(rows: Rows) -> Iterator[str]:
    """Yield indented lines with aligned columns: two columns of text, then numbers, then text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    for row in rows:
        cells = [
            text.ljust(w) if i < 2 else text if i == last else text.rjust(w)
            for i, (text, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()


def _s(seconds: float) -> str:
    return f"{seconds:.3g}"
