"""Types of arguments that the tools share."""

import argparse
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from shardir.rewriting.options import UsageError

MAX_SECONDS = 1e6
"""The longest time-out: the system's waits take milliseconds in 32 bits."""


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected more than 0, got {text}")
    if value > MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"expected at most {MAX_SECONDS:.0f}, got {text}")
    return value


def new_file(text: str) -> Path:
    """The path of a file that can be written: checked before the training, not after it."""
    if os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"expected a file, got the directory {text}")
    path = Path(text)
    if not os.access(path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file in a writable folder, got {text}")
    return path


def npz_file(text: str) -> Path:
    """The path of a new .npz file: an output of arrays overwrites nothing else."""
    path = new_file(text)
    if path.suffix != ".npz":
        raise argparse.ArgumentTypeError(f"expected a name that ends in .npz, got {text}")
    return path


def import_modules(names: Sequence[str]) -> None:
    """Import modules that register custom ops, such as `acme.shardir_ops`.

    Raises:
        UsageError: a module is not found, or its import fails.
    """
    for name in names:
        try:
            import_module(name)
        except (Exception, SystemExit) as e:
            raise UsageError(f"--import {name}: {type(e).__name__}: {e}") from e
