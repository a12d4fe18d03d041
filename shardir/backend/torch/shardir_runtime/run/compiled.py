"""`--compile`: the functions of a program through torch.compile.

The ops between two collectives become a graph. Collectives and updates of parameters are called
directly, and so are the functions of stages, which a schedule calls.
"""

import functools
import sys
from collections.abc import Callable
from inspect import isfunction
from types import ModuleType

import torch

from ..compat import compile_errors
from ..plan.program import PlanError, ProgramPlan
from .program_module import ROOT

AS_THEY_ARE = ("runtime", "collectives.exchange", "collectives.position", "ops.updates")
"""The modules whose functions are called directly: collectives, their positions, and updates, which
are single kernels of torch already."""

CONSTANT = (("ops.attention", "chosen_of_forms"),)
"""The functions that torch.compile calls while it traces a graph. They are marked here, not at
their definition: torch's decorator imports the compiler, which takes longer than the start of a
rank."""


def compile_functions(plan: ProgramPlan, functions: dict[str, Callable]) -> dict[str, Callable]:
    """Return the functions of a program, to be compiled by torch.compile at their first call.

    Raises:
        PlanError: torch.compile does not run here, or the program has an arena. The returned
            functions raise it if torch.compile fails.
    """
    if plan.arena is not None:
        raise PlanError("--compile: expected a program without an arena; compile it without")
    for module in AS_THEY_ARE:
        if found := sys.modules.get(f"{ROOT}.{module}"):
            _call_as_they_are(found)
    for module, name in CONSTANT:
        if found := sys.modules.get(f"{ROOT}.{module}"):
            setattr(found, name, torch.compiler.assume_constant_result(getattr(found, name)))
    return {name: _compile(f) if isfunction(f) else f for name, f in functions.items()}


def _call_as_they_are(module: ModuleType) -> None:
    """Let torch.compile end a graph at each of a module's functions."""
    for name, f in vars(module).items():
        if isfunction(f) and not name.startswith("_"):
            setattr(module, name, torch.compiler.disable(f))


def _compile(f: Callable) -> Callable:
    try:
        made = torch.compile(f, dynamic=False)
    except RuntimeError as error:
        raise _failure(error) from None

    @functools.wraps(f)
    def call(*args: object) -> object:
        try:
            return made(*args)
        except compile_errors() as error:
            raise _failure(error) from None

    return call


def _failure(error: RuntimeError) -> PlanError:
    lines = [line for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return PlanError(f"--compile: torch.compile fails here: {said}; leave it out")
