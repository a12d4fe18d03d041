"""`shard-opt`: reads a program, runs passes over it, prints it or emits what runs.

    shard-opt input.ir --pass-pipeline "propagate-strategies,insert-redistributions"
    shard-opt input.ir -p train -t torch -o out/

It is xDSL's driver with our frontend, and with every error shown at its place. Exit codes: 0, 1 for
errors of the input, 2 for a wrong command line, 70 for an error of the compiler itself.
"""

import argparse
import contextlib
import dataclasses
import inspect
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xdsl.context import Context
from xdsl.dialects.builtin import Builtin, ModuleOp
from xdsl.dialects.func import Func
from xdsl.ir import Attribute
from xdsl.parser import Parser
from xdsl.passes import ModulePass
from xdsl.universe import Universe
from xdsl.utils.exceptions import DiagnosticException, ParseError
from xdsl.utils.target import Target
from xdsl.xdsl_opt_main import _empty_post_init, xDSLOptMain

from shardir import pipelines
from shardir.algebra.cluster import Cluster
from shardir.diagnostics import Diagnostic, Failure, ParseErrors, ShardirError, did_you_mean
from shardir.rewriting.options import UsageError, made_from, parse_options
from shardir.syntax.files import write_text
from shardir.syntax.parser import IRParser, no_gc
from shardir.syntax.printer import print_module
from shardir.syntax.source import Source, collect_warnings
from shardir.syntax.verify import verify_all
from shardir.tools.arguments import import_modules
from shardir.tools.expected import compare
from shardir.tools.progress import progress_shown

if TYPE_CHECKING:
    from shardir.tools.explain_layouts import Explanation

SEPARATOR = "// -----"
BUG = (
    "this is a bug of shardir, not an error of the input; please report it with the input "
    "(--traceback shows where)"
)


class InternalError(Exception):
    """Something of ours raised what it should not have."""


class Driver(xDSLOptMain):
    """Dialects, passes and targets come from the installed universes, ours included."""

    def __init__(self, args: Sequence[str] | None = None):
        self.available_frontends = {}
        self.available_passes = {}
        self.available_targets = {}
        self.ctx = Context()
        self.register_all_frontends()
        self.register_all_passes()
        self.register_all_targets()
        parser = argparse.ArgumentParser(
            "shard-opt", description="Runs passes over a sharding program.", allow_abbrev=False
        )
        self.register_all_arguments(parser)
        given = sys.argv[1:] if args is None else args
        # --cost or --explain alone is not to take the file behind it for a cluster or names
        alone = ("--cost", "--explain")
        self.args = parser.parse_args([f"{a}=" if a in alone else a for a in given])
        self.timing: list[tuple[str, float]] = []

    # ---- the command line ----
    def register_all_frontends(self) -> None:
        self.available_frontends = {"ir": ours, "mlir": ours, "xdsl": ours}

    def register_all_passes(self) -> None:
        self.available_passes.update(multiverse().all_passes)

    def register_all_targets(self) -> None:
        self.available_targets.update(multiverse().all_targets)

    def register_all_arguments(self, arg_parser: argparse.ArgumentParser) -> None:
        super().register_all_arguments(arg_parser)
        for action in arg_parser._actions:
            if action.dest == "frontend":
                action.help = "ir (and mlir): shardir's parser, the default; xdsl: xDSL's own"
            elif action.dest == "passes":
                action.help = "the passes to run: a,b{x=1 y=2}; a pipeline's name stands for its"
                action.default = None
            elif action.dest == "target":
                action.help = "what to emit: mlir (the default), torch, ..."
            elif action.dest == "output_file":
                action.help = "where to: a file, or a directory for -t torch"
            elif action.dest == "verify_diagnostics":
                action.help = "check the errors against // expected-error {{...}} in the input"
            elif action.dest == "time_passes":
                action.help = "how long each pass took, to stderr"
        add = arg_parser.add_argument
        add("--pass-pipeline", dest="passes", help="the same; builtin.module(...) is allowed too")
        add(
            "--mode",
            help="who decides on layouts, instead of a pipeline: stand_alone, data, hybrid, "
            "semi_auto, auto, manual (--list-passes says what each does)",
        )
        add(
            "--save-strategies",
            metavar="F",
            help="write the strategies and layouts that are decided on to a file",
        )
        add(
            "--load-strategies",
            metavar="F",
            help="take them from that file, instead of deciding again",
        )
        add(
            "--cost-graph",
            metavar="F",
            help="write what search-strategies chooses from, and by which costs, to a .json file, "
            "or draw it in a .dot or .svg one",
        )
        add("--verify-each", action="store_true", help="verify after every pass, not just the last")
        add(
            "--check-equivalence",
            action="store_true",
            help="run the program before and after each pass on random inputs, and compare",
        )
        add("--print-ir-after-all", action="store_true", help="the IR after each pass, to stderr")
        add(
            "--explain-redistributions",
            action="store_true",
            help="for which edge each redistribution is, its plan and its bytes, to stderr",
        )
        add(
            "--cost",
            metavar="[=CLUSTER]",
            help="what the program costs on the mesh's cluster, or on a ready-made one or one in a "
            "file, by op, to stderr (docs/cost.md)",
        )
        add(
            "--explain",
            metavar="[=%NAME,...]",
            help="for these values, or for all: why each has its layout, by which ops it came, and "
            "what it costs against what else was proposed, to stderr",
        )
        add(
            "--import",
            dest="imports",
            action="append",
            default=[],
            metavar="MODULE",
            help="a Python module that registers custom ops (shardir.register_custom_op)",
        )
        add("--list-passes", action="store_true", help="the passes and their options")
        add("--no-aliases", action="store_true", help="print layouts in full, not as #layoutN")
        add("--traceback", action="store_true", help="the Python trace of an internal error")

    # ---- the run ----
    def main(self) -> int:
        """The exit code; errors go to stderr."""
        if self.args.list_passes:
            from shardir.tools.listing import describe

            print(describe(pipelines.PASSES))
            return 0
        import_modules(self.args.imports)
        text = pipelines.pipeline_of(self.args.passes, self.args.mode, "")
        self.passes = pipelines.with_strategies(
            pipelines.build(text, self.available_passes),
            self.args.load_strategies,
            self.args.save_strategies,
            self.args.cost_graph,
        )
        self.target = self.make_target()
        self.cluster = self.load_cluster()
        if self.args.disable_verify:
            Attribute.__post_init__ = _empty_post_init
        self.name, source = self.read_input()
        chunks = split_chunks(source) if self.args.split_input_file else [source]
        for option in ("save_strategies", "load_strategies", "cost_graph"):
            if len(chunks) > 1 and getattr(self.args, option) is not None:
                dashed = f"--{option.replace('_', '-')}"
                raise UsageError(f"{dashed} is for one program; {self.name} has {len(chunks)}")
        self.explanation = self.make_explanation()
        outputs: list[str] = []
        failed = False
        for chunk in chunks:
            output, errors = self.process(Source(chunk, self.name))
            if self.args.verify_diagnostics:
                for line in compare(self.name, chunk, errors):
                    print(line, file=sys.stderr)
                    failed = True
            else:
                for error in errors:
                    print(error, file=sys.stderr)
                failed |= any(f.severity == "error" for f in errors)
            if output is not None:
                outputs.append(output)
        if self.args.time_passes:
            self.print_times()
        if self.explanation is not None and self.explanation.unknown and not failed:
            names = ", ".join(f"%{n}" for n in sorted(self.explanation.unknown))
            raise UsageError(f"--explain: no value {names} was given a layout")
        if not failed:
            self.write(f"{SEPARATOR}\n".join(outputs))
        elif not self.args.output_file:
            sys.stdout.write(f"{SEPARATOR}\n".join(outputs))
        return int(failed)

    def process(self, source: Source) -> tuple[str | None, list[Diagnostic]]:
        """One program: what is printed of it, and the errors that it has."""
        with collect_warnings() as warnings, progress_shown():
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
        said = [
            dataclasses.replace(source.at_op(op, message), severity="warning")
            for op, message in warnings
        ]
        return output, said + errors

    def compile(self, source: Source) -> str:
        with self.internal("the parser"):
            module = self.timed("parse", lambda: self.parse(source))
        self.verify(module, source)
        target = self.target
        original = module.clone() if hasattr(target, "emit_directory") else None
        for i, p in enumerate(self.passes):
            if p.name == pipelines.LOWERING:
                self.explain(module)
                self.explain_made(module)
            self.apply(p, module, source)
            if original is not None and pipelines.runs_on_one_device(p):
                original = module.clone()
            last = i == len(self.passes) - 1
            if self.args.verify_each or last:
                self.verify(module, source, p.name)
            if self.args.print_ir_after_all:
                print(f"// -----// IR Dump After {p} //----- //", file=sys.stderr)
                print(self.text_of(module), file=sys.stderr)
            if self.args.print_between_passes and not last:
                print(f"IR after {p.name}:\n{self.text_of(module)}\n")
        self.explain(module)
        self.explain_made(module)
        self.cost(module)
        return self.timed("print", lambda: self.emit(module, original))

    def parse(self, source: Source) -> ModuleOp:
        parser = shared_parser(self.args.allow_unregistered_dialect)
        self.ctx = parser.ctx
        if self.args.frontend != "xdsl":
            return parser.parse_source(source)
        try:
            return Parser(parser.ctx, source.text, source.name).parse_module(
                not self.args.no_implicit_module
            )
        except ParseError as e:
            raise ParseErrors([source.at(e.span.start, e.span.end, e.msg)]) from None

    def verify(self, module: ModuleOp, source: Source, after: str | None = None) -> None:
        if self.args.disable_verify:
            return
        with self.internal("the verifier"):
            errors = self.timed("verify", lambda: verify_all(module, source))
        if errors:
            note = () if after is None else (f"found after pass {after}",)
            raise ParseErrors([dataclasses.replace(f, notes=(*f.notes, *note)) for f in errors])

    def apply(self, p: ModulePass, module: ModuleOp, source: Source) -> None:
        before = module.clone() if self.args.check_equivalence else None
        with self.internal(f"pass {p.name}"):
            if self.explanation is not None and p.name == pipelines.PROPAGATION:
                self.say(self.explanation.propagate(module))
            self.timed(p.name, lambda: p.apply(self.ctx, module))
        if before is not None:
            from shardir.interpret.equivalence import check_pass

            with self.internal(f"the check of pass {p.name}"):
                self.timed("check-equivalence", lambda: check_pass(before, module, p.name))

    def explain(self, module: ModuleOp) -> None:
        """The redistributions that stand in the module: before they are lowered, and at the end."""
        if self.args.explain_redistributions:
            from shardir.tools.explain import explain

            with self.internal("the explanation of redistributions"):
                self.say(explain(module))

    def make_explanation(self) -> "Explanation | None":
        if self.args.explain is None:
            return None
        from shardir.tools.explain_layouts import Explanation

        return Explanation(self.args.explain)

    def explain_made(self, module: ModuleOp) -> None:
        """The layouts of values that passes made since propagate-strategies."""
        if self.explanation is not None:
            with self.internal("the explanation of layouts"):
                self.say(self.explanation.made(module))

    def cost(self, module: ModuleOp) -> None:
        """What the functions cost: those in the global view by the relative model."""
        if self.args.cost is not None:
            from shardir.cost import relative, report

            with self.internal("the report of costs"):
                costs = (*relative(module, self.cluster), *report(module, self.cluster))
                self.say(map(str, costs))

    def say(self, paragraphs: Iterable[str]) -> None:
        for paragraph in paragraphs:
            print(paragraph, file=sys.stderr)

    @contextlib.contextmanager
    def internal(self, what: str) -> Iterator[None]:
        """What is no error of the user becomes one line."""
        try:
            yield
        except (ShardirError, DiagnosticException):
            raise
        except RecursionError:
            raise InternalError(f"{what}: the program nests too deeply") from None
        except Exception as e:
            if self.args.traceback:
                traceback.print_exc()
            first = str(e).split("\n")[0]
            notes = "".join(f" ({n})" for n in getattr(e, "__notes__", ()) if "\n" not in n)
            raise InternalError(f"{what}: {type(e).__name__}: {first}{notes}") from e

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return work()
        finally:
            self.timing.append((name, time.perf_counter() - start))

    def print_times(self) -> None:
        total = sum(s for _, s in self.timing) or 1.0
        width = max(len(n) for n, _ in self.timing) if self.timing else 0
        lines = [f"{'pass':<{width}}  {'seconds':>9}  share"]
        lines += [f"{n:<{width}}  {s:9.4f}  {s / total:5.1%}" for n, s in self.timing]
        lines.append(f"{'total':<{width}}  {total:9.4f}")
        print("\n".join(lines), file=sys.stderr)

    # ---- input and output ----
    def read_input(self) -> tuple[str, str]:
        name = self.args.input_file
        if name in (None, "-"):
            name, data = "<stdin>", sys.stdin.buffer.read()
        else:
            try:
                data = Path(name).read_bytes()
            except IsADirectoryError:
                raise UsageError(f"{name} is a directory, not a program") from None
            except (OSError, ValueError) as e:
                raise UsageError(f"cannot read {name}: {why(e)}") from None
        try:
            return name, data.decode()
        except UnicodeDecodeError as e:
            line = data.count(b"\n", 0, e.start) + 1
            raise UsageError(
                f"{name}:{line}: this is not UTF-8 text (byte 0x{data[e.start]:02x})"
            ) from None

    def load_cluster(self) -> Cluster | None:
        """The cluster of --cost; None where none is named."""
        if not self.args.cost:
            return None
        from shardir.cost.clusters import load

        try:
            return load(self.args.cost)
        except ShardirError as e:
            raise UsageError(f"--cost: {e}") from None

    def make_target(self) -> Target | Callable[..., None] | None:
        """The target, or None for printing the module."""
        spec = parse_options(self.args.target, "target")
        if spec.name == "mlir" and not spec.parameters and not self.args.syntax_highlight:
            return None
        if spec.name not in self.available_targets:
            hint = did_you_mean(spec.name, self.available_targets)
            known = ", ".join(self.available_targets)
            raise UsageError(f"there is no target {spec.name}{hint or f'; there are {known}'}")
        entry: Any = self.available_targets[spec.name]
        if inspect.signature(entry).parameters:
            return entry
        try:
            cls = entry()
        except ImportError as e:
            raise UsageError(f"target {spec.name} needs what is not installed: {e}") from None
        return made_from("target", cls, spec)

    def text_of(self, module: ModuleOp) -> str:
        return print_module(
            module, generic=self.args.print_op_generic, aliases=not self.args.no_aliases,
            locations=self.args.print_debuginfo,
            properties_as_attributes=self.args.print_no_properties,
        )  # fmt: skip

    def emit(self, module: ModuleOp, original: ModuleOp | None) -> str:
        target: Any = self.target
        if target is None:
            return self.text_of(module)
        if original is not None and self.args.output_file:
            with self.internal(f"target {target.name}"):
                self.emit_directory(target, module, original, Path(self.args.output_file))
            return ""
        out = StringIO()
        with self.internal(f"target {self.args.target}"):
            if isinstance(target, Target):
                target.emit(self.ctx, module, out)
            else:
                target(module, out)
        return out.getvalue()

    def emit_directory(self, target: Any, module: ModuleOp, original: ModuleOp, out: Path) -> None:
        """Written beside its place and moved there, so that an error leaves nothing half done."""
        if out.exists() and not out.is_dir():
            raise UsageError(f"{out} is a file; -t {target.name} writes a directory")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        except OSError as e:
            raise UsageError(f"cannot write {out}: {why(e)}") from None
        try:
            fresh.chmod(0o755)
            target.emit_directory(self.ctx, module, original, fresh)
            try:
                move_into(fresh, out)
            except OSError as e:
                raise UsageError(f"cannot write {out}: {why(e)}") from None
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def write(self, text: str) -> None:
        name = self.args.output_file
        if name in (None, "-"):
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        if hasattr(self.target, "emit_directory"):
            return
        path = Path(name)
        if path.is_dir():
            raise UsageError(f"{name} is a directory; -o wants a file here")
        try:
            write_text(path, text)
        except ShardirError as e:
            raise UsageError(str(e)) from None


def why(e: Exception) -> str:
    return (e.strerror if isinstance(e, OSError) else None) or str(e)


def move_into(fresh: Path, out: Path) -> None:
    if not out.exists():
        os.replace(fresh, out)
        return
    for path in sorted(fresh.rglob("*")):
        place = out / path.relative_to(fresh)
        if path.is_dir():
            place.mkdir(exist_ok=True)
        else:
            os.replace(path, place)


def split_chunks(text: str) -> list[str]:
    """The programs between `// -----` lines, each at its own line numbers."""
    chunks: list[list[str]] = [[]]
    for number, line in enumerate(text.split("\n")):
        if line.strip() == SEPARATOR:
            chunks.append([""] * (number + 1))
        else:
            chunks[-1].append(line)
    return ["\n".join(lines) for lines in chunks]


def ours(_: Any) -> ModuleOp:
    raise NotImplementedError  # Driver.parse reads; the table only names what there is


@cache
def multiverse() -> Universe:
    return Universe.get_multiverse()


@cache
def shared_parser(allow_unregistered: bool = False) -> IRParser:
    """One grammar a process: tests call `main` hundreds of times."""
    from shardir.dialects import DIALECTS

    ctx = Context(allow_unregistered=allow_unregistered)
    for name, make in multiverse().all_dialects.items():
        ctx.register_dialect(name, make)
    for name in ("builtin", "func", *DIALECTS):
        ctx.get_dialect(name) if name in ctx.registered_dialect_names else None
    return IRParser([Builtin, Func, *(make() for make in DIALECTS.values())], ctx)


def main(args: Sequence[str] | None = None) -> int:
    """The exit code of `shard-opt`."""
    checked = Attribute.__post_init__  # --disable-verify replaces it for the whole process
    try:
        with no_gc():
            return Driver(args).main()
    except UsageError as e:
        print(f"shard-opt: error: {e}", file=sys.stderr)
        return 2
    except InternalError as e:
        print(f"shard-opt: internal error in {e}\n{BUG}", file=sys.stderr)
        return 70
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    finally:
        Attribute.__post_init__ = checked


if __name__ == "__main__":
    sys.exit(main())
