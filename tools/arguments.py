"""Kinds of arguments that the tools share."""

import argparse
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from shardir.rewriting.options import UsageError


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1 is expected")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("more than 0 is expected")
    return value


def new_file(text: str) -> Path:
    """Where a file can be written, known before the training and not after it."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory")
    if not os.access(path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent} that can be written")
    return path


def import_modules(names: Sequence[str]) -> None:
    """Import modules that register custom ops, such as `acme.shardir_ops`.

    Raises:
        UsageError: one is not found, or fails.
    """
    for name in names:
        try:
            import_module(name)
        except Exception as e:
            raise UsageError(f"--import {name}: {type(e).__name__}: {e}") from e
