"""Types of arguments that the tools share. They need no xDSL: shard-run starts to import torch
before it."""

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from shardir import __version__
from shardir.backend.torch.shardir_runtime.run.options import (
    at_least,
    new_file,
    reading,
    time_out,
)
from shardir.diagnostics import did_you_mean


class ToolParser(ArgumentParser):
    """A parser that suggests the option for an unknown one.

    Args:
        other: returns what to use in place of a word that no option has a similar name to; "" if
            it does not know it.
    """

    def __init__(self, *args: Any, other: Callable[[str], str] = lambda word: "", **kwargs: Any):
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self._other = other

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; an unknown one is an error with a suggestion."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            if not unknown[0].startswith("-"):
                self.error(f"expected no further argument, got {unknown[0]}")
            word = unknown[0].partition("=")[0]
            use = self._other(word) or did_you_mean(word, self._option_string_actions)
            self.error(f"there is no option {unknown[0]}{use}")
        return found


positive = reading(int, at_least(1))
seconds = reading(float, time_out)


def size(text: str) -> int:
    """Parse a size such as 5GB; return its bytes."""
    from shardir.rewriting.options import size_of

    bytes = int(text) if text.isascii() and text.isdecimal() else size_of((text,))
    if not bytes:
        raise ArgumentTypeError(f"expected a size such as 5GB or 512MiB, got {text}")
    return bytes


output_file = reading(Path, new_file())


def add_version(parser: ArgumentParser) -> None:
    """Add the option that prints the version."""
    text = f"{parser.prog} of shardir {__version__}"
    parser.add_argument("--version", action="version", version=text, help="print the version")


def import_modules(names: Sequence[str]) -> None:
    """Import modules that register custom ops, such as `acme.shardir_ops`.

    Raises:
        UsageError: a module is not found, or its import fails.
    """
    from shardir.rewriting.options import UsageError

    for name in names:
        try:
            import_module(name)
        except (Exception, SystemExit) as e:
            raise UsageError(f"--import {name}: {type(e).__name__}: {e}") from e
