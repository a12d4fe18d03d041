"""The options of a run: one record for Python, for shard-run, and for the command line of a rank.

It needs only Python.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from ..plan.epochs import LAST

MAX_SECONDS = 1e6
"""The longest time-out: system calls take milliseconds in 32 bits."""

OptionCheck = Callable[[Any], str]
"""Returns the expected kind of value; "" for a right value."""


def option(
    default: Any,
    help: str,
    *,
    kind: type,
    check: OptionCheck = lambda value: "",
    choices: Sequence[str] = (),
    metavar: str | None = None,
) -> Any:
    """Return a field that is an option.

    Args:
        help: its meaning; a default is appended in parentheses.
        kind: the type of its values; bool for a flag.
    """
    about = {"help": help, "kind": kind, "check": check, "choices": choices, "metavar": metavar}
    return field(default=default, metadata=about)


def at_least(low: int) -> OptionCheck:
    """Return the check of a number."""
    return lambda value: f"{low} or more" if value < low else ""


def time_out(value: float) -> str:
    """Check a time-out."""
    if not value > 0:
        return "more than 0"
    return f"at most {MAX_SECONDS:.0f}" if value > MAX_SECONDS else ""


def new_file(suffix: str = "") -> OptionCheck:
    """Return the check of a file that can be written: before the training, not after it."""

    def check(path: Path) -> str:
        if os.path.isdir(path):
            return "a file, not a directory"
        if not os.access(path.absolute().parent, os.W_OK):
            return "a file in a writable folder"
        return f"a name that ends in {suffix}" if suffix and path.suffix != suffix else ""

    return check


class DataFiles(tuple):
    """The words of `--data`: NAMES=FILE or NAMES=FILE:ENTRY (data/sources.py). From Python also a
    mapping from names to files."""

    ACCEPTED = (str, Mapping, list, tuple)

    def __new__(cls, given: "str | Mapping[str, object] | Iterable[str]" = ()):
        if isinstance(given, Mapping):
            given = [f"{names}={file}" for names, file in given.items()]
        return super().__new__(cls, [given] if isinstance(given, str) else given)

    def words(self) -> list[str]:
        """Return the words with absolute paths."""
        halves = (word.split("=", 1) for word in self)
        return [f"{names}={os.path.abspath(file)}" for names, file in halves]


PIPE = re.compile(r"fd:(\d+)")
"""A pipe of batches, which a launcher writes in place of a file."""


def parts_of(word: str) -> tuple[list[str], Path, str]:
    """Return the names, the file and the entry ("" if there is none) of a word of `--data`."""
    names, file = word.split("=", 1)
    if PIPE.fullmatch(file):
        return names.split(","), Path(file), ""
    path, entry = _FILE.fullmatch(file).groups("")  # type: ignore[union-attr] - it is checked
    return names.split(","), Path(path), entry


_FILE = re.compile(r"(.+?\.(?:npy|npz|safetensors|bin))(?::(.+))?")


def data_files(words: DataFiles) -> str:
    """Check words of `--data`."""
    files = [word.partition("=")[2] for word in words]
    right = all(_FILE.fullmatch(file) or PIPE.fullmatch(file) for file in files)
    return "" if right else "NAMES=FILE, such as x,labels=train.npz or tokens=train.bin:u16"


def last_rows(value: str) -> str:
    """Check a value of `--last`."""
    return "" if LAST.fullmatch(value) else "wrap, drop, refuse, or pad= and the name of an input"


class OptionError(Exception):
    """An unknown option of a run, or a wrong value."""


@dataclass(frozen=True)
class RunOptions:
    """The options of a run that its ranks know."""

    steps: int = option(
        100, "training steps, with those before a checkpoint", kind=int, check=at_least(0)
    )
    steps_done: int = option(
        0, "steps that are done, with the values that the run begins with: its first one is the "
        "next, by its number and its rows; a checkpoint has its own", kind=int, check=at_least(0),
        metavar="K",
    )  # fmt: skip
    backend: str = option(
        "gloo", "gloo on CPUs; shm on the CPUs of one machine, by shared memory: faster; nccl on "
        "GPUs", kind=str, choices=("gloo", "shm", "nccl"),
    )  # fmt: skip
    device: str | None = option(
        None, "by default cuda with nccl, else cpu; with gloo and cuda ranks share GPUs",
        kind=str, choices=("cpu", "cuda"),
    )  # fmt: skip
    seed: int = option(0, "of parameters and batches", kind=int)
    timeout: float = option(
        300.0, "the longest wait for a rank, in seconds", kind=float, check=time_out, metavar="S"
    )
    threads: int = option(
        0, "threads per rank; 0: torch's default with nccl, else one", kind=int,
        check=at_least(0),
    )  # fmt: skip
    eval_every: int = option(
        0, "steps between evaluations: the functions beside the steps; 0: after the last one",
        kind=int, check=at_least(0), metavar="K",
    )  # fmt: skip
    checkpoints: Path | None = option(
        None, "write checkpoints to a folder: the last step's, and where the run is interrupted",
        kind=Path, metavar="FOLDER",
    )  # fmt: skip
    save_every: int = option(
        0, "steps between checkpoints; 0: none but the last", kind=int, check=at_least(0),
        metavar="K",
    )  # fmt: skip
    keep: int = option(
        0, "checkpoints that stay, the last ones; 0: all", kind=int, check=at_least(0), metavar="N"
    )
    resume: Path | None = option(
        None, "go on from a checkpoint, or from the last complete one of a folder; with the folder "
        "of --checkpoints begin anew where there is none", kind=Path, metavar="FOLDER",
    )  # fmt: skip
    weights: Path | None = option(
        None, "begin with parameters of a file: .safetensors, the index of several "
        "(model.safetensors.index.json), or a folder with one of these or with checkpoints",
        kind=Path, metavar="FILE",
    )  # fmt: skip
    broadcast: bool = option(
        False, "rank 0 alone reads --weights and makes initial values, and sends each rank its "
        "part", kind=bool,
    )  # fmt: skip
    compile: bool = option(
        False, "hand what is between collectives to torch.compile; the first step takes longer",
        kind=bool,
    )  # fmt: skip
    allow_nan: bool = option(False, "go on although a loss is not finite", kind=bool)
    detect_anomaly: bool = option(
        False,
        "check the result of each op of all steps: the first nan is an error, which names "
        "its line; slow. Without it the last steps before such a loss run again, checked",
        kind=bool,
    )
    data: DataFiles | None = option(
        None, "rows of files as inputs of a step: x,labels=train.npz, tokens=train.bin:u16",
        kind=DataFiles, check=data_files, metavar="NAMES=FILE",
    )  # fmt: skip
    last: str = option(
        "wrap", "rows at the end of an epoch that are no batch: wrap, they make one with rows of "
        "the next epoch; drop, they are left out; refuse, they are an error; pad=MASK, they are "
        "padded, and the input MASK is 1 for a row and 0 for padding",
        kind=str, check=last_rows, metavar="HOW",
    )  # fmt: skip
    dump: Path | None = option(
        None, "write all states and results to an .npz file", kind=Path, check=new_file(".npz"),
        metavar="FILE",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for f in _options(type(self)):
            value, kind = getattr(self, f.name), f.metadata["kind"]
            if value is not None:
                object.__setattr__(self, f.name, kind(value))

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return options by name.

        Raises:
            OptionError: there is no such option, or it has a wrong value.
        """
        known = {f.name: f for f in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise OptionError(f"a run has no option {name}")
            about = known[name].metadata
            if "kind" in about and not (value is None and known[name].default is None):
                _check(f"option {name} of a run", about, value)
        return cls(**given)

    @classmethod
    def add_to(cls, parser: Any) -> None:
        """Add a flag for each option to a parser of arguments."""
        for f in _options(cls):
            about, flag = f.metadata, f"--{f.name.replace('_', '-')}"
            default = f"{f.default:g}" if about["kind"] is float else f.default
            shown = "" if f.default is None else f" ({default})"
            read = reading(about["kind"], about["check"])
            if about["kind"] is bool:
                parser.add_argument(flag, action="store_true", help=about["help"])
                continue
            parser.add_argument(
                flag, type=read, default=f.default, metavar=about["metavar"],
                action="extend" if about["kind"] is DataFiles else "store",
                choices=about["choices"] or None, help=about["help"] + shown,
            )  # fmt: skip

    @classmethod
    def parsed(cls, arguments: argparse.Namespace) -> Self:
        """Return the options among parsed arguments."""
        return cls(**{f.name: getattr(arguments, f.name) for f in _options(cls)})

    @property
    def on_cpus(self) -> bool:
        """Whether the ranks of the backend run on CPUs, with one thread each."""
        return self.backend != "nccl"

    def refused(self, machines: int) -> str:
        """Return why the backend cannot run on this number of machines; "" if it can."""
        if self.backend == "nccl" and self.device == "cpu":
            return "--device cpu: expected --backend gloo or shm, got nccl, which is for GPUs"
        if self.backend != "shm":
            return ""
        if self.device == "cuda":
            return "--device cuda: expected --backend gloo or nccl, got shm, which is for CPUs"
        if machines > 1:
            return f"--backend shm: expected one machine, got {machines}; use gloo"
        if not hasattr(os, "memfd_create"):
            return f"--backend shm: expected Linux, got {sys.platform}; use gloo"
        return ""

    def words(self) -> list[str]:
        """Return the options that differ from their defaults, as words of a command line."""
        found = []
        for f in _options(RunOptions):
            value = getattr(self, f.name)
            if isinstance(value, DataFiles):
                found += [text for word in value.words() for text in ("--data", word)]
            elif value != f.default:
                text = str(value.resolve() if isinstance(value, Path) else value)
                flag = f"--{f.name.replace('_', '-')}"
                found += [flag] if value is True else [flag, text]
        return found


def _options(kind: type[RunOptions]) -> list[Any]:
    """The fields that are options."""
    return [f for f in fields(kind) if "kind" in f.metadata]


_ACCEPTED: dict[type, Any] = {
    float: (int, float), Path: (str, Path)
}  # fmt: skip
"""The types that Python may pass for an option of a type; DataFiles has its own ACCEPTED."""


def _check(what: str, about: Mapping[str, Any], value: Any) -> None:
    """Check a value from Python. Raises OptionError."""
    kind, choices = about["kind"], about["choices"]
    right = isinstance(value, getattr(kind, "ACCEPTED", _ACCEPTED.get(kind, kind)))
    if not right or (isinstance(value, bool) and kind is not bool):
        raise OptionError(f"{what}: expected {kind.__name__}, got {value!r}")
    expected = about["check"](kind(value))
    if choices and value not in choices:
        expected = f"one of {', '.join(choices)}"
    if expected:
        raise OptionError(f"{what}: expected {expected}, got {value}")


def reading(kind: type, check: OptionCheck) -> Callable[[str], Any]:
    """Return a function with which argparse reads and checks a value."""

    def read(text: str) -> Any:
        value = kind(text)
        if expected := check(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")
        return value

    read.__name__ = kind.__name__  # argparse names the type in its error
    return read
