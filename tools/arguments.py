"""Types of arguments that the tools share. They need no xDSL: shard-run starts to import torch
before it."""

import os
import sys
from argparse import (
    Action,
    ArgumentError,
    ArgumentParser,
    ArgumentTypeError,
    RawDescriptionHelpFormatter,
)
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import Any, NoReturn

from shardir import __version__
from shardir.backend.torch.shardir_runtime.run.options import (
    at_least,
    new_file,
    reading,
    time_out,
)
from shardir.diagnostics import did_you_mean, one_of, painter, print_error, width
from shardir.diagnostics.terminal import COLORS, choose_color


class ToolParser(ArgumentParser):
    """A parser whose help is in groups, and which suggests options and choices for unknown ones.

    Args:
        usage: the words behind the name of the tool.
        groups: the titles of the groups with their arguments, the commonest first.
        examples: lines of the shell, at the end of the help.
        other: returns what to use in place of a word that no option has a similar name to; "" if
            it does not know it.
        version: whether it has an option that prints the version.
    """

    def __init__(
        self, prog: str, *, usage: str, description: str, groups: Mapping[str, Sequence[str]],
        examples: str, other: Callable[[str], str] = lambda word: "", version: bool = True,
    ):  # fmt: skip
        super().__init__(
            prog, f"{prog} {usage}", description, epilog=f"examples:\n{indent(examples, '  ')}\n"
            f"{COMPLETION.format(prog)}", formatter_class=_Help, allow_abbrev=False,
        )  # fmt: skip
        self._groups, self._other = groups, other
        if version:
            text = f"{prog} of shardir {__version__}"
            self.add_argument("--version", action="version", version=text, help="print the version")
        self.add_argument(
            "--color", choices=COLORS, default="auto", action=_ColorAction, metavar="WHEN",
            help="colours in the output: always, never, or auto, on a terminal and not with "
            "NO_COLOR (auto)",
        )  # fmt: skip

    def arrange(self) -> None:
        """Put the arguments into their groups; what no group names is in the last one."""
        actions: dict[str, list[Action]] = {}
        for action in self._actions:
            actions.setdefault(action.dest, []).append(action)
        for group in (self._positionals, self._optionals):
            self._action_groups.remove(group)
        for title, names in {**self._groups, OTHER: [*actions]}.items():
            group = self.add_argument_group(title)
            for name in names:
                group._group_actions += actions.pop(name, [])

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; an unknown one is an error with a suggestion."""
        if "_ARGCOMPLETE" in os.environ:
            import_module("argcomplete").autocomplete(self)
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            if not unknown[0].startswith("-"):
                self.error(f"expected no further argument, got {unknown[0]}")
            word = unknown[0].partition("=")[0]
            use = self._other(word) or did_you_mean(word, self._option_string_actions)
            self.error(f"there is no option {unknown[0]}{use}")
        return found

    def _check_value(self, action: Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            hint = did_you_mean(str(value), known)
            raise ArgumentError(action, f"expected {one_of(known)}, got {value}{hint}")

    def error(self, message: str) -> NoReturn:
        """Print an error and exit with 2."""
        print_error(message, self.prog)
        sys.exit(2)


class _ColorAction(Action):
    """Sets the colours at once: an error of a later argument has them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, values)
        choose_color(values)


class _Help(RawDescriptionHelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=26, width=min(width(), 100))
        self._paint = painter(sys.stdout)

    def start_section(self, heading: str | None) -> None:
        super().start_section(heading and self._paint(heading, "bold"))


OTHER = "other options"

COMPLETION = """
completion by Tab, in bash and zsh, with shardir[completion]:
  eval "$(register-python-argcomplete {})"
"""


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
