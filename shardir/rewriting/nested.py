"""Pipelines that a pass runs on a module of its own, such as the program of a plan to be measured.

A pass names the pipeline by text, as a command line does: `run("lower-plan", ctx, trial)`. The
layer above builds the passes of a text; it registers that function once by `provide`, when it is
imported: here at the latest.
"""

from collections.abc import Callable, Sequence
from importlib import import_module

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

Build = Callable[[str], Sequence[ModulePass]]
"""Builds the passes of a pipeline from its text."""

_provided: list[Build] = []


def provide(build: Build) -> Build:
    """Register the function that builds pipelines; usable as a decorator."""
    _provided[:] = [build]
    return build


def run(pipeline: str, ctx: Context, module: ModuleOp) -> None:
    """Run a pipeline on a module."""
    if not _provided:
        import_module("shardir.pipelines")
    for p in _provided[0](pipeline):
        p.apply(ctx, module)
