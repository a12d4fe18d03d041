"""Types of arguments that the tools share."""

import argparse
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from shardir.rewriting.options import UsageError


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected more than 0, got {text}")
    return value


def new_file(text: str) -> Path:
    """The path of a file that can be written: checked before the training, not after it."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, got the directory {text}")
    if not os.access(path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file in a writable folder, got {text}")
    return path


def import_modules(names: Sequence[str]) -> None:
    """Import modules that register custom ops, such as `acme.shardir_ops`.

    Raises:
        UsageError: a module is not found, or its import fails.
    """
    for name in names:
        try:
            import_module(name)
        except Exception as e:
            raise UsageError(f"--import {name}: {type(e).__name__}: {e}") from e
