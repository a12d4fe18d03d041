"""Planted errors, each of which the tests of its package must catch: `make mutants`.

A file of this folder has the mutants of the package of its name, or of a part of it, as
backend_runtime.py, in a list MUTANTS. `python test/mutants/run.py --list` prints all of them.
"""

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Mutant(NamedTuple):
    """An error that is planted by replacing a text within a function of a source file."""

    name: str
    breaks: str
    """The behaviour that is wrong then, as a sentence."""
    file: str
    function: str
    """The innermost function or class that has the text, `Layout.shards`; empty for the top level
    of the module, and for a file that is not Python."""
    old: str
    """Occurs once in the function; texts elsewhere in the file do not count."""
    new: str
    tests: str
    """The arguments of pytest that select the tests of which one must fail."""

    @property
    def package(self) -> str:
        folder, _, rest = self.file.removeprefix("shardir/").partition("/")
        return folder if rest else folder.removesuffix(".py")

    @property
    def place(self) -> str:
        return f"{self.file}:{self.function}" if self.function else self.file

    def apply(self, text: str) -> str:
        """Return the text of the file with the error in it."""
        python = self.file.endswith(".py")
        places = [i for i in _occurrences(text, self.old) if _matches(self, text, i, python)]
        if len(places) != 1:
            raise ValueError(
                f"{self.name}: expected its text once in {self.place}, got it {len(places)} times; "
                "name the function that has it now, or rewrite it in test/mutants"
            )
        (at,) = places
        return f"{text[:at]}{self.new}{text[at + len(self.old) :]}"


def _occurrences(text: str, part: str) -> list[int]:
    """Return the offsets of a part of a text."""
    found, at = list[int](), text.find(part)
    while at >= 0:
        found.append(at)
        at = text.find(part, at + 1)
    return found


def _matches(mutant: Mutant, text: str, at: int, python: bool) -> bool:
    """Whether the text of a mutant at this offset is in its function."""
    if not python:
        return True
    first = at + len(mutant.old) - len(mutant.old.lstrip())
    last = at + len(mutant.old.rstrip())
    lines = text.count("\n", 0, first) + 1, text.count("\n", 0, last) + 1
    around = [s for s in _scopes(text) if s.first <= lines[0] and lines[1] <= s.last]
    return mutant.function == (max(around).name if around else "")


BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
"""The fields of syntax trees that hold statements."""


class _Scope(NamedTuple):
    """The lines of a function or a class, decorators included."""

    first: int
    last: int
    name: str


@cache
def _scopes(text: str) -> list[_Scope]:
    """Return all functions and classes of a module, by their qualified names."""
    found = list[_Scope]()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in (s for block in BLOCKS for s in getattr(node, block, ())):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                first = min(n.lineno for n in (child, *child.decorator_list))
                found.append(_Scope(first, child.end_lineno or first, f"{prefix}{child.name}"))
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(text), "")
    return found


TOOLS = ("__init__", "run")


def parts() -> list[str]:
    """Return the names of the files with mutants."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in TOOLS)


def packages() -> list[str]:
    """Return the names of the packages that have mutants."""
    return list(dict.fromkeys(part.partition("_")[0] for part in parts()))


def mutants() -> list[Mutant]:
    """Return all mutants, by package."""
    return [m for part in parts() for m in import_module(f"mutants.{part}").MUTANTS]
