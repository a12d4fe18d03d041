"""Planted errors, each of which the tests of its package must catch: `make mutants`.

A file of this folder has the mutants of the package of its name, or of a part of it, as
backend_runtime.py, in a list MUTANTS. caught.json has the test that caught each one in its last
run; `make mutants` writes it, `python test/mutants/run.py NAME` the record of one.
"""

import hashlib
import json
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

    @property
    def digest(self) -> str:
        """A digest of what is planted, and where: equal as long as it is the same mutant."""
        planted = json.dumps([self.file, self.old, self.new])
        return hashlib.sha256(planted.encode()).hexdigest()[:16]

    def apply(self, text: str) -> str:
        """Return the text of the file with the error in it."""
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: expected its old text once in {self.file}, "
                f"got it {text.count(self.old)} times; rewrite it in test/mutants"
            )
        return text.replace(self.old, self.new)


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


class Catch(NamedTuple):
    """The test that caught a mutant, and the digest of the mutant at that time."""

    test: str
    digest: str


def caught() -> dict[str, Catch]:
    """Return what is recorded of each mutant that was caught, by its name."""
    found = json.loads(CAUGHT.read_text(encoding="utf-8"))
    return {name: Catch(**catch) for name, catch in found.items()}


def record(mutant: Mutant, test: str | None) -> None:
    """Record the test that caught a mutant, or, with None, that none did."""
    found = caught()
    found.pop(mutant.name, None)
    if test is not None:
        found[mutant.name] = Catch(test, mutant.digest)
    known = {m.name: found[m.name]._asdict() for m in mutants() if m.name in found}
    CAUGHT.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
