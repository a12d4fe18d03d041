"""`shard-opt`: reads a program, runs passes over it, and prints it or emits Python.

    shard-opt input.ir --pass-pipeline "propagate-strategies,insert-redistributions"
    shard-opt input.ir -p train -t torch -o out/

It is xDSL's driver with our parser, and reports every error at its location. Exit codes: 0, 1 for
errors of the input, 2 for a wrong command line or output that cannot be written, 70 for an internal
error; commands.py has the codes of signals.
"""

import dataclasses
import gc
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Attribute
from xdsl.passes import ModulePass
from xdsl.utils.exceptions import DiagnosticException
from xdsl.utils.target import Target

from shardir import pipelines
from shardir.algebra.garbage import no_gc
from shardir.diagnostics import (
    Diagnostic,
    Failure,
    ParseErrors,
    ShardirError,
    did_you_mean,
    print_error,
    progress_shown,
    report_progress,
)
from shardir.dialects.installed import installed
from shardir.rewriting.copying import copied
from shardir.rewriting.options import UsageError, instantiate, parse_options
from shardir.syntax.parser import default_parser
from shardir.syntax.printer import print_module
from shardir.syntax.source import Source, collect_remarks, collect_warnings
from shardir.syntax.verify import verify_all
from shardir.syntax.xdsl_parser import parse_by_xdsl
from shardir.tools import opt_files as files
from shardir.tools.arguments import import_modules
from shardir.tools.commands import command
from shardir.tools.expected import compare
from shardir.tools.internal import BUG, InternalError, guard
from shardir.tools.opt_arguments import OptArguments
from shardir.tools.opt_reports import PassTimes, Reports, cluster_of

if TYPE_CHECKING:  # imported late: most runs only print the program
    from shardir.backend.interface import Origin

OF_STABLEHLO = re.compile(r"\b(stablehlo|chlo|sdy|mhlo)\.\w")
"""A name of StableHLO or Shardy in a text."""

ONE_PROGRAM = ("save_strategies", "cost_graph", "trace", "format")
"""Options that write one text, for one program."""


class Driver(OptArguments):
    """One run of `shard-opt`, from its arguments to its output."""

    source: Source | None = None
    """The current program."""
    done = 0
    """The number of completed passes over it."""

    def main(self) -> int:
        """Run, and return the exit code. Errors go to stderr."""
        if self.args.list_passes:
            from shardir.tools.listing import describe

            print(describe(self.available_passes))
            return 0
        if self.args.show_dialects:
            print("\n".join(sorted(installed().tables["dialects"])))
            return 0
        import_modules(self.args.imports)
        text = pipelines.pipeline_of(self.args.passes, self.args.mode, "")
        self.passes = pipelines.with_files(
            pipelines.with_plan(pipelines.build(text), self.args.plan),
            self.args.save_strategies,
            self.args.cost_graph,
        )
        if self.args.dump_pass_pipeline:
            print(pipelines.text_of(self.passes), file=sys.stderr)
        name, text = files.read_input(self.args.input_file)
        if self.args.run_reproducer:
            from shardir.api.reproducer import read_reproducer

            self.passes, self.args.target = read_reproducer(text, name)
        if self.args.compare is not None:
            files.write_output(self.args.output_file, self.compared(Source(text, name)))
            return 0
        for option in ("meshes", "by_layer", "report"):
            if getattr(self.args, option):
                hint = "; shard-report writes the page of one plan" if option == "report" else ""
                flag = f"--{option.replace('_', '-')}"
                raise UsageError(f"{flag}: expected --compare, got none{hint}")
        for when in ("before", "after"):
            self.check_names(f"--print-ir-{when}", getattr(self.args, f"print_ir_{when}"))
        self.check_format()
        self.target = self.make_target()
        self.internal = guard(self.args.traceback)
        self.times = PassTimes()
        self.reports = Reports(self.args, self.internal)
        if self.args.disable_verify:
            Attribute.__post_init__ = lambda self: None
        chunks = files.split_chunks(text) if self.args.split_input_file else [text]
        for option in ONE_PROGRAM:
            if len(chunks) > 1 and getattr(self.args, option) is not None:
                dashed = f"--{option.replace('_', '-')}"
                raise UsageError(f"{dashed} is for one program; {name} has {len(chunks)}")
        outputs: list[str] = []
        failed = False
        for chunk in chunks:
            output, diagnostics = self.process(Source(chunk, name))
            failed |= self.has_failed(name, chunk, diagnostics)
            if output is not None:
                outputs.append(output)
        if self.args.time_passes:
            self.times.show()
        printed = f"{files.SEPARATOR}\n".join(outputs)
        if not failed:
            self.reports.check_names()
            if not (self.args.output_file and hasattr(self.target, "emit_directory")):
                files.write_output(self.args.output_file, printed)
        elif not self.args.output_file:
            sys.stdout.write(printed)
        return int(failed)

    def check_names(self, option: str, names: str) -> None:
        """Raise UsageError if an option names passes that do not run."""
        running = [p.name for p in self.passes]
        for name in filter(None, names.split(",")):
            if name not in running:
                hint = did_you_mean(name, running) or f"; there are {', '.join(running) or 'none'}"
                raise UsageError(f"{option}: expected a pass that runs, got {name}{hint}")

    def check_format(self) -> None:
        """Raise UsageError if there is no cost whose format is to be chosen."""
        if (form := self.args.format) is None:
            return
        if self.args.cost is None:
            raise UsageError(f"--format {form}: expected --cost or --compare, got neither")
        if form != "table" and self.args.target != "mlir":
            raise UsageError(
                f"--format {form}: expected no -t, since the cost is printed in place of the "
                f"program, got {self.args.target}; drop one"
            )

    def compared(self, source: Source) -> str:
        """Return the table of `--compare`."""
        from shardir.reports import comparison

        if self.passes:
            raise UsageError("--compare: expected no passes, which plans have, got some; drop -p")
        cluster = cluster_of(self.args.cost)
        given = self.args.meshes
        if given is None and cluster is None:
            raise UsageError("--compare: expected --meshes or --cost=CLUSTER, got neither")
        if given is None or given.strip().isdecimal():
            devices = int(given) if given is not None else cluster.units[-1] if cluster else 1
            meshes = comparison.meshes_of(devices, cluster)
        else:
            meshes = [comparison.mesh_of(text) for text in given.split(";") if text.strip()]
        entries = [comparison.entry(x) for x in self.args.compare.split(";") if x.strip()]
        module = default_parser().parse_source(source)
        with progress_shown("comparing"):
            found = comparison.compare_plans(
                module, entries, meshes, cluster, recorded=self.args.report is not None
            )
        if self.args.report is not None:
            from shardir.reports.page import write_page

            title = "standard input" if source.name == "<stdin>" else Path(source.name).name
            write_page(self.args.report, found.report(title))
        forms = {"json": found.json, "csv": found.csv, "table": found.__str__}
        text = forms[self.args.format or "table"]().rstrip() + "\n"
        return f"{text}\n{found.by_layer()}\n" if self.args.by_layer else text

    def has_failed(self, name: str, text: str, diagnostics: Sequence[Diagnostic]) -> bool:
        """Print the diagnostics of a program, or their differences from the expected ones; return
        whether there are errors or differences."""
        if self.args.verify_diagnostics:
            lines: Sequence[object] = compare(name, text, diagnostics)
            failed = bool(lines)
        else:
            lines, failed = diagnostics, any(d.severity == "error" for d in diagnostics)
        for line in lines:
            if isinstance(line, Diagnostic):
                line.show()
            else:
                print(line, file=sys.stderr)
        return failed

    def process(self, source: Source) -> tuple[str | None, list[Diagnostic]]:
        """Return the output of a program, or None if it has an error, and its diagnostics."""
        with collect_warnings() as warnings, progress_shown(f"compiling {source.name}"):
            try:
                output = self.compile(source)
                errors: list[Diagnostic] = []
            except ParseErrors as e:
                output, errors = None, e.errors
            except Failure as e:
                output, errors = None, e.diagnostics(source)
            except (ShardirError, DiagnosticException) as e:
                if isinstance(e, UsageError):
                    raise
                message = str(e).split("\n")[0] if isinstance(e, DiagnosticException) else str(e)
                output, errors = None, [Diagnostic(message, source.name)]
        reported = [
            dataclasses.replace(source.at_op(op, message), severity="warning")
            for op, message in warnings
        ]
        return output, reported + errors

    def reproducer(self, error: str) -> Path | None:
        """Write the program before the failing pass to a file; return its path, or None if that
        fails."""
        from shardir.api.reproducer import write_reproducer

        source = self.source
        if source is None:
            return None
        target = "torch" if self.args.target == "torch" else "mlir"
        make = partial(self.parse, source)
        return write_reproducer(error, make, source.text, self.passes, self.done, self.ctx, target)

    def compile(self, source: Source) -> str:
        self.source, self.done = source, 0
        with self.internal("the parser"):
            module = self.times.measure("parse", lambda: self.parse(source))
        self.verify(module, source)
        is_emitted = hasattr(self.target, "emit_directory") and self.args.output_file
        original = copied(module) if is_emitted else None
        self.input_module = original
        planned = pipelines.planned(self.passes) if self.args.print_plan else None
        for i, p in enumerate(self.passes):
            if p.name == pipelines.LOWERING:
                self.reports.layouts(module)
            self.dump("Before", p, module, self.args.print_ir_before_all, self.args.print_ir_before)
            with collect_remarks() as remarks:
                self.apply(p, module)
            self.done = i + 1
            if i == planned:
                from shardir.rewriting.annotated_plan import annotated_plan

                plan = annotated_plan(module)
                return str(dataclasses.replace(plan, comments=tuple(remarks)))
            if original is not None and pipelines.runs_on_one_device(p):
                original = copied(module)
            last = i == len(self.passes) - 1
            if self.args.verify_each or last:
                self.verify(module, source, p.name)
            self.dump("After", p, module, self.args.print_ir_after_all, self.args.print_ir_after)
            if self.args.print_between_passes and not last:
                print(f"IR after {p.name}:\n{self.text_of(module)}\n")
        self.reports.layouts(module)
        costs = self.reports.cost(module)
        self.reports.write_trace(module)
        if costs is not None:
            return costs
        if self.args.verify_roundtrip:
            self.verify_roundtrip(module, source)
        return self.times.measure("print", lambda: self.emit(module, original))

    def dump(self, when: str, p: ModulePass, module: ModuleOp, all: bool, names: str) -> None:
        """Print the module to stderr, for all passes or the named ones."""
        if all or p.name in names.split(","):
            print(f"// -----// IR Dump {when} {p} //----- //", file=sys.stderr)
            print(self.text_of(module), file=sys.stderr)

    def verify_roundtrip(self, module: ModuleOp, source: Source) -> None:
        """Raise Failure unless the printed module is parsed to one that is printed alike."""
        text = self.text_of(module)
        printed = Source(text, f"{source.name} as printed")
        again = self.text_of(self.parse(printed, is_printed=True))
        pairs = zip_longest(text.splitlines(), again.splitlines(), fillvalue="")
        for number, (line, other) in enumerate(pairs, 1):
            if line != other:
                raise Failure(
                    f"--verify-roundtrip: expected line {number} as it was printed, {line.strip()}"
                    f", got {other.strip()}"
                )

    def parse(self, source: Source, *, is_printed: bool = False) -> ModuleOp:
        """Return the module of a source: of the input, or of a module that was printed."""
        if not is_printed and is_stablehlo(self.args.frontend, source):
            from shardir.api.stablehlo import import_text

            self.ctx = default_parser().ctx
            return import_text(source.text, source.name)
        allow_unregistered = self.args.allow_unregistered_dialect
        if self.args.frontend == "xdsl":
            self.ctx = default_parser(allow_unregistered=allow_unregistered).ctx
            return parse_by_xdsl(self.ctx, source, implicit_module=not self.args.no_implicit_module)
        parser = default_parser(allow_unregistered=allow_unregistered)
        self.ctx = parser.ctx
        return parser.parse_source(source)

    def verify(self, module: ModuleOp, source: Source, after: str | None = None) -> None:
        if self.args.disable_verify:
            return
        with self.internal("the verifier"):
            errors = self.times.measure("verify", lambda: verify_all(module, source))
        if errors:
            note = () if after is None else (f"found after pass {after}",)
            raise ParseErrors([dataclasses.replace(f, notes=(*f.notes, *note)) for f in errors])

    def apply(self, p: ModulePass, module: ModuleOp) -> None:
        before = copied(module) if self.args.check_equivalence else None
        report_progress(p.name)
        with self.internal(f"pass {p.name}"):
            if p.name == pipelines.PROPAGATION:
                self.reports.propagation(module)
            self.times.measure(p.name, lambda: p.apply(self.ctx, module))
        if before is not None:
            from shardir.interpret.equivalence import check_pass

            with self.internal(f"the check of pass {p.name}"):
                self.times.measure("check-equivalence", lambda: check_pass(before, module, p.name))

    def make_target(self) -> Target | Callable[..., None] | None:
        """Return the target; None prints the module."""
        target: Any = self._named_target()
        if not self.args.arena:
            return target
        if not hasattr(target, "arena"):
            raise UsageError(f"--arena: expected the target torch, got {self.args.target}")
        return dataclasses.replace(target, arena=True)

    def _named_target(self) -> Target | Callable[..., None] | None:
        spec = parse_options(self.args.target, "target")
        if spec.name == "mlir" and not spec.parameters:
            return None
        if spec.name not in self.available_targets:
            hint = did_you_mean(spec.name, self.available_targets)
            known = ", ".join(self.available_targets)
            raise UsageError(f"there is no target {spec.name}{hint or f'; use one of {known}'}")
        entry: Any = self.available_targets[spec.name]
        if inspect.signature(entry).parameters:
            return entry
        try:
            cls = entry()
        except ImportError as e:
            raise UsageError(f"target {spec.name} needs a package: {e}; install it") from None
        return instantiate("target", cls, spec)

    def text_of(self, module: ModuleOp) -> str:
        return print_module(
            module, generic=self.args.print_op_generic, aliases=not self.args.no_aliases,
            locations=self.args.print_debuginfo, short_types=self.args.short_types,
            properties_as_attributes=self.args.print_no_properties,
        )  # fmt: skip

    def prepare(self, module: ModuleOp) -> "dict[str, Origin]":
        """Prepare a module for emission by our backends. Return the origin that they save with the
        program, by its keyword."""
        from shardir.backend.interface import Backend, Origin

        if not isinstance(self.target, Backend):
            return {}
        self.target.prepare(module)
        if self.input_module is None:
            return {}
        # Frees the ops that loops have replaced, before the program of one device is made. All are
        # in the youngest generation: there was no collection since the module was parsed.
        gc.collect(0)
        return {"origin": Origin.of(self.input_module, self.passes)}

    def emit(self, module: ModuleOp, original: ModuleOp | None) -> str:
        """Return the text of the output. If it is a directory, write it and return an empty
        text."""
        target: Any = self.target
        if target is None:
            return self.text_of(module)
        if original is not None:
            with self.internal(f"target {target.name}"):
                target.emit_directory(
                    self.ctx, module, original, Path(self.args.output_file), **self.prepare(module)
                )
            return ""
        out = StringIO()
        with self.internal(f"target {self.args.target}"):
            self.prepare(module)
            if isinstance(target, Target):
                target.emit(self.ctx, module, out)
            else:
                target(module, out)
        return out.getvalue()


def is_stablehlo(frontend: str, source: Source) -> bool:
    """Whether a program is to be imported, also a file of MLIR with ops or attributes of StableHLO,
    Shardy or XLA: it would lose its shardings if it was read as ops that are unknown."""
    if frontend in ("stablehlo", "xdsl"):
        return frontend == "stablehlo"
    return source.name.endswith(".mlir") and OF_STABLEHLO.search(source.text) is not None


def main(args: Sequence[str] | None = None) -> int:
    """Run `shard-opt`, and return its exit code."""
    checked = Attribute.__post_init__  # --disable-verify replaces it for the process
    driver = None
    try:
        with no_gc():
            driver = Driver(args)
            return driver.main()
    except ShardirError as e:
        print_error(str(e), "shard-opt")
        return 2
    except InternalError as e:
        path = None if driver is None else driver.reproducer(str(e))
        file = "the input" if path is None else f"{path}, which --run-reproducer runs"
        print(f"shard-opt: internal error in {e}\n{BUG.format(file)}", file=sys.stderr)
        return 70
    finally:
        Attribute.__post_init__ = checked


if __name__ == "__main__":
    sys.exit(command("opt"))
