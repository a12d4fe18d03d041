"""shard-run: run a compiled directory, or compile an .ir file and run it.

A process starts to import torch for the ranks (forks.py), while this one imports the compiler and
compiles.
"""

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from shardir.backend.runs import LaunchError, OnTrace, Options, Report
from shardir.backend.torch.launch.forks import forks
from shardir.diagnostics import ParseErrors, ShardirError, print_error, progress_shown
from shardir.syntax.files import read_text, scratch_folder
from shardir.tools.arguments import ToolParser, import_modules, output_file, size
from shardir.tools.commands import command
from shardir.tools.machines import add_to, on_machines


class InternalLaunchError(LaunchError):
    """An unexpected exception of the compiler, which is not an error of the input."""

    exit_code = 70


def program_words() -> list[str]:
    """Return the words that start shard-run on a machine with the same installation path."""
    program = os.path.abspath(sys.argv[0])
    if os.path.basename(program) == "shard-run":
        return [program]
    return [sys.executable, "-m", "shardir.tools.run"]


def main(arguments: list[str] | None = None) -> int:
    """Run a program. Exit codes: 0 success; 1 a rank failed, --check disagreed or the last loss is
    not finite; 2 the program did not start."""
    parsed = parser()
    options = parsed.parse_args(arguments)
    try:
        if (code := on_machines(program_words(), parsed, options)) is not None:
            return code
        with ExitStack() as stack:
            directory = options.program
            is_source = _is_source(directory, options)
            run_options = Options.parsed(options)
            if options.export is None and not run_options.by_agent:
                stack.enter_context(forks(run_options))
            if is_source:
                import_modules(getattr(options, "import"))
                folder = stack.enter_context(scratch_folder())
                directory = _compile(directory, options, folder)
            return _run(directory, options, run_options)
    except LaunchError as error:
        print_error(str(error))
        return error.exit_code
    except ParseErrors as error:
        error.show()
        return 2
    except ShardirError as error:
        print_error(str(error))
        return 2
    except RecursionError:
        print_error("the program is nested too deeply")
        return 2


GROUPS = {
    "what runs": (
        "program", "steps", "check", "backend", "device", "nproc", "seed", "threads", "compile",
        "timeout",
    ),
    "data and weights": ("data", "last", "weights", "broadcast"),
    "checkpoints": (
        "checkpoints", "save_every", "keep", "resume", "steps_done", "export", "max_shard_size",
    ),
    "looking": (
        "eval_every", "log", "tensorboard", "log_every", "dump", "trace", "trace_steps",
        "trace_cluster", "allow_nan", "detect_anomaly",
    ),
    "machines": ("nnodes", "node_rank", "rdzv", "max_restarts", "hosts", "start", "slurm"),
    "compiling an .ir file": (
        "mode", "plan", "pass_pipeline", "arena", "import", "save_strategies",
    ),
}  # fmt: skip
"""The arguments of shard-run by what they are for."""

EXAMPLES = """\
shard-run out --steps 100                        run a directory that shard-opt wrote
shard-run net.ir --plan "fsdp(dp)" --check       compile, run, compare with one device
shard-run out --data x,labels=train.npz --checkpoints ckpt --save-every 500 --resume ckpt
shard-run out --hosts a,b --start                the same on two machines, by ssh
"""


def parser() -> ToolParser:
    """Return the parser of shard-run's arguments."""
    parser = ToolParser(
        "shard-run", usage="[options] PROGRAM", groups=GROUPS, examples=EXAMPLES,
        description="Run a compiled directory, or compile an .ir file and run it.",
    )  # fmt: skip
    add = parser.add_argument
    add(
        "program", metavar="PROGRAM", type=Path,
        help="a directory that shard-opt wrote, or an .ir file",
    )  # fmt: skip
    add("--nproc", type=int, help="the number of ranks (the mesh's)")
    Options.add_to(parser)
    add_to(parser)
    add(
        "--export", type=output_file, metavar="FILE",
        help="write the weights of the checkpoint of --resume to a .safetensors file, and run "
        "nothing",
    )  # fmt: skip
    add(
        "--max-shard-size", type=size, metavar="SIZE",
        help="the maximum size of an exported file, such as 5GB; beyond it there are several files "
        "and an index",
    )  # fmt: skip
    add("-p", "--pass-pipeline", metavar="P", help="the passes to run (train)")
    add(
        "--mode", help="instead of passes: stand_alone, data, hybrid, semi_auto, "
        "auto or manual, with options such as auto{memory=16GB} (semi_auto)",
    )  # fmt: skip
    add("--plan", metavar="P", help="a plan, its file, or presets such as fsdp")
    add(
        "--save-strategies",
        metavar="F",
        help="write its strategies and layouts to F, as a plan",
    )
    add(
        "--arena", action="store_true",
        help="let its values have one block of memory, at planned offsets",
    )  # fmt: skip
    add(
        "--import", action="append", default=[], metavar="MODULE",
        help="a Python module that registers custom ops",
    )  # fmt: skip
    parser.arrange()
    return parser


def _is_source(path: Path, options: argparse.Namespace) -> bool:
    """Return whether the program is an .ir file to compile.

    Raises:
        LaunchError: the file does not exist; or a compiled directory has options of a compilation.
    """
    if not os.path.isdir(path):
        if path.suffix not in (".ir", ".mlir"):
            return False  # load_plan reports the error
        if not os.path.isfile(path):
            raise LaunchError(f"{path}: no such file")
        return True
    for name in ("mode", "pass_pipeline", "plan", "save_strategies", "import", "arena"):
        if getattr(options, name) not in (None, [], False):
            option = f"--{name.replace('_', '-')}"
            raise LaunchError(f"{path} is compiled already; {option} is for an .ir file")
    return False


def _compile(path: Path, options: argparse.Namespace, directory: Path) -> Path:
    """Compile an .ir file into a directory."""
    from shardir.api.compilation import compile_file
    from shardir.syntax.source import Source, collect_warnings

    with collect_warnings() as warnings, progress_shown(f"compiling {path}"):
        try:
            compile_file(
                path, options.pass_pipeline, mode=options.mode, plan=options.plan,
                save_strategies=options.save_strategies, arena=options.arena,
            ).save(directory)  # fmt: skip
        except (ShardirError, RecursionError):
            raise
        except Exception as error:
            raise InternalLaunchError(
                f"{path}: internal error: {type(error).__name__}: {error}; this is a bug of "
                "shardir: please report it with the input (shard-opt --traceback shows where)"
            ) from error
    source = Source(read_text(path) if warnings else "", str(path))
    for op, message in warnings:
        dataclasses.replace(source.at_op(op, message), severity="warning").show()
    return directory


def _run(directory: Path, arguments: argparse.Namespace, options: Options) -> int:
    from shardir.backend.torch.launch.export import export
    from shardir.backend.torch.launch.report import Progress, run_and_check, summary
    from shardir.backend.torch.launch.start import read_plan, run

    plan = read_plan(directory, arguments.nproc)
    if arguments.export is not None:
        if options.resume is None:
            raise LaunchError("--export: expected a checkpoint, got none; give --resume FOLDER")
        print(
            *export(directory, options.resume, arguments.export, arguments.max_shard_size), sep="\n"
        )
        return 0
    if arguments.max_shard_size is not None:
        raise LaunchError("--max-shard-size is for --export FILE")
    progress = Progress("", arguments.steps, options.log_every)
    differences, traced = [], []
    on_trace = None if options.trace is None else _on_trace(directory, options, traced)
    if arguments.check:
        report, differences = run_and_check(plan, options, progress, on_trace)
    else:
        with progress.shown():
            report = run(
                directory, options, on_event=progress, emit_resized=_emit_resized, on_trace=on_trace
            )
    print(*summary(report), *differences, *traced, sep="\n", flush=True)
    for line in not_finite(report):
        print_error(line, word="warning")
    return 0 if all(difference.agrees for difference in differences) else 1


def _emit_resized(directory: Path, ranks: int, of: int, out: Path) -> None:
    """Write the program of a directory for another number of ranks (`EmitResized`). Otherwise the
    run of a directory does not need the compiler."""
    from shardir.backend.torch.backend import TorchBackend

    TorchBackend().emit_resized(directory, ranks, of, out)


def _on_trace(directory: Path, options: Options, out: list[Any]) -> OnTrace:
    """Return the function that writes the trace of a run (`TorchBackend.on_trace`). Otherwise the
    run of a directory does not need the compiler."""
    from shardir.backend.torch.backend import TorchBackend

    return TorchBackend().on_trace(directory, options, out)


def not_finite(report: Report) -> Iterator[str]:
    """Yield a warning for each function with losses that are not finite. Only a run that allows
    them gets here."""
    for name, losses in report.losses.items():
        steps = [i for i, loss in enumerate(losses, 1) if not math.isfinite(loss)]
        if steps:
            yield f"{name}: {len(steps)} losses are not finite, the first in step {steps[0]}"


if __name__ == "__main__":
    sys.exit(command("run"))
