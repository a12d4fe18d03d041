"""`-t torch`: a module in the local view -> a directory that needs only Python and torch.

program.py       the program of every rank
single.py        the program on one device, from the module before the passes
plan.json        the arguments and results of the functions
data/*.npy       the arrays that the program reads
source.ir        the source of the program (resize.py)
shardir_runtime/ the package that the programs import
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp

from shardir.algebra.mesh import Mesh
from shardir.backend.interface import Backend, Origin
from shardir.backend.runs import (
    Batches,
    LaunchError,
    MeasuredTimes,
    OnEvent,
    OnTrace,
    Options,
    RankCalls,
    Report,
    RunError,
)
from shardir.backend.torch import resize
from shardir.backend.torch.directory import SOURCE, copy_runtime, replacing
from shardir.backend.torch.emit.arena import arena_plan
from shardir.backend.torch.emit.data import Data
from shardir.backend.torch.emit.plan import plan_of, states_in
from shardir.backend.torch.emit.program import (
    Emitted,
    emit,
    mesh_of,
    outline,
    program_text,
    public_functions,
)
from shardir.backend.torch.launch.measure import times
from shardir.backend.torch.launch.report import Progress, run_and_check
from shardir.backend.torch.launch.start import read_plan, run
from shardir.backend.torch.measured import ProgramLines
from shardir.backend.torch.shardir_runtime.plan.program import ProgramPlan
from shardir.backend.torch.traces import Differences, MeasuredTrace
from shardir.cost.clusters import load
from shardir.cost.functions import narrowest_float
from shardir.cost.seconds import works_of
from shardir.diagnostics import ShardirError
from shardir.dialects.blocks import ops_of
from shardir.dialects.nn.base import Array
from shardir.dialects.train import is_step, schedule_of
from shardir.pipelines import build
from shardir.syntax.files import scratch_folder, write_text
from shardir.syntax.source import collect_warnings, warn

SINGLE_DEVICE = "single-device"
"""The pipeline from the program as written to the program of one device."""

MAX_PROGRAMS = 1024
"""The maximum number of programs, one for each rank, that are written."""


@dataclass(frozen=True)
class TorchBackend(Backend):
    """Python programs on torch.distributed."""

    name: ClassVar[str] = "torch"

    def text(self, module: ModuleOp) -> str:
        """Return the text of program.py."""
        return program_text(module, straight_line=self.straight_line, arena=self.arena)

    def prepare(self, module: ModuleOp) -> None:
        outline(module)

    def emit_directory(
        self,
        ctx: Context,
        module: ModuleOp,
        original_module: ModuleOp | None,
        out_dir: str | Path,
        base_dir: Path | None = None,
        origin: Origin | None = None,
        states: Mapping[str, Array] = MappingProxyType({}),
    ) -> None:
        aliases = {} if origin is None else origin.aliases
        texts, data = self.files(ctx, module, original_module, base_dir, states, aliases)
        if origin is not None:
            texts[SOURCE] = resize.text_of(origin)
        self._write(out_dir, texts, data)

    def _write(self, out_dir: str | Path, texts: dict[str, str], data: Data) -> None:
        with replacing(Path(out_dir)) as fresh:
            for name, text in texts.items():
                (fresh / name).write_bytes(text.encode("utf-8", "surrogateescape"))
            copy_runtime(fresh)
            for name, values in data.files.items():
                (fresh / name).parent.mkdir(exist_ok=True)
                np.save(fresh / name, values, allow_pickle=False)

    def files(
        self, ctx: Context, module: ModuleOp, original: ModuleOp | None, base_dir: Path | None,
        states: Mapping[str, Array], aliases: Mapping[str, str], copied: Path | None = None,
    ) -> tuple[dict[str, str], Data]:  # fmt: skip
        """The texts by file name, and the data, which the directory `copied` may have already."""
        mesh = mesh_of(module)
        if self.per_rank and mesh is not None and mesh.size > MAX_PROGRAMS:
            raise ShardirError(
                f"expected a mesh of at most {MAX_PROGRAMS} devices for per-rank=true, which "
                f"writes a file for each, got {mesh.size}; omit it: every rank runs program.py"
            )
        plan, data = plan_of(module, base_dir, copied, states)
        for f, message in data.warnings:
            warn(f, message)
        if aliases:
            plan["aliases"] = dict(aliases)
        for f in public_functions(module):
            of_function = plan["functions"][f.sym_name.data]
            if (seconds := seconds_at_peak(f, mesh)) is not None:
                of_function["at_peak"] = seconds
        form = {"straight_line": self.straight_line, "arena": self.arena}
        programs = {"program.py": emit(module, **form)}
        if (arenas := programs["program.py"].arenas) is not None:
            plan["arena"] = arena_plan(arenas)
        single = single_program(ctx, original, plan, base_dir) if original is not None else None
        if single is not None:
            programs["single.py"] = single
        plan["single"] = "single.py" if single is not None else None
        if self.per_rank and mesh is not None:
            for rank in range(mesh.size):
                programs[f"program_rank{rank}.py"] = emit(module, rank, **form)
        texts = {name: program.text for name, program in programs.items()}
        texts["plan.json"] = json.dumps(plan, indent=1) + "\n"
        return texts, data

    def run(
        self,
        directory: str | Path,
        options: Options,
        on_event: OnEvent | None = None,
        batches: Batches | None = None,
    ) -> Report:
        traced: list[Differences] = []

        def at_work(given: Options) -> Report:
            on_trace = None if options.trace is None else self.on_trace(directory, options, traced)
            progress = Progress("", options.steps, options.log_every, sys.stderr)
            if options.check:
                report = self._checked(directory, given, progress, batches, on_trace)
            else:
                shown = options.verbose and on_event is None
                with progress.shown() if shown else nullcontext():
                    take = progress if shown else on_event
                    report = run(
                        directory, given, None, "program.py", take, batches, self.emit_resized,
                        on_trace,
                    )  # fmt: skip
            report.differences = {d.function: d for d in traced}
            return report

        if not options.parameters:
            return at_work(options)
        with scratch_folder() as folder:
            dump = options.dump or folder / "states.npz"
            report = at_work(replace(options, dump=dump))
            if report.stopped is None and options.node_rank == 0:
                report.parameters = _parameters(read_plan(directory), dump)
        return report

    def _checked(
        self, directory: str | Path, options: Options, progress: Progress, batches: Batches | None,
        on_trace: OnTrace | None,
    ) -> Report:  # fmt: skip
        """Run a directory, and compare with one device.

        Raises:
            RunError: they differ by more than rounding.
        """
        if batches is not None:
            raise LaunchError(
                "--check: expected files of --data, or the example inputs, got batches; compare "
                "batches by program.check(batches)"
            )
        report, report_checks = run_and_check(read_plan(directory), options, progress, on_trace)
        if not all(difference.agrees for difference in report_checks):
            raise RunError("\n".join(map(str, report_checks)))
        report.checks = report_checks
        return report

    def on_trace(self, directory: str | Path, options: Options, out: list[Differences]) -> OnTrace:
        """Compile a directory again, and return the function that writes the trace of a run after
        its end, and that adds the differences from the simulated run to `out`.

        Raises:
            ShardirError: the directory cannot be compiled again, or has another program.
        """
        plan = read_plan(directory)
        _, module = resize.resize(plan.directory, plan.size, plan.size)
        lines, path = ProgramLines(module, plan.arena is not None), options.trace
        program = (plan.directory / "program.py").read_text(errors="surrogateescape")
        lines.check(program)
        cluster = load(options.trace_cluster) if options.trace_cluster else None

        def write(ranks: list[RankCalls]) -> None:
            found = MeasuredTrace(lines, ranks, cluster)
            assert path is not None
            write_text(path, found.text())
            out.extend(found.differences())

        return write

    def emit_resized(self, directory: Path, ranks: int, of: int, out: Path) -> None:
        """Write the program of a directory, which is for `of` ranks, for other ones. Raises
        ShardirError."""
        context, module = resize.resize(directory, ranks, of)
        plan = read_plan(directory)
        backend, states = replace(self, arena=plan.arena is not None), states_in(directory)
        with collect_warnings():
            files = backend.files(context, module, None, None, states, plan.aliases, directory)
            self._write(out, *files)

    def measure(
        self,
        directories: Sequence[Path],
        rounds: int,
        seconds: float,
        options: Options,
        on_round: Callable[[int], object] | None = None,
    ) -> MeasuredTimes:
        return times(directories, rounds, seconds, options, on_round)


def seconds_at_peak(f: FuncOp, mesh: Mesh | None) -> float | None:
    """Return the seconds of a step's operations on a device at the peak rate of its narrowest
    element type; None without a rate of the mesh's own cluster, and for steps in stages."""
    if mesh is None or mesh.cluster is None or not is_step(f) or schedule_of(f) is not None:
        return None
    ops = ops_of(f.body.block)
    peak = mesh.cluster.rates.get(narrowest_float(ops))
    return sum(work.cost(mesh).flops for work in works_of(ops, mesh)) / peak if peak else None


def _parameters(plan: ProgramPlan, dump: Path) -> dict[str, Any]:
    """The values of parameters in what a run has written."""
    arguments = (a for f in plan.functions for a in f.args)
    keys = dict.fromkeys(a.key for a in arguments if a.role == "parameter")
    with np.load(dump, allow_pickle=False) as file:
        return {key: file[f"states/{key}"] for key in keys}


def single_program(
    ctx: Context, original: ModuleOp, plan: dict[str, Any], base_dir: Path | None = None
) -> Emitted | None:
    """Return the program of one device; None if there is none, as of a program that is written per
    device."""
    from shardir.analysis.functions import is_local_body
    from shardir.rewriting.copying import copied
    from shardir.rewriting.functions import bodies
    from shardir.rewriting.one_device import unroll_manual

    module = copied(original)
    try:
        unroll_manual(module)
    except ShardirError as error:
        warn(None, f"there is no single.py to compare with: {error}")
        return None
    if any(is_local_body(block) for _, block in bodies(module)):
        return None
    try:
        for p in build(SINGLE_DEVICE):
            p.apply(ctx, module)
        mine, _ = plan_of(module, base_dir)
        outline(module)
        program = emit(module, single=True)
    except ShardirError as error:
        warn(None, f"there is no single.py to compare with: {error}")
        return None
    if _interface(mine) != _interface(plan):
        warn(None, "there is no single.py to compare with: its arguments or results would differ")
        return None
    return program


def _interface(plan: dict[str, Any]) -> dict[str, Any]:
    """The arguments and results of the functions, without layouts."""
    return {
        name: [
            [(v["shape"], v["dtype"], v.get("key"), v.get("updates")) for v in f[side]]
            for side in ("args", "results")
        ]
        for name, f in plan["functions"].items()
    }
