"""One file a pass: a file that opens with the name of a pass holds it.

    passes/inline_calls.py:  inline-calls: a call becomes the ops of ...  ->  PASSES["inline-calls"]

PIPELINES has the sequences of passes.
"""

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

from xdsl.passes import ModulePass

from shardir.rewriting.registry import PASSES, PIPELINES


def _pass_names() -> Iterator[tuple[str, str]]:
    """Yield the name of each pass, and of its file."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        name = path.stem.replace("_", "-")
        with path.open(encoding="utf-8") as file:
            if file.readline().startswith(f'"""{name}: '):
                yield name, path.stem


def _loader(name: str, stem: str) -> Callable[[], type[ModulePass]]:
    @cache
    def load() -> type[ModulePass]:
        for member in vars(import_module(f"shardir.passes.{stem}")).values():
            if isinstance(member, type) and getattr(member, "name", None) == name:
                return member
        raise ImportError(f"passes/{stem}.py: expected a class with name = {name!r}, got none")

    return load


PASSES.update({name: _loader(name, stem) for name, stem in _pass_names()})

_LAID_OUT = "insert-redistributions,distributed-autodiff,recompute"
_LOWERED = (
    "lower-to-spmd,simplify-communication,choose-recompute,split-stages,fuse-communication,"
    "retain-gathered,overlap-communication"
)

_PROPAGATED = "assign-stages,propagate-strategies,lower-layouts,local-steps"

PIPELINES.update({
    "train": f"inline-calls,{_PROPAGATED}",
    "lower-layouts": f"{_LAID_OUT},{_LOWERED}",
    "auto": "inline-calls,assign-stages{search=true},distributed-autodiff,search-strategies,"
    "lower-plan,local-steps",
    "lower-plan": f"insert-redistributions,recompute,{_LOWERED}",
    "data": f"inline-calls,data-parallel,{_PROPAGATED}",
    "hybrid": f"inline-calls,data-parallel{{hybrid=true}},{_PROPAGATED}",
    "manual": "inline-calls,assign-stages,require-layouts,lower-layouts,local-steps",
    "single-device": "inline-calls,strip-layouts,distributed-autodiff,recompute,choose-recompute,"
    "local-steps",
})  # fmt: skip
# search-strategies also measures plans by lower-plan, propagate-strategies by lower-layouts
