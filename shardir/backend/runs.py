"""Runs of programs: their options, errors and reports. It imports little, since commands import it
before they start to import torch."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from inspect import Parameter, signature
from pathlib import Path
from textwrap import indent, wrap
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

from shardir.backend.torch.shardir_runtime.run.options import (
    OptionError,
    RunOptions,
    at_least,
    new_file,
    option,
)
from shardir.diagnostics import ShardirError, did_you_mean, size_text

P = ParamSpec("P")
R = TypeVar("R")


class LaunchError(Exception):
    """An error before ranks start, for users."""

    exit_code = 2


class RunError(LaunchError):
    """An error of a run, with the rank that is its cause."""

    exit_code = 1


def host_and_port(text: str) -> str:
    """Check a rendezvous."""
    host, _, port = text.rpartition(":")
    right = host and port.isdecimal() and 0 < int(port) < 1 << 16
    return "" if right else "HOST:PORT, such as 10.0.0.1:29400"


class Nodes(str):
    """The number of machines of a run: `2`, or the fewest and the most, `1:2`."""

    __slots__ = ()
    ACCEPTED = (int, str)

    @property
    def low(self) -> int:
        return int(self.partition(":")[0])

    @property
    def high(self) -> int:
        return int(self.rpartition(":")[2])


def numbers_of_nodes(nodes: Nodes) -> str:
    """Check numbers of machines."""
    right = re.fullmatch(r"\d{1,6}(:\d{1,6})?", nodes) and 1 <= nodes.low <= nodes.high
    return "" if right else "1 or more, or the fewest and the most, such as 1:2"


def in_python(default: Any, about: str) -> Any:
    """Return a field of an option that Python alone has."""
    return field(default=default, metadata={"help": about})


@dataclass(frozen=True)
class Options(RunOptions):
    """The options of a run, and how it is started and reported."""

    nnodes: Nodes = option(
        1, "machines, on each of which the same command runs; 1:2: at most 2, and with what is "
        "left of them, 1 at least, it goes on after an error", kind=Nodes, check=numbers_of_nodes,
        metavar="N",
    )  # fmt: skip
    node_rank: int = option(
        0, "the number of this machine, from 0 on", kind=int, check=at_least(0), metavar="K"
    )
    rdzv: str | None = option(
        None, "where the machines meet: an address of machine 0, and a free port of it", kind=str,
        check=host_and_port, metavar="HOST:PORT",
    )  # fmt: skip
    max_restarts: int = option(
        0, "times to start again after an error, from the last of --checkpoints", kind=int,
        check=at_least(0), metavar="R",
    )  # fmt: skip
    log: Path | None = option(
        None, "write losses, evaluations and results as JSON lines", kind=Path, check=new_file(),
        metavar="FILE",
    )  # fmt: skip
    tensorboard: Path | None = option(
        None, "write losses, metrics and evaluations for TensorBoard", kind=Path, metavar="FOLDER"
    )
    trace: Path | None = option(
        None, "write when each rank runs each op, beside the predicted times, to a .json file for "
        "Perfetto; and show where both differ most", kind=Path, check=new_file(".json"),
        metavar="FILE",
    )  # fmt: skip
    trace_steps: int = option(
        5, "last steps that --trace has", kind=int, check=at_least(1), metavar="K"
    )
    trace_cluster: str | None = option(
        None, "cluster of the predicted times of --trace, ready-made or in a file; else that of "
        "the program's mesh", kind=str, metavar="NAME",
    )  # fmt: skip
    log_every: int | None = option(
        None, "without a terminal: print a line every K steps (a tenth of --steps)", kind=int,
        check=at_least(1), metavar="K",
    )  # fmt: skip
    check: bool = option(False, "compare with the same program on one device", kind=bool)
    callback: Callable[[dict[str, Any]], object] | None = in_python(
        None, "called with each entry of the log (docs/guides/running.md), which it may keep; "
        "where it returns True the training ends: its present step is the last one",
    )  # fmt: skip
    verbose: bool = in_python(
        True, "whether to show the progress, on stderr: a line that stays on a terminal, else a "
        "line every `log_every` steps",
    )  # fmt: skip
    parameters: bool = in_python(False, "whether the report has the values of parameters")
    python: str = in_python(sys.executable, "the interpreter that runs the ranks")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return options by name.

        Raises:
            ShardirError: there is no such option, or it has a wrong value.
        """
        try:
            return super().of(given)
        except OptionError as e:
            names = [f.name for f in fields(cls)]
            unknown = next((name for name in given if name not in names), None)
            hint = "" if unknown is None else did_you_mean(unknown, names)
            if unknown is not None and not hint:
                hint = f"; it has {', '.join(names)}"
            raise ShardirError(f"{e}{hint}") from None

    @property
    def by_agent(self) -> bool:
        """Whether torch's elastic agent starts the ranks: on several machines, and where they may
        start again."""
        return self.nnodes.high > 1 or self.max_restarts > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.callback is not None and not callable(self.callback):
            raise ShardirError(f"expected a function as callback, got {self.callback!r:.60}")


_FLAG = re.compile(r"--([a-z]+(?:-[a-z]+)*)(?![a-z-])(?:[ =](?!\()([^\s;]+?)(?=[,:;.)]*(?:\s|$)))?")
_VALUE = re.compile(r"[A-Z:=]+|.*[\d/.].*")
_MESH = re.compile(r"mesh @\w+ <([^>]*)>")
_WORDS = ("wrap", "drop", "refuse", "pad", "auto")


def python_words(text: str) -> str:
    """Return a message of commands in the words of Python: `--backend gloo` as backend="gloo",
    `--allow-nan` as allow_nan=True, `--nnodes` as nnodes=, `mesh @m <dp = 4>` as mesh="dp = 4"."""
    known = {f.name: f.metadata for f in fields(Options)}

    def spelling(found: re.Match[str]) -> str:
        name, value = found[1].replace("-", "_"), found[2]
        about: Mapping[str, Any] | None = known.get(name)
        if about is None and name not in ("mode", "plan", "save_strategies"):
            return found[0]
        kind = str if about is None else about.get("kind")
        choices = () if about is None else about.get("choices", ())
        rest = "" if value is None else found[0][found[0].index(found[1]) + len(found[1]) :]
        if kind is bool:
            return f"{name}=True{rest}"
        if value is None or not (value in (*choices, *_WORDS) or _VALUE.fullmatch(value)):
            return f"{name}={rest}"
        return f"{name}={value}" if kind in (int, float) else f'{name}="{value}"'

    return _MESH.sub(r'mesh="\1"', _FLAG.sub(spelling, text))


@contextmanager
def in_python_words() -> Iterator[None]:
    """Raise errors of a block, or of a decorated function, in the words of Python."""
    try:
        yield
    except (LaunchError, ShardirError) as error:
        if len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (python_words(error.args[0]),)
        raise


OPTIONS = "options: those of a run."
"""The line of a docstring in whose place `with_options` lists them."""


def with_options(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method whose keywords are `Options`: its signature has each of them, and its
    docstring their meanings, as `shard-run --help` has, in the words of Python, and so do its
    errors."""
    method = in_python_words()(method)
    own = [p for p in signature(method).parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [f for f in fields(Options) if f.name not in {p.name for p in own}]
    added = [Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default) for f in options]
    lines = ["options: of the run:"]
    for f in options:
        about = python_words(f.metadata["help"])
        lines += wrap(f"{f.name}: {about}", 88, initial_indent=" " * 4, subsequent_indent=" " * 8)
    vars(method)["__signature__"] = signature(method).replace(parameters=[*own, *added])
    method.__doc__ = re.sub(
        rf"( *){re.escape(OPTIONS)}", lambda m: indent("\n".join(lines), m[1]), method.__doc__ or ""
    )
    return method


class Waits(NamedTuple):
    """The rank that all others of its stage waited for most often, by samples of their positions.

    Args:
        share: the part of the samples in which they waited for it.
    """

    rank: int
    share: float

    def __str__(self) -> str:
        return f"the others waited {self.share:.0%} of the time for rank {self.rank}"


@dataclass(repr=False)
class Report:
    """The outcome of a run: losses of each step function, results of the others, speed. Its `repr`
    has their first and last values.

    Attributes:
        evaluations: results of the others between steps: each has the `step` after which it was
            computed, the step's function `of`, the `function`, the `name` of the result, its
            `value`.
        samples, tokens: of a step of each step function, where its inputs have them.
        stopped: the step after which a signal has ended the run, with a checkpoint.
        metrics: of each step function, by name: a value for each step.
        memory: the peak of rank 0, in bytes: of tensors on a GPU, of the process else.
        first: of each step function the step of its first loss, counted from 1.
        differences: of a run with a trace, by function: predicted and measured seconds, of a call
            and of its `parts`; `str` is their table.
        waits: the rank that the others waited for most, and in what share of the time (`Waits`).
        checks: of a run with `check=True`: the differences from one device, by what is compared.
        parameters: the last values by name, arrays of numpy (bf16 as f32), of a run with
            `parameters=True` that no signal has ended.
    """

    ranks: int
    backend: str
    samples: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    memory: int = 0
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    stopped: int | None = None
    losses: dict[str, list[float]] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    steps_per_second: dict[str, float] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    differences: dict[str, Any] = field(default_factory=dict)
    waits: "Waits | None" = None
    checks: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:
        lines = [f"run on {self.ranks} rank{'s' * (self.ranks != 1)}, {self.backend}"]
        for name, losses in self.losses.items():
            steps = f"{len(losses)} step{'s' * (len(losses) != 1)}"
            values = {"loss": losses} | self.metrics.get(name, {})
            changes = [f"{key} {v[0]:.6g} -> {v[-1]:.6g}" for key, v in values.items() if v]
            speed = self.steps_per_second.get(name)
            rates = [] if speed is None else [f"{speed:.3g} steps/s"]
            lines.append(f"  @{name}: {', '.join([steps, *changes, *rates])}")
        last = {(e["function"], e["name"]): e["value"] for e in self.evaluations}
        lines += [f"  @{function}: {name} {value:.6g}" for (function, name), value in last.items()]
        lines += [f"  {self.waits}"] * (self.waits is not None)
        lines += [f"  {difference}" for difference in self.checks]
        lines += [f"  memory: {size_text(self.memory)} at most on rank 0"] * bool(self.memory)
        return "\n".join(lines)

    def add(self, event: dict[str, Any]) -> None:
        """Add one event of the ranks (its kinds: shardir_runtime/run/main.py)."""
        match event["event"]:
            case "start":
                self.ranks, self.stopped = event["ranks"], None
            case "steps":
                first = self.first.setdefault(event["function"], event["first"])
                known = event["first"] - first  # less than there are where a run starts again
                self.losses.setdefault(event["function"], [])[known:] = event["losses"]
                for name, values in event["metrics"].items():
                    metrics = self.metrics.setdefault(event["function"], {})
                    metrics.setdefault(name, [])[known:] = values
                self.memory = max(self.memory, event["memory"])
            case "evaluated":
                self.evaluations.append(event)
            case "stopped":
                self.stopped = event["step"]
            case "trained":
                self.steps_per_second[event["function"]] = event["steps_per_second"]
            case "result":
                self.results.append(event)


MeasuredTimes = list[dict[str, list[float]]]
"""Of each program, by function: the mean seconds of a call in each round."""


@dataclass(frozen=True)
class Batches:
    """The inputs of steps, made while the ranks train: for each step the arrays in the order of the
    inputs or, if `local`, a list of the arrays of each rank."""

    batches: Iterator[Any]
    local: bool = False
    loader: Any = None
    """Where the batches come from, if its `state_dict()` belongs to checkpoints."""


OnEvent = Callable[[dict[str, Any]], None]

RankCalls = dict[str, list[dict[str, Any]]]
"""Of one rank, by function, the recorded times of its last calls (shardir_runtime/run/trace.py)."""

OnTrace = Callable[[list[RankCalls]], None]
"""Takes the calls of all ranks after a run."""

EmitResized = Callable[[Path, int, int, Path], None]
"""Writes the program of a directory for another number of ranks: of that directory, ranks, and its
own number of ranks, to a folder. Raises ShardirError."""
