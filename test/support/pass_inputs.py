"""Random programs as they reach a pass."""

from collections.abc import Iterator
from functools import cache

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import SSAValue

from shardir.algebra.mesh import Mesh
from shardir.analysis.functions import values
from shardir.testing.random_layouts import random_form
from support.extent import extent
from support.harness import (
    PIPELINE,
    Problem,
    compiled,
)
from support.random_programs import random_problem

SEEDS = range(200, 200 + extent(3, 25))


def upto(name: str) -> tuple[str, ...]:
    """Return the passes of the pipeline before this one."""
    return PIPELINE[: PIPELINE.index(name)]


@cache
def made(seed: int, before: str) -> tuple[ModuleOp, Mesh, Problem]:
    """Return a random program as it reaches a pass. Callers clone it before they change it."""
    p = random_problem(seed)
    module, mesh = random_form(p.module, seed)
    return compiled(module, upto(before), verify=False), mesh, p


def forms(before: str) -> Iterator[tuple[ModuleOp, Mesh, Problem]]:
    for seed in SEEDS:
        module, mesh, p = made(seed, before)
        yield module.clone(), mesh, p


def every_value(module: ModuleOp) -> list[SSAValue]:
    return [v for op in module.body.ops if isinstance(op, FuncOp) for v in values(op.body.block)]
