"""The interface of a backend: the text of a program, a directory that runs, runs, and measurements.

    backend.text(module)                                    the program that every rank runs
    backend.emit_directory(context, module, None, "out")    a directory with all its files
    report = backend.run("out", Options(steps=100))         its ranks, on this machine
    (times,) = backend.measure(["out"], 5, 0.1, Options())  seconds of each function's calls

The module is in the local view, after all passes. The compiler uses a backend only by these calls;
`shardir/backend/torch/` is the torch backend; test/backend/test_backend.py has a small example.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Self

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass
from xdsl.utils.target import Target

from shardir.backend.runs import Batches, MeasuredTimes, OnEvent, Options, Report
from shardir.dialects.nn.base import Array


@dataclass(frozen=True)
class Origin:
    """The source of a compiled program.

    Args:
        text: the module before its passes, with locations.
        passes: they, as JSON.
        aliases: further names that parameters and states have in the source, with their keys.
    """

    text: str
    passes: str
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, module: ModuleOp, passes: Sequence[ModulePass],
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> Self:  # fmt: skip
        from shardir import pipelines
        from shardir.syntax.printer import print_module

        return cls(print_module(module, locations=True), pipelines.recorded(passes), aliases)


@dataclass(frozen=True)
class Backend(Target, ABC):
    """A target that also writes, runs and measures programs; fields are its options.

    Args:
        per_rank: also write one program for each rank, for people to read.
        straight_line: write the runs and transfers of steps in stages as plain calls on each rank,
            in place of a table.
        arena: let each rank's functions have their values in one block of memory, at offsets that
            are planned.
    """

    per_rank: bool = False
    straight_line: bool = False
    arena: bool = False

    @abstractmethod
    def text(self, module: ModuleOp) -> str:
        """Return the program that every rank runs.

        Raises:
            Failure: the backend cannot emit the module.
        """

    def prepare(self, module: ModuleOp) -> None:
        """Bring a module to the form that a program has, where nothing but its program is made of
        it from now on: without this, `text` and `emit_directory` do so to a copy."""

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
        origin: Origin | None = None,
        states: Mapping[str, Array] = MappingProxyType({}),
    ) -> None:
        """Write a directory that runs without the compiler; nothing if there is an error.

        Args:
            original_module: the program before all passes, for a program on one device.
            base_dir: the folder that paths of data files are relative to; else the source file's.
            origin: the source and passes that the directory keeps, to be compiled for other numbers
                of ranks.
            states: initial values of states, by their keys, in place of the program's.

        Raises:
            ShardirError: the module cannot be emitted, or the directory cannot be written.
        """

    @abstractmethod
    def run(
        self,
        directory: str | Path,
        options: Options,
        on_event: OnEvent | None = None,
        batches: Batches | None = None,
    ) -> Report:
        """Run a directory that `emit_directory` wrote, on this machine, to its end.

        Args:
            batches: the inputs of the steps, in place of the inputs of the directory.

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
