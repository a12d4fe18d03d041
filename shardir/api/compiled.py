"""A compiled program: its text, its Python, and runs of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from shardir import pipelines
from shardir.algebra.garbage import no_gc
from shardir.algebra.plan_notation import PlanForm
from shardir.api.caches import bound_caches
from shardir.api.located import run_located
from shardir.api.reproducer import write_reproducer
from shardir.api.summary import Summary, rows_of
from shardir.backend import DEFAULT, backend_of
from shardir.backend.interface import Backend, Origin
from shardir.backend.runs import Options, Report, in_python_words, with_options
from shardir.cost.clusters import load
from shardir.cost.functions import functions, is_global
from shardir.cost.report import FunctionCost, cost_of_function, report
from shardir.diagnostics import (
    ShardirError,
    check_arguments,
    report_progress,
    size_text,
)
from shardir.dialects.nn.base import Array
from shardir.reports.layouts import Explanation
from shardir.reports.record import ReportRecord
from shardir.rewriting.annotated_plan import annotated_plan
from shardir.rewriting.copying import copied
from shardir.rewriting.functions import is_public
from shardir.syntax.files import scratch_folder
from shardir.syntax.parser import default_parser
from shardir.syntax.parser import parse as _parse
from shardir.syntax.printer import print_module
from shardir.syntax.source import Source, collect_remarks, collect_warnings, warn
from shardir.syntax.verify import verify

if TYPE_CHECKING:
    from shardir.backend.torch.launch.local_trainer import LocalTrainer
    from shardir.backend.torch.shardir_runtime.run.trainer import Trainer


def parse(text: str, name: str = "<input>") -> ModuleOp:
    """Parse and verify a module. Raises ParseErrors with all errors."""
    return _parse(text, name, verify=True)


@check_arguments("compile")
def compile_module(
    text_or_module: str | ModuleOp,
    pipeline: str | None = None,
    name: str = "<input>",
    *,
    mode: str | None = None,
    plan: PlanForm | None = None,
    precision: str | None = None,
    recompute: str | float | None = None,
    offload: bool = False,
    save_strategies: str | Path | None = None,
    base_dir: str | Path | None = None,
    target: str | Backend = DEFAULT,
    arena: bool = False,
) -> "Compiled":
    """Run a pipeline, or the pipeline of a mode, on a program. The program itself is not changed.

    Args:
        pipeline: the names of passes, with options in braces.
        name: the name of the source in errors and comments.
        mode: stand_alone, data, hybrid, semi_auto (the default), auto or manual. It takes the
            options of its passes: `auto{memory=16GB}`.
        plan: layouts and marks that annotate the program: the text of a plan, presets such as
            `fsdp`, a file, or a plan in Python: `{"*.weight": "[{dp}]"}`, or a list of such pairs.
        precision: `bf16` or `f16`, in which products are computed and communicated; parameters and
            the optimizer stay in f32 (the pass mixed-precision).
        recompute: the values to compute again in the backward part: `full`, `dots`, or a memory
            budget to meet, in bytes on a device (`6GB`) or as a part of the peak without it (0.6).
        offload: whether a budget may be met with activations and states in host memory.
        save_strategies: the file for the plan of all strategies and layouts.
        base_dir: the folder of relative paths of data files, by default the folder of `name`.
        target: the backend, or its name.
        arena: whether the program's values share one block of memory, at planned offsets.

    Raises:
        ShardirError: the errors of the program or the pipeline, with their locations.
    """
    bound_caches()
    text = pipelines.pipeline_of(pipeline, mode, pipelines.DEFAULT)
    passes = pipelines.with_precision(pipelines.build(text), precision)
    passes = pipelines.with_plan(passes, plan)
    passes = pipelines.with_recompute(passes, recompute, offload)
    passes = pipelines.with_files(passes, save_strategies)
    with no_gc():
        if isinstance(text_or_module, str):
            source = Source(text_or_module, name)
            original = parse(text_or_module, name)
        else:
            source, original = Source("", name), copied(text_or_module)
            verify(original, source)
        input_module, module, context = original, copied(original), default_parser().ctx
        done = 0

        def work() -> None:
            nonlocal original, done
            for done, p in enumerate(passes):  # noqa: B007 - read where one fails
                report_progress(p.name)
                p.apply(context, module)
                if pipelines.runs_on_one_device(p):
                    original = copied(module)
            verify(module, source)
            warn_of_memory(module)

        try:
            run_located(source, work)
        except ShardirError:
            raise
        except Exception as e:
            make = partial(copied, input_module)
            note_reproducer(e, passes[done].name, make, source.text, passes, done, context)
            raise
    base = Path(base_dir) if base_dir is not None else None
    backend = backend_of(target)
    backend = replace(backend, arena=arena or backend.arena)
    return Compiled(module, original, source, base, context, backend, input_module, tuple(passes))


def warn_of_memory(module: ModuleOp) -> None:
    """Warn of functions that need more memory than a device of the mesh's own cluster has."""
    for f, mesh in functions(module):
        holds = None if mesh.cluster is None else mesh.cluster.memory
        if not holds or is_global(f) or not is_public(module, f.sym_name.data):
            continue
        peak = cost_of_function(f, mesh).memory.peak
        if peak > holds:
            warn(
                f,
                f"expected @{f.sym_name.data} to need at most the {size_text(int(holds))} of a "
                f"device of the cluster, got an estimated peak of {size_text(peak)}; recompute, "
                "use another plan (shardir.compare), or more devices",
            )


def note_reproducer(error: Exception, part: str, *reproducer: Any) -> None:
    """Write a reproducer of an internal error, and add a note with its path to the error."""
    path = write_reproducer(f"{part}: {type(error).__name__}: {error}", *reproducer)
    if path is not None:
        error.add_note(f"a reproducer for a report is {path}: shard-opt {path} --run-reproducer")


@dataclass(frozen=True, eq=False, repr=False)
class Compiled:
    """A compiled program, to read, save or run. Its `repr` has its mesh, plan, estimated time and
    memory."""

    module: ModuleOp
    original: ModuleOp
    source: Source
    base_dir: Path | None
    context: Context
    backend: Backend
    input_module: ModuleOp
    """The module before its passes."""
    passes: tuple[ModulePass, ...]

    @property
    def text(self) -> str:
        """The IR after all passes."""
        return print_module(self.module)

    @property
    def outlined(self) -> str:
        """The IR from which `program` is emitted: after all passes, with equal blocks of ops, such
        as the layers of a model, as loops."""
        module = copied(self.module)

        def work() -> None:
            for p in pipelines.build("outline-blocks"):
                p.apply(self.context, module)

        run_located(self.source, work)
        return print_module(module)

    @property
    def program(self) -> str:
        """The Python that every rank runs."""
        try:
            return run_located(self.source, lambda: self.backend.text(self.module))
        except ShardirError:
            raise
        except Exception as e:
            make, text = partial(copied, self.module), self.source.text
            note_reproducer(e, "the emitter", make, text, (), 0, self.context, self.backend.name)
            raise

    @check_arguments("stablehlo")
    def stablehlo(self, function: str | None = None, *, view: str = "global") -> str:
        """Return a function as a module of StableHLO.

        Args:
            function: its name, by default of the training step, else of the only function.
            view: `global`, with the layouts of the program as Shardy's shardings, which XLA's
                partitioner takes; or `local`, the program of each partition, with its collectives.

        Raises:
            ShardirError: ops that StableHLO has not; the message has all of them.
        """
        from shardir.backend.stablehlo.export import to_stablehlo  # few programs are exported

        if view not in ("global", "local"):
            raise ShardirError(f"expected the view global or local, got {view!r}")
        module = self.module if view == "local" else self._before(pipelines.LOWERING)
        return run_located(self.source, lambda: to_stablehlo(module, function))

    def _before(self, name: str) -> ModuleOp:
        """The module before a pass. The passes until then run again."""
        module = copied(self.input_module)

        def work() -> None:
            for p in self.passes:
                if p.name == name:
                    break
                p.apply(self.context, module)

        with collect_warnings(), collect_remarks():  # the compilation has warned already
            run_located(self.source, work)
        return module

    @check_arguments("save")
    def save(
        self, directory: str | Path, *, per_rank: bool = False, straight_line: bool = False
    ) -> Path:
        """Write a directory that needs only Python and torch.

        Args:
            per_rank: also write a readable file for each rank.
            straight_line: write the runs and transfers of steps in stages as plain calls on each
                rank instead of a table.
        """
        return self._write(directory, self.base_dir, {}, per_rank, straight_line)

    def _write(
        self, directory: str | Path, base_dir: Path | None, states: Mapping[str, Array],
        per_rank: bool, straight_line: bool,
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> Path:  # fmt: skip
        """Write a directory.

        Args:
            states: initial values by key, which replace the program's.
            aliases: further names of parameters and states, with their keys.
        """
        backend = replace(self.backend, per_rank=per_rank, straight_line=straight_line)
        args = (self.context, self.module, self.original, directory, base_dir)
        origin = Origin.of(self.input_module, self.passes, aliases)
        run_located(self.source, lambda: backend.emit_directory(*args, origin, states))
        return Path(directory)

    @with_options
    def run(self, **options: Any) -> Report:
        """Run the program on local processes, one for each rank.

        Args:
            options: those of a run.
        """
        with scratch_folder() as folder:
            return self.backend.run(self.save(folder / "program"), Options.of(options))

    def start(self, **options: Any) -> "Trainer":
        """Start the training of this program in this process, one of its ranks (`shardir.start`).
        All ranks call it, or `shardir.start(None)` where rank 0 alone has compiled the program.

        Args:
            options: resume=, backend=, device=, seed=, timeout=, threads=, compile=.

        Returns:
            The trainer: `loss = trainer.step(batch)`.

        Raises:
            ShardirError: the program has no training step, or is for another number of ranks.
        """
        from shardir.backend.torch.started import start  # it needs torch

        return start(self, **options)

    @in_python_words()
    def ranks(
        self, count: int | None = None, *, resume: str | Path | None = None, **options: Any
    ) -> "LocalTrainer":  # fmt: skip
        """Start local ranks, one process each, for a loop in this process: a notebook, or a script.

            with program.ranks() as trainer:
                loss = trainer.step(batch)

        Args:
            count: the number of ranks that the program has to be for.
            resume: a checkpoint, or a folder of them, from which the training goes on.
            options: backend=, device=, seed=, timeout=, threads=, compile= of a run.

        Returns:
            The trainer: its ranks are up until the end of the block, or close().

        Raises:
            ShardirError: the program has no training step, or is for another number of ranks; or
                there is no such option.
            RunError: a rank fails.
        """
        from shardir.backend.torch.launch.local_trainer import LocalTrainer, rank_options

        trainer = LocalTrainer(self.save, count, rank_options(options), self.steps_done)
        if resume is not None:
            trainer.load(resume)
        return trainer

    @property
    def steps_done(self) -> int:
        """The number of steps with which a training begins."""
        return 0

    @property
    def plan(self) -> str:
        """The layouts and marks of arguments and values as the text of a plan, for `plan=`. They
        come from the original plan, propagation or a search. The passes run again.

        Raises:
            ShardirError: no pass decides on layouts.
        """
        last, module = pipelines.planned(self.passes), copied(self.input_module)

        def work() -> None:
            for p in self.passes[: last + 1]:
                p.apply(self.context, module)

        with collect_warnings(), collect_remarks() as remarks:  # the compilation has warned already
            run_located(self.source, work)
        return str(replace(annotated_plan(module), comments=tuple(remarks)))

    @check_arguments("cost")
    def cost(self, function: str | None = None, cluster: str | None = None) -> FunctionCost:
        """Return the estimated time and memory of a function; its `str` is the report.

        Args:
            function: its name, by default of the only public function.
            cluster: the name of a cluster, by default the mesh's own.

        Raises:
            ShardirError: the function or cluster does not exist, or there are several functions.
        """
        costs = {c.name: c for c in report(self.module, load(cluster) if cluster else None)}
        public = [name for name in costs if is_public(self.module, name)]
        if function is None and len(public) == 1:
            return costs[public[0]]
        if function not in costs:
            got = "none" if function is None else function
            raise ShardirError(f"expected a function of {', '.join(costs)}, got {got}")
        return costs[function]

    @check_arguments("report")
    def report(
        self, path: str | Path, *, cluster: str | None = None, trace: str | Path | None = None
    ) -> Path:
        """Write a page that shows the program: its time, timeline, memory, layouts, communication
        with causes and alternatives, and search. The passes run again.

        Args:
            path: the file, `report.html`. It needs no other file and no network.
            cluster: the name of a cluster, by default the mesh's own.
            trace: a file that a run with `trace=` has written, for measured times.

        Returns:
            The path.

        Raises:
            ShardirError: the cluster does not exist, the trace is of another program, or the file
                cannot be written.
        """
        from shardir.api.reporting import program_record  # few programs have a report
        from shardir.reports.measured import read_trace
        from shardir.reports.page import write_page

        title = Path(self.title).name
        record = program_record(
            self.source, self.input_module, self.passes, label=title,
            cluster=load(cluster) if cluster else None,
            trace=None if trace is None else read_trace(Path(trace)),
        )  # fmt: skip
        write_page(Path(path), ReportRecord(title, [record]))
        return Path(path)

    def __repr__(self) -> str:
        return str(self.summary())

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return self.summary().html()

    def summary(self) -> Summary:
        """Return the table that `repr` shows."""
        n = self._devices
        return Summary(f"{self.title} on {n} device{'s' * (n != 1)}", self._rows)

    @property
    def title(self) -> str:
        """The name of what is compiled."""
        return self.source.name

    @cached_property
    def _devices(self) -> int:
        return max((mesh.size for _, mesh in functions(self.module)), default=1)

    @cached_property
    def _rows(self) -> list[tuple[str, str]]:
        costs = [c for c in report(self.module) if is_public(self.module, c.name)]
        return [*rows_of(self.original, self.module, self.passes, costs)]

    @check_arguments("explain")
    def explain(self, *names: str) -> str:
        """Explain why values have their layouts, and what other layouts would cost. The passes run
        again.

        Args:
            names: the names of values or parameters, or the paths of modules, which stand for all
                their values. By default all values.

        Raises:
            ShardirError: no value with a layout has a name.
        """
        explanation = Explanation(names)
        module, paragraphs = copied(self.input_module), list[str]()

        def work() -> None:
            for p in self.passes:
                if p.name == pipelines.LOWERING:
                    paragraphs.extend(explanation.made(module))
                if p.name == pipelines.PROPAGATION:
                    paragraphs.extend(explanation.propagate(module))
                p.apply(self.context, module)
            paragraphs.extend(explanation.made(module))

        run_located(self.source, work)
        explanation.check()
        return "\n".join(paragraphs)
