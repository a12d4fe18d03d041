"""Planted errors, each of which the tests of its package must catch: `make mutants`.

A file of this folder has the mutants of the package of its name, in a list MUTANTS. caught.json has
the test that caught each one in its last run.
"""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
CAUGHT = Path(__file__).with_name("caught.json")


class Mutant(NamedTuple):
    """An error that is planted by replacing a text of a source file."""

    name: str
    breaks: str
    """The behaviour that is wrong then, as a sentence."""
    file: str
    old: str
    """Occurs once in the file."""
    new: str
    tests: str
    """The arguments of pytest that select the tests of which one must fail."""

    @property
    def package(self) -> str:
        folder, _, rest = self.file.removeprefix("shardir/").partition("/")
        return folder if rest else folder.removesuffix(".py")

    def apply(self, text: str) -> str:
        """Return the text of the file with the error in it."""
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: expected its old text once in {self.file}, "
                f"got it {text.count(self.old)} times; rewrite it in test/mutants/{self.package}.py"
            )
        return text.replace(self.old, self.new)


def packages() -> list[str]:
    """Return the names of the packages that have mutants."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in TOOLS)


TOOLS = ("__init__", "run")


def mutants() -> list[Mutant]:
    """Return all mutants, by package."""
    return [m for p in packages() for m in import_module(f"mutants.{p}").MUTANTS]


def caught() -> dict[str, str]:
    """Return the recorded tests by the names of the mutants that they caught."""
    return json.loads(CAUGHT.read_text(encoding="utf-8"))


def record(tests: Mapping[str, str | None]) -> None:
    """Write the test that caught each mutant, without those that no test caught."""
    known = {m.name: test for m in mutants() if (test := tests.get(m.name)) is not None}
    CAUGHT.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
