"""Pipelines that a pass runs on a module of its own, such as the program of a plan to be measured.

A pass gives the pipeline as text, as a command line does: `run("lower-plan", ctx, trial)`. Which
passes that names is known in the layer above, which says so once by `provide`.
"""

from collections.abc import Callable, Sequence

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

Build = Callable[[str], Sequence[ModulePass]]
"""From the text of a pipeline to its passes."""

_provided: list[Build] = []


def provide(build: Build) -> Build:
    """Make `build` what reads the pipelines of passes; usable as a decorator."""
    _provided[:] = [build]
    return build


def run(pipeline: str, ctx: Context, module: ModuleOp) -> None:
    """Run a pipeline on a module."""
    assert _provided, f"nobody provides the passes of {pipeline!r}; import shardir.pipelines"
    for p in _provided[0](pipeline):
        p.apply(ctx, module)
