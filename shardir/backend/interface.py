"""The interface of a backend: the text of a program, a directory that runs, runs, and measurements.

    backend.text(module)                                    the program that every rank runs
    backend.emit_directory(context, module, None, "out")    the same with all that it needs
    report = backend.run("out", Options(steps=100))         its ranks, on this machine
    (times,) = backend.measure(["out"], 5, 0.1, Options())  seconds of each function's calls

The module is in the local view, after all passes. The compiler uses a backend only by these calls;
`shardir/backend/torch/` is the one that it has, test/backend/test_backend.py has a small other one.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self, get_type_hints

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.utils.target import Target

from shardir.diagnostics import ShardirError, did_you_mean
from shardir.rewriting.options import type_text


class LaunchError(Exception):
    """An error before ranks start, for users."""

    exit_code = 2


class RunError(LaunchError):
    """An error of a run, with the rank that is its cause."""

    exit_code = 1


@dataclass(frozen=True)
class Options:
    """The options of a run.

    Args:
        steps: training steps.
        backend: the library of collectives: gloo on CPUs, nccl on GPUs.
        seed: of parameters and inputs.
        timeout: the longest wait for a rank, in seconds.
        threads: of each rank; 0: the backend decides.
        dump: the .npz file that all states and results are written to.
        python: the interpreter that runs the ranks.
    """

    steps: int = 100
    backend: str = "gloo"
    seed: int = 0
    timeout: float = 300.0
    threads: int = 0
    dump: Path | None = None
    python: str = sys.executable

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return options by name.

        Raises:
            ShardirError: there is no such option, or it has another type.
        """
        hints = get_type_hints(cls)
        for name, value in given.items():
            if name not in hints:
                hint = did_you_mean(name, hints) or f"; it has {', '.join(hints)}"
                raise ShardirError(f"a run has no option {name}{hint}")
            wanted = _ACCEPTED.get(hints[name], hints[name])
            if not isinstance(value, wanted) or isinstance(value, bool):
                expected = type_text(hints[name])
                raise ShardirError(f"option {name} of a run: expected {expected}, got {value!r}")
        return cls(**given)

    def __post_init__(self) -> None:
        if self.dump is not None:
            object.__setattr__(self, "dump", Path(self.dump))


_ACCEPTED: dict[Any, Any] = {float: int | float, Path | None: str | Path | None}
"""What is accepted for an option of a type, if not the type alone."""


@dataclass
class Report:
    """The outcome of a run: losses of each step function, results of the others, speed."""

    ranks: int
    backend: str
    losses: dict[str, list[float]] = field(default_factory=dict)
    steps_per_second: dict[str, float] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)

    def add(self, event: dict[str, Any]) -> None:
        """Add one event of the ranks (its kinds: runtime_main.py)."""
        match event["event"]:
            case "steps":
                self.losses.setdefault(event["function"], []).extend(event["losses"])
            case "trained":
                self.steps_per_second[event["function"]] = event["steps_per_second"]
            case "result":
                self.results.append(event)


MeasuredTimes = list[dict[str, list[float]]]
"""Of each program, by function: the mean seconds of a call in each round."""

OnEvent = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Backend(Target, ABC):
    """A target that also writes, runs and measures programs; fields are its options.

    Args:
        per_rank: also write one program for each rank, for people to read.
    """

    per_rank: bool = False

    @abstractmethod
    def text(self, module: ModuleOp) -> str:
        """Return the program that every rank runs.

        Raises:
            Failure: the module has what the backend cannot emit.
        """

    def emit(self, ctx: Context, module: ModuleOp, output: IO[str]) -> None:
        """Write the text, as xDSL's tools ask for it."""
        output.write(self.text(module))

    @abstractmethod
    def emit_directory(
        self,
        ctx: Context,
        module: ModuleOp,
        original_module: ModuleOp | None,
        out_dir: str | Path,
        base_dir: Path | None = None,
    ) -> None:
        """Write a directory that runs without the compiler; nothing if there is an error.

        Args:
            original_module: the program before all passes, for a program on one device.
            base_dir: the folder that paths of data files are relative to; else the source file's.

        Raises:
            ShardirError: the module cannot be emitted, or the directory cannot be written.
        """

    @abstractmethod
    def run(
        self, directory: str | Path, options: Options, on_event: OnEvent | None = None
    ) -> Report:
        """Run a directory that `emit_directory` wrote, on this machine, to its end.

        Raises:
            LaunchError: nothing was started; RunError: a rank failed.
        """

    @abstractmethod
    def measure(
        self,
        directories: Sequence[Path],
        rounds: int,
        seconds: float,
        options: Options,
        on_round: Callable[[int], object] | None = None,
    ) -> MeasuredTimes:
        """Call every function of the programs for about `seconds` in each round.

        Args:
            on_round: called with the number of rounds that are done.

        Raises:
            LaunchError: the programs cannot be measured together, or a rank failed.
        """
