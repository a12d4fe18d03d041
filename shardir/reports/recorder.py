"""Record a compiled program: its cost, its simulated run, its layouts, and its reasons."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import BlockArgument, Operation
from xdsl.passes import ModulePass

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axis, Mesh, axes_text
from shardir.analysis.causes import partial_values, producer, readers
from shardir.cost.functions import functions, is_global, narrowest_float
from shardir.cost.groups import layer_of
from shardir.cost.memory import MemoryUse
from shardir.cost.report import op_text
from shardir.cost.schedule import level_of
from shardir.cost.seconds import OpCost
from shardir.cost.simulator import (
    ARRIVALS,
    COMPUTE,
    RankTimeline,
    SimulatedEvent,
    Simulation,
    simulate_function,
)
from shardir.cost.trace import action_name, name_of
from shardir.diagnostics import ShardirError
from shardir.dialects import dist, train
from shardir.dialects.locations import describe_maker, describe_op, file_location
from shardir.dialects.nn.types import element_name, size_of
from shardir.dialects.train import BackwardOp, Update, arguments, is_step, stage_of
from shardir.reports.measured import measured_record
from shardir.reports.plan_text import axis_sentences, plan_text
from shardir.reports.reasons import Reasons
from shardir.reports.record import (
    COMPUTES,
    LATE,
    MOVES,
    WAITS,
    ArgumentRecord,
    CollectiveRecord,
    EventRows,
    LayerRecord,
    LayoutRecord,
    MemoryRecord,
    MeshRecord,
    ProgramRecord,
    RankRecord,
    Split,
)
from shardir.rewriting.functions import is_public
from shardir.rewriting.marks import RECOMPUTE, search_result

MAX_STORAGES, MAX_PICTURED, MAX_ALTERNATIVES = 100, 512, 24
"""The numbers of storages at the peak, of ranks in a picture, and of lines of an explanation."""

PHASES = ("forward", "backward", "update")


def record_of(
    module: ModuleOp,
    label: str,
    passes: Sequence[ModulePass],
    reasons: Reasons,
    mesh: Mesh | None = None,
    rates: tuple[float | None, float | None] = (None, None),
    trace: Mapping[str, Any] | None = None,
) -> ProgramRecord:
    """Return the record of a program: of its step, or else of its first public function.

    Args:
        module: in the local view, after its passes.
        mesh: with the cluster to price it on, by default the program's.
        rates: samples and tokens of a call.
        trace: of a run, as `shard-run --trace` writes it.

    Raises:
        ShardirError: no function is in the local view; or the trace is of another program.
    """
    f, own = reported_function(module)
    simulation = simulate_function(f, mesh or own)
    return _FunctionRecorder(module, f, simulation, reasons).record(label, passes, rates, trace)


def reported_function(module: ModuleOp) -> tuple[FuncOp, Mesh]:
    """Return the step of a program, or else its first public function in the local view.

    Raises:
        ShardirError: there is none.
    """
    local = [
        (f, mesh) for f, mesh in functions(module)
        if not is_global(f) and stage_of(f) is None and is_public(module, f.sym_name.data)
    ]  # fmt: skip
    if not local:
        raise ShardirError(
            "expected a function in the local view to report on, got none; run -p train first"
        )
    return next(((f, mesh) for f, mesh in local if is_step(f)), local[0])


def short(x: float) -> float:
    """Return a number with seven digits, for a compact text."""
    return float(f"{x:.7g}")


class _Strings:
    """Strings by their indices."""

    def __init__(self, first: Iterable[str] = ()) -> None:
        self.index = {text: i for i, text in enumerate(first)}

    def of(self, text: str) -> int:
        return self.index.setdefault(text, len(self.index))


class _FunctionRecorder:
    """Records one function."""

    def __init__(self, module: ModuleOp, f: FuncOp, simulation: Simulation, reasons: Reasons):
        self.module, self.f, self.simulation, self.reasons = module, f, simulation, reasons
        self.cost, self.mesh = simulation.cost, simulation.cost.mesh
        self.index: dict[Operation, int] = {}
        self.costs: list[OpCost] = []
        listed = {c.op for c in self.cost.ops}
        in_events = {
            e.cost.op: e.cost for r in simulation.ranks for e in r.events if e.cost.op not in listed
        }
        for c in (*self.cost.ops, *in_events.values()):
            if c.seconds or c.communicates:
                self.index[c.op] = len(self.costs)
                self.costs.append(c)
        self.exposed = self._exposed()
        self.phases = _phases(f, module)

    def record(
        self, label: str, passes: Sequence[ModulePass], rates: tuple[float | None, float | None],
        trace: Mapping[str, Any] | None,
    ) -> ProgramRecord:  # fmt: skip
        cost, on = self.cost, self.mesh.cluster_or_default
        ranks = [self._rank(r) for r in self.simulation.ranks]
        strings, ops = self._ops()
        layouts, found = self._arguments()
        measured = None
        if trace is not None:
            measured = measured_record(
                trace,
                cost.name,
                [name_of(c.op) for c in self.costs],
                [c.communicates for c in self.costs],
            )
        samples, tokens = (n / cost.seconds if n and cost.seconds else None for n in rates)
        parts = [r.split for r in ranks]
        split = Split(*(short(sum(getattr(s, n) for s in parts) / len(parts))
                        for n in Split.__dataclass_fields__))  # fmt: skip
        return ProgramRecord(
            label=label, function=cost.name, mesh=mesh_record(self.mesh),
            plan=plan_text(self.module, passes),
            sentences=axis_sentences(found, layouts, self.mesh, len(ranks)),
            seconds=short(cost.seconds), split=split, flops=cost.flops, peak_share=cost.peak_share,
            samples=samples, tokens=tokens, memory=max((r.use for r in ranks), key=_peak),
            strings=strings, ops=ops, collectives=list(self._collectives()), ranks=ranks,
            functions=self._functions(), layouts=layouts, arguments=found, layers=self._layers(),
            narrowest=narrowest_float(c.op for c in self.costs) if on.rates else "",
            recomputed=None if cost.recomputed is None else asdict(cost.recomputed),
            search=search_result(self.f) or _search_in(self.module),
            candidates=self.reasons.candidates, measured=measured,
        )  # fmt: skip

    # ---- times ----

    def _exposed(self) -> dict[Operation, float]:
        """Return by op the exposed seconds on the rank that waits longest."""
        longest = defaultdict[Operation, float](float)
        for r in self.simulation.ranks:
            waits = defaultdict[Operation, float](float)
            for e in r.events:
                if e.waits and not e.late:
                    waits[e.cost.op] += e.end - e.begin
            for op, seconds in waits.items():
                longest[op] = max(longest[op], seconds)
        return longest

    def _split(self, r: RankTimeline) -> Split:
        computation, late = r.busy(COMPUTE), sum(e.end - e.begin for e in r.events if e.late)
        moving = sum(
            e.end - e.begin
            for e in r.events if e.row != COMPUTE and not e.row.startswith(ARRIVALS)
        )  # fmt: skip
        rest = self.simulation.seconds - computation - late - r.exposed
        bubble = rest if r.rank is not None else 0.0
        hidden = max(moving - r.exposed, 0.0)
        return Split(*map(short, (computation, r.exposed, late, max(bubble, 0.0), hidden)))

    def _rank(self, r: RankTimeline) -> RankRecord:
        ranks = self.mesh.size
        name = f"pipeline rank {r.rank}" if r.rank is not None else (
            f"all {ranks} ranks" if ranks > 1 else "the device")  # fmt: skip
        runs = [
            (short(t.begin), short(t.end), action_name(t), t.run.op.callee.string_value())
            for t in r.runs
        ]
        own = [e for e in r.events if e.run is None or e.row.startswith(ARRIVALS)]
        memory, before = list[tuple[float, int]](), None
        for at, held in r.bytes:
            if held != before:
                memory.append((short(at), held))
            before = held
        return RankRecord(
            name, self._split(r), self._rows(own), runs, memory, self._memory(r.memory)
        )

    def _rows(self, events: Iterable[SimulatedEvent], since: float = 0.0) -> EventRows:
        rows = EventRows()
        for e in events:
            row = rows.setdefault(e.row, {"begin": [], "end": [], "op": [], "kind": []})
            kind = LATE if e.late else WAITS if e.waits else COMPUTES if e.row == COMPUTE else MOVES
            row["begin"].append(short(e.begin - since))
            row["end"].append(short(e.end - since))
            row["op"].append(self.index.get(e.cost.op, -1))
            row["kind"].append(kind)
        return {name: rows[name] for name in sorted(rows, key=lambda n: (n != COMPUTE, n))}

    def _functions(self) -> dict[str, EventRows]:
        """Return the rows of each stage's function, from its begin."""
        found = dict[str, EventRows]()
        for r in self.simulation.ranks:
            for t in r.runs:
                name = t.run.op.callee.string_value()
                if name not in found:
                    mine = (
                        e for e in r.events if e.run == t.run and not e.row.startswith(ARRIVALS)
                    )
                    found[name] = self._rows(mine, t.begin)
        return found

    # ---- ops ----

    def _ops(self) -> tuple[dict[str, list[str]], dict[str, list[Any]]]:
        kinds, places, layers = _Strings(), _Strings(), _Strings()
        columns: dict[str, list[Any]] = {name: [] for name in (
            "names", "kinds", "places", "layers", "phases", "flops", "bytes", "seconds", "exposed",
            "again",
        )}  # fmt: skip
        for c in self.costs:
            path, number = layer_of(c)
            place = file_location(c.op.location)
            row = (
                op_text(c.op).rpartition(" = ")[0], kinds.of(c.op.name),
                places.of(f"{place[0]}:{place[1]}" if place else ""),
                layers.of(path.replace("*", number) if number else path),
                self.phases.get(c.op, 0), c.flops, c.bytes, short(c.seconds),
                short(self.exposed[c.op]) if c.communicates else 0,
                int(RECOMPUTE in c.op.attributes),
            )  # fmt: skip
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
        strings = {
            "kinds": [*kinds.index], "places": [*places.index], "layers": [*layers.index],
            "phases": [*PHASES],
        }  # fmt: skip
        return strings, columns

    def _collectives(self) -> Iterator[CollectiveRecord]:
        for c in self.costs:
            if not c.communicates:
                continue
            op = c.op
            why, moved = list[str](), None
            if isinstance(op, dist.CollectiveOp):
                place = file_location(op.location)
                for v in (*op.values, *op.outs):
                    name = v.name_hint or ""
                    for known in (name, re.sub(r"_\d+$", "", name)):
                        lines, plan = self.reasons.of(known, place[1] if place else 0)
                        why, moved = why or lines[:MAX_ALTERNATIVES], moved or plan
            yield CollectiveRecord(
                self.index[op], axes_text(c.axes) if c.axes else "host",
                self.mesh.extent(c.axes) if c.axes else 1, c.form, dist.is_started(op),
                cause_of(op), _layouts_of(op), why, moved,
            )  # fmt: skip

    def _layers(self) -> list[LayerRecord]:
        sums = dict[str, list[float]]()
        each, received = dict[str, dict[str, float]](), Counter[str]()
        for c in self.costs:
            path, number = layer_of(c)
            mine = sums.setdefault(path, [0.0, 0.0, 0.0])
            mine[int(c.communicates)] += c.seconds
            if c.communicates:
                mine[2] += self.exposed[c.op]
                received[path] += c.bytes
            of = each.setdefault(path, {})
            of[number] = of.get(number, 0.0) + c.seconds
        found = [
            LayerRecord(
                path, len(each[path]), short(computing), short(moving), short(exposed),
                received[path], {n: short(s) for n, s in each[path].items()},
            )
            for path, (computing, moving, exposed) in sums.items()
        ]  # fmt: skip
        return sorted(found, key=lambda layer: -(layer.computation + layer.communication))

    # ---- memory and layouts ----

    def _memory(self, use: MemoryUse) -> MemoryRecord:
        groups = dict[tuple[str, str], tuple[str, int, int]]()
        for s in use.storages:
            name = f"%{s.value.name_hint}" if s.value.name_hint else describe_maker(s.value)
            key = re.sub(r"\d+", "*", name), s.part
            first, held, number = groups.get(key, (name, 0, 0))
            groups[key] = first, held + s.bytes, number + 1
        largest = sorted(groups.items(), key=lambda item: -item[1][1])[:MAX_STORAGES]
        storages = [
            (first if number == 1 else name, held, part, number)
            for (name, part), (first, held, number) in largest
        ]
        shown = sum(held for _, held, *_ in storages)
        planned, limit = self.cost.planned, self.mesh.cluster_or_default.memory
        return MemoryRecord(
            use.peak, use.parts, describe_op(use.op), storages, use.peak - shown,
            sum(s.bytes for s in use.storages if isinstance(s.value, BlockArgument)),
            None if limit is None else int(limit), None if planned is None else planned.size,
            None if planned is None else planned.bound, use.host,
        )  # fmt: skip

    def _arguments(self) -> tuple[list[LayoutRecord], list[ArgumentRecord]]:
        layouts, found = dict[Layout, int](), list[ArgumentRecord]()
        for a, v in zip(arguments(self.f), self.f.body.block.args, strict=True):
            assert isinstance(v.type, TensorType)
            local, layout = list(v.type.get_shape()), dist.type_layout(v.type)
            if layout is None:
                layout = Layout(self.mesh.name, ((),) * len(local))
            found.append(ArgumentRecord(
                a.key or f"%{v.name_hint or v.index}", str(a.role),
                element_name(v.type.element_type), list(dist.global_shape(v.type, self.mesh)),
                local, size_of(v), layouts.setdefault(layout, len(layouts)),
            ))  # fmt: skip
        return [layout_record(l, self.mesh) for l in layouts], found


def _peak(memory: MemoryRecord) -> int:
    return memory.peak


def mesh_record(mesh: Mesh) -> MeshRecord:
    """Return the record of a mesh."""
    on = mesh.cluster_or_default
    return MeshRecord(
        mesh.name, [(str(n), s) for n, s in mesh.axes], mesh.size,
        [{"name": l.name, "count": l.count, "bandwidth": l.bandwidth, "latency": l.latency}
         for l in on.levels],
        {str(n): level_of(mesh, (Axis(n),)) for n, s in mesh.axes if s > 1},
        None if on.memory is None else int(on.memory), dict(on.rates), on.memory_bandwidth,
    )  # fmt: skip


def layout_record(layout: Layout, mesh: Mesh) -> LayoutRecord:
    """Return the record of a layout."""
    return LayoutRecord(
        f"[{', '.join(map(axes_text, layout.dims))}]",
        [mesh.extent(axes) for axes in layout.dims], [axes_text(a) for a in layout.dims],
        [[mesh.index(rank, axes) for axes in layout.dims]
         for rank in range(min(mesh.size, MAX_PICTURED))],
    )  # fmt: skip


def _phases(f: FuncOp, module: ModuleOp) -> dict[Operation, int]:
    """Return the index among PHASES of each op that is not in the forward part."""
    phases = dict[Operation, int]()
    now = 0
    for op in f.body.block.walk():
        if isinstance(op, BackwardOp):
            now = 1
        if isinstance(op, Update):
            phases[op] = 2
        elif now:
            phases[op] = now
    for callee in module.body.ops:
        if isinstance(callee, FuncOp) and stage_of(callee) is not None:
            kind = train.action_of(callee)
            if kind != "F":
                within = 2 if kind is None else 1
                phases |= {op: 2 if isinstance(op, Update) else within for op in callee.body.walk()}
    return phases


def _search_in(module: ModuleOp) -> dict[str, Any] | None:
    """Return the result of a search on any function of a module."""
    results = (search_result(op) for op in module.body.ops if isinstance(op, FuncOp))
    return next((r for r in results if r), None)


def cause_of(op: Operation) -> str:
    """Return what makes an op that communicates necessary."""
    if not isinstance(op, dist.CollectiveOp):
        made = list(dict.fromkeys(describe_maker(v) for v in op.operands))
        return f"it moves the result of {_listed(made)}" if made else ""
    needs = list(dict.fromkeys(_reader(r) for out in op.outs for r in islice(readers(out), 8)))
    needed = f"{_listed(needs)} need{'s' * (len(needs) == 1)}" if needs else "the function returns"
    names = _listed([f"%{v.name_hint}" if v.name_hint else "a value" for v in op.values])
    if not op.record.reduces:
        return f"{needed} other elements of {names} than the rank has"
    made = list(dict.fromkeys(describe_maker(producer(v)) for v in op.values))
    layout = dist.type_layout(op.values[0].type)
    kind = partial_values("sum" if layout is None else layout.reduction)
    return f"{_listed(made)} leave{'s' * (len(made) == 1)} {kind}; {needed} the whole"


def _reader(op: Operation) -> str:
    return "the function's result" if op.name == "func.return" else describe_op(op)


def _listed(texts: Sequence[str], most: int = 2) -> str:
    """Return the first texts, and the number of others."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def _layouts_of(op: Operation) -> str:
    if not isinstance(op, dist.CollectiveOp):
        return ""
    before, after = (dist.type_layout(vs[0].type) for vs in (op.values, op.outs))
    return f"[{_dims(before)}] to [{_dims(after)}]"


def _dims(layout: Layout | None) -> str:
    return "" if layout is None else str(layout).partition("[")[2].replace("]", "", 1)
