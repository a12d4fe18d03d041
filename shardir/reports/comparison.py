"""Plans of a program side by side: which is the fastest one that fits?

  plan                       mesh            step  samples/s   peak  exposed     memory      dp ...
* megatron(tp) * fsdp(dp)    dp = 2, tp = 8  61 ms     1,049  44.1%   8.1 ms   41.2 GiB  1.2 GiB
~ fsdp                       dp = 16         64 ms     1,000  42.3%  11.9 ms   38.0 GiB  4.9 GiB
  ddp                        dp = 16         53 ms     1,207   ...                        too large
Half of the predicted steps are within 14% of measured ones: those with ~ may be as fast as the best
"""

import csv
import io
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, NamedTuple

from xdsl.dialects.builtin import ModuleOp

from shardir import pipelines
from shardir.algebra.cluster import Cluster
from shardir.algebra.mesh import Mesh, axes_text
from shardir.cost.functions import functions, is_global, on_cluster
from shardir.cost.groups import CostGroup, by_layer
from shardir.cost.report import FunctionCost, cost_of_function
from shardir.diagnostics import ShardirError, report_progress, seconds_text, size_text
from shardir.dialects.dist import MeshAttr
from shardir.dialects.nn.types import element_name, unsharded_type
from shardir.dialects.train import PipelineAttr, Role, StepOp, arguments, is_step
from shardir.reports.reasons import Reasons, run_passes
from shardir.reports.record import ProgramRecord, ReportRecord
from shardir.reports.recorder import record_of
from shardir.rewriting.copying import copied
from shardir.rewriting.microbatching import BatchDimensions, divide_batch, divisors
from shardir.search.meshes.declared_mesh import declare
from shardir.syntax.parser import default_parser
from shardir.syntax.source import collect_remarks, collect_warnings

MODEL_ERROR = 0.14
"""The median relative error of predicted steps on clusters without one of their own, by
`shard-bench cost-model`."""


class PlanChoice(NamedTuple):
    """A plan to compare.

    Attributes:
        name: its text.
        plan: the text without the options behind it.
        passes: they apply it.
        stages: the number of stages, each on the devices of a mesh that are left; 1: none.
        microbatches: of a step; 0: with stages about four for each of them, else the step's own.
        schedule: of the stages.
    """

    name: str
    plan: str
    passes: Sequence[Any]
    stages: int = 1
    microbatches: int = 0
    schedule: str = "1f1b"


@dataclass(frozen=True)
class ComparedPlan:
    """The estimates of a plan on a mesh.

    Attributes:
        seconds: of a step, or of the first function without one; None where there is an error.
        samples, tokens: per second; None where the inputs have none.
        peak_share: of the device's peak rate of the narrowest float type, from 0 to 1.
        exposed: the seconds in which a device waits for communication.
        memory: the peak of a device, in bytes.
        fits: whether this is at most the device's memory; None where that is unknown.
        collectives: the number of a step.
        bytes: received by a device, by the axes of the communication.
        compiled: the seconds of the compilation.
        error: why there is no such program.
        recomputed: the seconds of ops that are computed again.
        spread: the median relative error of such predictions, by the cluster's calibration or that
            of the model.
        layers: the seconds of equal layers, and the bytes that they receive, the dearest first.
    """

    plan: str
    mesh: str
    seconds: float | None = None
    samples: float | None = None
    tokens: float | None = None
    peak_share: float | None = None
    exposed: float | None = None
    memory: int | None = None
    fits: bool | None = None
    collectives: int = 0
    bytes: Mapping[str, int] = field(default_factory=dict)
    compiled: float = 0.0
    error: str = ""
    recomputed: float = 0.0
    spread: float = MODEL_ERROR
    layers: Sequence[CostGroup] = ()


@dataclass(frozen=True)
class PlanComparison:
    """Plans on meshes, the fastest ones that fit first. Its `str` is a table."""

    rows: Sequence[ComparedPlan]
    programs: Sequence[ProgramRecord] = ()
    """The records of the programs of rows without an error, if they were asked for."""
    notes: Sequence[str] = ()
    """What the figures leave out."""

    @property
    def best(self) -> ComparedPlan | None:
        """The fastest plan that fits; None if there is none."""
        return next((r for r in self.rows if r.seconds is not None and r.fits is not False), None)

    def records(self) -> list[dict[str, Any]]:
        """Return the rows as values of JSON: seconds, bytes, shares."""
        return [asdict(row) for row in self.rows]

    def json(self) -> str:
        return json.dumps(self.records(), indent=1)

    def report(self, title: str) -> ReportRecord:
        """Return the record of a page: the table, and the programs side by side."""
        return ReportRecord(title, self.programs, self.records())

    def csv(self) -> str:
        """Return the rows with a column for the bytes over each axis."""
        axes = list(dict.fromkeys(a for row in self.rows for a in row.bytes))
        out = io.StringIO()
        names = [n for n in ComparedPlan.__dataclass_fields__ if n not in ("bytes", "layers")]
        writer = csv.writer(out)
        writer.writerow([*names, *(f"bytes {a}" for a in axes)])
        for row in self.rows:
            writer.writerow([*(getattr(row, n) for n in names), *(row.bytes.get(a) for a in axes)])
        return out.getvalue()

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """Return the names of the columns that any row has, and the cells."""
        rows = [r for r in self.rows if r.seconds is not None]
        axes = list(dict.fromkeys(a for row in rows for a in row.bytes))
        columns: list[tuple[str, Callable[[ComparedPlan], str]]] = [
            ("plan", lambda r: r.plan), ("mesh", lambda r: r.mesh),
            ("step", lambda r: seconds_text(r.seconds or 0.0)),
            ("samples/s", lambda r: _number(r.samples)), ("tokens/s", lambda r: _number(r.tokens)),
            ("of peak", lambda r: "" if r.peak_share is None else f"{r.peak_share:.1%}"),
            ("exposed", lambda r: seconds_text(r.exposed or 0.0)),
            ("recomputed", lambda r: seconds_text(r.recomputed) if r.recomputed else ""),
            ("memory", lambda r: size_text(r.memory or 0)),
            ("", lambda r: "too large" if r.fits is False else ""),
            ("collectives", lambda r: str(r.collectives)),
            *((f"over {a}", lambda r, a=a: size_text(r.bytes[a]) if a in r.bytes else "")
              for a in axes),
            ("compiled", lambda r: f"{r.compiled:.1f} s"),
        ]  # fmt: skip
        cells = [[text(r) for _, text in columns] for r in rows]
        shown = [i for i in range(len(columns)) if any(row[i] for row in cells)]
        return [columns[i][0] for i in shown], [[row[i] for i in shown] for row in cells]

    def __str__(self) -> str:
        names, cells = self._table()
        lines = []
        if cells:
            widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
            marks = [self._mark(r) for r in self.rows if r.seconds is not None]
            for mark, row in zip([" ", *marks], [names, *cells], strict=True):
                texts = (
                    cell.ljust(w) if i < 2 else cell.rjust(w)
                    for i, (cell, w) in enumerate(zip(row, widths, strict=True))
                )
                lines.append(f"{mark} {'  '.join(texts)}".rstrip())
        lines += [f"{r.plan} on {r.mesh}: {r.error}" for r in self.rows if r.error]
        return "\n".join([*lines, *self._footnotes()])

    def _mark(self, row: ComparedPlan) -> str:
        """Return `*` for the best plan, and `~` for others that fit and may be as fast."""
        best = self.best
        if best is None or row.seconds is None or row.fits is False:
            return " "
        near = row.seconds <= (best.seconds or 0.0) * (1 + row.spread)
        return "*" if row is best else "~" if near else " "

    def _footnotes(self) -> Iterator[str]:
        if self.best is not None:
            near = any(self._mark(r) == "~" for r in self.rows)
            share = f"{self.best.spread:.0%}"
            use = ": those with ~ may be as fast as the best" if near else ""
            yield f"Half of the predicted steps are within {share} of measured ones{use}"
        yield from self.notes

    def by_layer(self) -> str:
        """Return a table of the seconds of each layer, and of their difference from the best
        plan's, equal layers together."""
        rows = [r for r in self.rows if r.seconds is not None]
        names = list(dict.fromkeys(str(group) for r in rows for group in r.layers))
        found = [{str(group): group for group in r.layers} for r in rows]
        base = next((g for r, g in zip(rows, found, strict=True) if r is self.best), found[0])
        cells = [["layer", *(f"{i + 1}" for i in range(len(rows)))]]
        for name in names:
            line = [name]
            for groups in found:
                seconds = groups[name].seconds if name in groups else 0.0
                change = seconds - (base[name].seconds if name in base else 0.0)
                sign = "+" if change > 0 else "-"
                less = f" ({sign}{seconds_text(abs(change))})" if change else ""
                line.append(f"{seconds_text(seconds)}{less}")
            cells.append(line)
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(w) if i else cell.ljust(w)
                for i, (cell, w) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in cells
        ]
        return "\n".join([*lines, *(f"{i + 1}: {r.plan} on {r.mesh}" for i, r in enumerate(rows))])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        names, cells = self._table()
        rows = [r for r in self.rows if r.seconds is not None]
        bold = ' style="font-weight: bold"'
        lines = [_html_row("th", names, "")]
        lines += [
            _html_row("td", row, bold if r is self.best else "")
            for r, row in zip(rows, cells, strict=True)
        ]
        errors = [f"{r.plan} on {r.mesh}: {r.error}" for r in self.rows if r.error]
        return "".join([
            "<table>", *lines, "</table>",
            *(f"<p>{escape(line)}</p>" for line in (*errors, *self._footnotes())),
        ])  # fmt: skip


def _html_row(tag: str, cells: Sequence[str], style: str) -> str:
    return f"<tr{style}>{''.join(f'<{tag}>{escape(c)}</{tag}>' for c in cells)}</tr>"


def compare_plans(
    module: ModuleOp, entries: Sequence[PlanChoice], meshes: Sequence[Mesh],
    cluster: Cluster | None, *, recorded: bool = False,
) -> PlanComparison:  # fmt: skip
    """Compile a program by each plan on each mesh, and compare the estimates.

    Plans that name an axis which a mesh lacks are left out there.

    Args:
        meshes: in place of that of the program.
        cluster: of the devices, by default the meshes' own.
        recorded: whether to keep the records of the programs, for a report.

    Raises:
        ShardirError: the cluster has too few devices for a mesh, or no plan has the axes of any
            mesh, or none can be compiled. An error of one plan on one mesh is in its row.
    """
    if not entries or not meshes:
        lacking = "plan" if not entries else "mesh"
        raise ShardirError(f"expected plans and meshes to compare, got no {lacking}")
    placed = [on_cluster(mesh, cluster) for mesh in meshes]
    pairs = [(e, m) for m in placed for e in entries if _axes_named(e.plan, placed) <= {*_axes(m)}]
    if not pairs:
        named = ", ".join(sorted({a for e in entries for a in _axes_named(e.plan, placed)}))
        raise ShardirError(
            f"expected a mesh with the axes of a plan, {named}, got "
            f"{'; '.join(map(_mesh_text, meshes))}"
        )
    rows = list[tuple[ComparedPlan, ProgramRecord | None]]()
    for i, (entry, mesh) in enumerate(pairs):
        report_progress(f"{i + 1} of {len(pairs)}: {entry.name} on {_mesh_text(mesh)}")
        rows.append(_compared(module, entry, mesh, cluster, recorded))
    if all(row.error for row, _ in rows):
        raise ShardirError("; ".join(f"{r.plan} on {r.mesh}: {r.error}" for r, _ in rows[:3]))
    rows.sort(key=lambda r: (r[0].seconds is None, r[0].fits is False, r[0].seconds or 0.0))
    programs = [record for _, record in rows if record]
    return PlanComparison([row for row, _ in rows], programs, [*_notes(module)])


OPTIONS = ("recompute", "precision", "stages", "microbatches", "schedule")
"""The words behind a plan."""


def entry(text: str) -> PlanChoice:
    """Return the plan of a text: a mode, `auto{memory=16GB}`, or a plan, `fsdp(dp)`; with options
    behind it: `recompute=full`, `precision=bf16`, `stages=4 microbatches=16 schedule=zb-h1`.

    Raises:
        ShardirError: it is none of these.
    """
    plan, options = text.strip(), dict[str, str]()
    while match := re.fullmatch(rf"(.*?)\s+({'|'.join(OPTIONS)})\s*=\s*(\S+)", plan):
        plan = match[1]
        options[match[2]] = match[3]
    word = plan.partition("{")[0].strip().lower().replace("-", "_").removesuffix("_parallel")
    if word in pipelines.known_modes():
        passes = pipelines.build(pipelines.pipeline_of(None, plan, ""))
    else:
        passes = pipelines.with_plan(pipelines.build(pipelines.DEFAULT), plan)
    passes = pipelines.with_precision(passes, options.get("precision"))
    passes = pipelines.with_recompute(passes, options.get("recompute"))
    counts = {}
    for name in ("stages", "microbatches"):
        if (count := options.get(name)) is not None:
            if not count.isdecimal() or not int(count):
                raise ShardirError(f"{name}: expected 1 or more, got {count}")
            counts[name] = int(count)
    schedule = options.get("schedule", "1f1b")
    if "schedule" in options and counts.get("stages", 1) == 1:
        raise ShardirError(f"expected stages for schedule={schedule}, got none; write stages=4")
    return PlanChoice(text.strip(), plan, passes, **counts, schedule=schedule)


def meshes_of(devices: int, cluster: Cluster | None, name: str = "m") -> list[Mesh]:
    """Return the meshes of so many devices: `dp = 16`, and `dp = 8, tp = 2` to `dp = 1, tp = 16`,
    with tensor parallelism within a unit of the innermost level of the cluster."""
    if devices < 1:
        raise ShardirError(f"expected at least 1 device, got {devices}")
    inner = devices if cluster is None else cluster.units[0]
    found = [Mesh(name, (("dp", devices),))]
    for tp in range(2, min(inner, devices) + 1):
        if devices % tp == 0:
            found.append(Mesh(name, (("dp", devices // tp), ("tp", tp))))
    return found


def mesh_of(text: str, name: str = "m") -> Mesh:
    """Return the mesh of a text, `dp = 2, tp = 8`. Raises ShardirError."""
    return Mesh(name, MeshAttr.from_text(text.strip()))


def _divided(program: ModuleOp, entry: PlanChoice, mesh: Mesh, cluster: Cluster | None) -> Mesh:
    """Ask for the stages and microbatches of a plan; return the mesh of one stage, whose first axis
    is shorter.

    Raises:
        ShardirError: the program has no step, or stages already; or the axis or the batch cannot be
            divided so.
    """
    if entry.stages == 1 and not entry.microbatches:
        return mesh
    step = next((op for op in program.body.ops if isinstance(op, StepOp)), None)
    if step is None or step.pipeline is not None:
        got = "no step" if step is None else "one in stages"
        raise ShardirError(f"expected a step to divide, got {got}")
    microbatches = entry.microbatches
    if not microbatches:
        parts = divisors(BatchDimensions.of(step).divisor)
        most = 4 * entry.stages
        microbatches = max(k * step.microbatches for k in parts if k == 1 or k <= most)
    divide_batch(step, microbatches)
    if entry.stages == 1:
        return mesh
    step.properties["pipeline"] = PipelineAttr.read(f"{entry.schedule}, ranks = {entry.stages}")
    (name, size), *others = mesh.axes
    if size % entry.stages:
        raise ShardirError(
            f"expected {entry.stages} stages to divide the axis {name}, got {name} = {size}"
        )
    return on_cluster(Mesh(mesh.name, ((name, size // entry.stages), *others)), cluster)


def _compared(
    module: ModuleOp, entry: PlanChoice, mesh: Mesh, cluster: Cluster | None, recorded: bool
) -> tuple[ComparedPlan, ProgramRecord | None]:
    """Return the row of a plan on a mesh, and the record of its program if it is asked for."""
    started, text = time.perf_counter(), _mesh_text(mesh)
    program = copied(module)
    try:
        with collect_warnings(), collect_remarks():
            mesh = _divided(program, entry, mesh, cluster)
            if entry.stages > 1:
                text = f"stage = {entry.stages}, {_mesh_text(mesh)}"
            declare(program, mesh)
            context, reasons = default_parser().ctx, Reasons()
            if recorded:
                reasons = run_passes(context, program, entry.passes)
            else:
                for p in entry.passes:
                    p.apply(context, program)
            cost = _measured(program)
    except ShardirError as error:
        return ComparedPlan(entry.name, text, error=str(error).partition("\n")[0]), None
    compiled = time.perf_counter() - started
    samples, tokens = samples_of(module)
    record = None
    if recorded:
        label = f"{entry.name} on {text}"
        record = record_of(program, label, entry.passes, reasons, rates=(samples, tokens))
    holds = mesh.cluster_or_default.memory
    seconds = cost.seconds
    row = ComparedPlan(
        entry.name, text, seconds, _rate(samples, seconds), _rate(tokens, seconds),
        cost.peak_share, sum(cost.exposed.values()),
        cost.memory.peak, None if holds is None else cost.memory.peak <= holds,
        sum(c.communicates for c in cost.ops),
        {axes_text(axes) or "host": n for axes, (n, _) in cost.communication.items()}, compiled,
        recomputed=0.0 if cost.recomputed is None else cost.recomputed.seconds,
        spread=MODEL_ERROR if (error := mesh.cluster_or_default.error) is None else error,
        layers=by_layer(cost.ops),
    )  # fmt: skip
    return row, record


def _notes(module: ModuleOp) -> Iterator[str]:
    """Yield what the figures of a program leave out: all steps but the first."""
    first, *others = [
        op.sym_name.data for op in module.body.ops if isinstance(op, StepOp)
    ] or [""]  # fmt: skip
    if others:
        left_out = ", ".join(f"@{name}" for name in others)
        yield f"The figures are those of @{first} alone, not of {left_out}"


def _rate(count: int | None, seconds: float) -> float | None:
    """Return a number per second; None of a function that takes no time."""
    return None if count is None or not seconds else count / seconds


def _measured(program: ModuleOp) -> FunctionCost:
    """Return the cost of the step of a program, or else of its first function."""
    found = [(f, mesh) for f, mesh in functions(program) if not is_global(f)]
    if not found:
        raise ShardirError("expected a function in the local view, got none")
    f, mesh = next(((f, mesh) for f, mesh in found if is_step(f)), found[0])
    return cost_of_function(f, mesh)


def samples_of(module: ModuleOp) -> tuple[int | None, int | None]:
    """Return the samples of a step, or else of the first function, by its first input, and the
    tokens if this has integers."""
    step = next((op for op in module.body.ops if isinstance(op, StepOp)), None)
    first = None if step is None else step.function.string_value()
    for f, _ in functions(module):
        if first not in (None, f.sym_name.data):
            continue
        for a, v in zip(arguments(f), f.body.block.args, strict=True):
            type = unsharded_type(v)
            if a.role is Role.INPUT and (shape := type.get_shape()):
                rows = shape[0] * (1 if step is None else step.microbatches)
                is_text = len(shape) == 2 and element_name(type.element_type) in ("i32", "i64")
                return rows, rows * shape[1] if is_text else None
    return None, None


def _axes(mesh: Mesh) -> Iterator[str]:
    yield from (str(name) for name, _ in mesh.axes)


def _axes_named(plan: str, meshes: Sequence[Mesh]) -> set[str]:
    """Return the axes of any of the meshes that a plan names."""
    known = {axis for mesh in meshes for axis in _axes(mesh)}
    return {word for word in re.findall(r"\w+", plan) if word in known}


def _mesh_text(mesh: Mesh) -> str:
    return ", ".join(f"{name} = {size}" for name, size in mesh.axes)


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:,.0f}" if x >= 100 else f"{x:.3g}"
