"""One file a pass: a file that opens with the name of a pass holds it.

    passes/inline_calls.py:  inline-calls: a call becomes the ops of ...  ->  PASSES["inline-calls"]

Which passes run one after another is in shardir/pipelines.py.
"""

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

from xdsl.passes import ModulePass


def _names() -> Iterator[tuple[str, str]]:
    """The name of each pass, with that of its file."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        name = path.stem.replace("_", "-")
        with path.open(encoding="utf-8") as file:
            if file.readline().startswith(f'"""{name}: '):
                yield name, path.stem


def _loader(name: str, stem: str) -> Callable[[], type[ModulePass]]:
    @cache
    def load() -> type[ModulePass]:
        for found in vars(import_module(f"shardir.passes.{stem}")).values():
            if isinstance(found, type) and getattr(found, "name", None) == name:
                return found
        raise ImportError(f"passes/{stem}.py: expected a class with name = {name!r}, got none")

    return load


PASSES: dict[str, Callable[[], type[ModulePass]]] = {n: _loader(n, s) for n, s in _names()}
"""By name, the function that imports a pass."""
