"""Runs of emitted directories: the plan is checked, and the ranks are started to their end."""

import importlib.util
import json
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from shardir.backend.runs import (
    Batches,
    EmitResized,
    LaunchError,
    OnEvent,
    OnTrace,
    Options,
    RankCalls,
    Report,
)
from shardir.backend.torch.launch.log import Rates, entries, on_board, open_log
from shardir.backend.torch.launch.positions import ranks_of_a_stage
from shardir.backend.torch.launch.ranks import Ranks
from shardir.backend.torch.shardir_runtime.checkpoints import manifest as manifests
from shardir.backend.torch.shardir_runtime.checkpoints.weights import with_weights
from shardir.backend.torch.shardir_runtime.data.sources import with_data
from shardir.backend.torch.shardir_runtime.plan.program import (
    PlanError,
    PlanFunction,
    ProgramPlan,
    load_plan,
)
from shardir.backend.torch.shardir_runtime.run.events import TRACE
from shardir.syntax.files import scratch_folder


def read_plan(directory: str | Path, nproc: int | None = None) -> ProgramPlan:
    """Return the checked plan of a directory.

    Args:
        nproc: the number of ranks that it has to be for.
    """
    try:
        plan = load_plan(directory)
    except PlanError as error:
        raise LaunchError(str(error)) from None
    if not (plan.directory / "program.py").is_file():
        raise LaunchError(f"{directory} has no program.py: it is not a compiled program")
    if nproc is not None and nproc != plan.size:
        raise LaunchError(
            f"expected --nproc {plan.size}, for {plan.mesh_text()}, got {nproc}; omit --nproc"
        )
    return plan


def run(
    directory: str | Path,
    options: Options | None = None,
    nproc: int | None = None,
    program: str = "program.py",
    on_event: OnEvent | None = None,
    batches: Batches | None = None,
    emit_resized: EmitResized | None = None,
    on_trace: OnTrace | None = None,
) -> Report:
    """Run a program of the directory (`single.py`: on one rank) to its end.

    Args:
        emit_resized: emits the program for another number of machines; without it the number of
            machines is fixed.
        on_trace: called after the run with its trace, which is only recorded for it.

    Call it from the main thread: Linux kills the ranks when the thread that started them ends.
    """
    options = options or Options()
    plan = read_plan(directory, nproc)
    if batches is not None and options.last != "wrap":
        raise LaunchError(
            f"--last {options.last}: expected rows of files, got batches, which are complete ones; "
            "leave out or pad a short one where it is made"
        )
    try:
        given = with_data(plan, options.data, options.last)
        if options.node_rank == 0 or not options.broadcast:
            with_weights(given, options.weights)
    except PlanError as error:
        raise LaunchError(str(error)) from None
    if importlib.util.find_spec("torch") is None:
        raise LaunchError("running needs torch: pip install 'shardir[torch]'")
    nodes = options.nnodes
    if refused := options.refused(nodes.high):
        raise LaunchError(refused)
    check_nodes(plan, options)
    if options.by_agent and on_trace is not None:
        raise LaunchError("--trace: expected one machine and no restarts; leave out --nnodes "
                          "and --max-restarts")  # fmt: skip
    if options.by_agent and (batches is not None or options.callback is not None):
        raise LaunchError(
            "expected one machine and no restarts for batches or a callback of Python, got "
            f"{nodes} machines and {options.max_restarts} restarts; give --data files"
        )
    ranks = plan.size if program == "program.py" else 1
    report = Report(ranks, options.backend)
    for function in plan.functions:
        if function.kind == "step" and (batch := _batch(function)):
            report.samples[function.name] = batch[0]
            if len(batch) > 1:
                report.tokens[function.name] = math.prod(batch)

    reports = options.node_rank == 0
    with (
        ExitStack() as stack,
        open_log(options.log if reports else None, append=_steps_done(options) > 0) as log,
        on_board(options.tensorboard if reports else None) as board,
    ):
        last, states, started = False, None, None
        at_peak = {f.name: f.at_peak for f in plan.functions}
        rates = Rates({"samples": report.samples, "tokens": report.tokens})

        def take(event: dict[str, Any]) -> None:
            nonlocal last  # the other names are set before the ranks start
            if event["event"] == "steps":
                event = event | {"rates": rates.since(event)}
                peak = at_peak.get(event["function"])
                if peak is not None and "steps" in event["rates"]:
                    event["share"] = peak * event["rates"]["steps"]
                if started is not None and (waits := started.waits.most()) is not None:
                    event["waits"] = waits._asdict()
                if states is not None:
                    states.drop_before(event["first"] + len(event["losses"]) - 1)
            report.add(event)
            if on_event is not None:
                on_event(event)
            for entry in entries(event):
                for write in (log, board):
                    if write is not None:
                        write(entry)
                if options.callback is not None:
                    last = options.callback(entry) is True or last
                if last and started is not None and entry["event"] in ("step", "evaluation"):
                    started.finish()

        if options.by_agent and program == "program.py":
            _agent_class()(plan, options, emit_resized).run(take)
            return report
        feed = None
        if batches is not None:
            from shardir.backend.torch.launch.feed import Feed, LoaderStates  # they need torch

            done = _steps_done(options)
            if batches.loader is not None and options.checkpoints is not None:
                states = LoaderStates(batches.loader, stack.enter_context(scratch_folder()), done)
            feed = Feed(plan, batches.batches, options.steps - done, batches.local, states)
        same = ranks_of_a_stage(plan) if ranks > 1 else 1
        with record_lines(options.trace_steps, on_trace) as variables:
            if states is not None:
                variables |= states.variables
            started = Ranks(plan.directory / program, ranks, options, feed, variables, same)
            started.run(take)
            report.waits = started.waits.most()
    return report


@contextmanager
def record_lines(calls: int, on_trace: OnTrace | None) -> Iterator[dict[str, str]]:
    """Yield the environment variables that make ranks record the times of their last `calls` calls;
    pass the records to `on_trace` after the run."""
    if on_trace is None:
        yield {}
        return
    with scratch_folder() as folder:
        yield {TRACE: f"{calls}:{folder}"}
        on_trace(recorded_calls(folder))


def recorded_calls(folder: Path) -> list[RankCalls]:
    """Return the recorded calls of the ranks from a folder."""
    files = sorted(folder.glob("rank*.json"), key=lambda path: int(path.stem[4:]))
    return [json.loads(path.read_text())["functions"] for path in files]


def _steps_done(options: Options) -> int:
    """Return the number of steps before the checkpoint that a run resumes. Without a checkpoint
    that the ranks accept, return the option `steps_done`."""
    if options.resume is None:
        return options.steps_done
    try:
        return manifests.read(manifests.checkpoint_at(Path(options.resume))).step
    except PlanError:
        return options.steps_done


def check_nodes(plan: ProgramPlan, options: Options) -> None:
    """Raise LaunchError for nodes or restarts that cannot be."""
    nodes, most = options.nnodes, options.nnodes.high
    if plan.size % most:
        raise LaunchError(
            f"--nnodes: expected a divisor of {plan.size}, the ranks of {plan.mesh_text()}, got "
            f"{most}"
        )
    if options.node_rank >= most:
        raise LaunchError(f"--node-rank: expected 0 to {most - 1}, got {options.node_rank}")
    if nodes.low < most and not options.max_restarts:
        raise LaunchError(
            f"--nnodes {nodes}: expected --max-restarts R and --checkpoints FOLDER, with which it "
            f"goes on with fewer machines; else give --nnodes {most}"
        )
    if most > 1 and options.rdzv is None:
        raise LaunchError(
            "--nnodes: expected --rdzv HOST:PORT, an address of machine 0, the same on all machines"
        )
    if options.max_restarts and options.checkpoints is None:
        raise LaunchError("--max-restarts: expected --checkpoints FOLDER, from which it goes on")
    if options.max_restarts and options.resume not in (None, options.checkpoints):
        raise LaunchError(
            f"--max-restarts: expected no --resume, or that of {options.checkpoints}, from which "
            f"it goes on, got {options.resume}"
        )


def _agent_class() -> Any:
    """Import the agent, and torch without its messages about failed connections, which the agent
    reports better. Torch reads the level of messages when it is imported."""
    name = "TORCH_CPP_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ[name] = "FATAL"
    try:
        from shardir.backend.torch.launch.agent import Agent
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
    return Agent


def _batch(function: PlanFunction) -> tuple[int, ...]:
    """Return the samples of a step, and the tokens of each if these are integers, by its first
    input that has samples."""
    for arg in function.args:
        if arg.role == "input" and arg.shape:
            several = "microbatches" in arg.init
            of_microbatches, shape = arg.shape[:several], arg.shape[several:]
            samples = math.prod(of_microbatches) * shape[0]
            is_text = arg.dtype in ("i32", "i64") and len(shape) == 2
            return (samples, shape[1]) if is_text else (samples,)
    return ()
