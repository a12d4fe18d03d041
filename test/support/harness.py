"""Programs of the tests, with torch as the independent answer.

`shardir.testing` builds, lays out and compiles programs, and makes arrays and problems; here are
what tests of the compiler alone need: torch's results of programs of all our ops, and questions
about compiled programs.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation

from shardir.algebra.mesh import Mesh
from shardir.dialects import dist, train
from shardir.dialects.nn.base import Array
from shardir.dialects.nn.types import size_of
from shardir.interpret import run
from shardir.testing import problems
from shardir.testing.arrays import TOLERANCE, differs, numbers
from shardir.testing.cases import Case
from shardir.testing.problems import Problem
from shardir.testing.programs import (
    ELEMENTS,
    FLOATS,
    INTEGERS,
    MESH,
    PIPELINE,
    Arg,
    BuildBody,
    add_step,
    apply,
    compiled,
    defined,
    elements_of,
    function,
    laid_out,
    layout,
    layouts,
    module_of,
    ordered_subsets,
    program,
    tensors,
)
from support.reference import torch_gradient

__all__ = [
    "ELEMENTS",
    "FLOATS",
    "INTEGERS",
    "MESH",
    "PIPELINE",
    "TOLERANCE",
    "Arg",
    "Array",
    "BuildBody",
    "Problem",
    "add_step",
    "apply",
    "collectives",
    "compiled",
    "defined",
    "differs",
    "elements_of",
    "function",
    "laid_out",
    "layout",
    "layouts",
    "module_of",
    "names",
    "numbers",
    "ordered_subsets",
    "parts",
    "posed",
    "problem",
    "problem_of",
    "program",
    "run",
    "tensors",
    "torch_gradient",
    "traffic",
]

# ---- properties of a compiled program ----

COMMUNICATION: dict[type[Operation], str] = {
    kind: name for name, kind in dist.OPS.items() if kind not in dist.LOCAL
}
"""The collectives that move data, with their records' names."""


def parts(module: ModuleOp, name: str) -> tuple[list[Operation], list[Operation]]:
    """Return the ops of a function's forward and backward parts."""
    ops = list(function(module, name).body.block.ops)
    at = next((i for i, op in enumerate(ops) if isinstance(op, train.BackwardOp)), len(ops))
    return ops[:at], ops[at:]


def collectives(ops: Iterable[Operation]) -> dict[str, int]:
    """Return the number of collectives that move data, by kind."""
    return dict(Counter(COMMUNICATION[type(op)] for op in ops if type(op) in COMMUNICATION))


def names(ops: Sequence[Operation]) -> list[str]:
    return [op.name for op in ops]


def traffic(module: ModuleOp, name: str, mesh: Mesh) -> tuple[int, float]:
    """Return the number of collectives and the bytes that a device receives, by rings."""
    count, total = 0, 0.0
    for op in function(module, name).body.block.ops:
        kind = COMMUNICATION.get(type(op))
        if kind is None:
            continue
        assert isinstance(op, dist.CollectiveOp)
        n = mesh.extent(op.axes.data)
        for value, out in zip(op.values, op.outs, strict=True):
            size = size_of(out if kind == "all_gather" else value)
            total += size * (n - 1) / n * (2 if kind == "all_reduce" else 1)
        count += 1
    return count, total


# ---- problems ----


def problem(
    args: Sequence[Arg],
    body: BuildBody,
    wrt: Sequence[int] = (),
    kinds: Sequence[str] = (),
    seed: int = 0,
) -> Problem:
    """Return a program with random arguments, of the `kinds` of `numbers`."""
    return problems.problem(torch_gradient, args, body, wrt, kinds, seed)


def posed(
    module: ModuleOp, wrt: Sequence[int], arguments: list[Array], rng: np.random.Generator
) -> Problem:
    """Return a program with these arguments and random cotangents."""
    return problems.posed(torch_gradient, module, wrt, arguments, rng)


def problem_of(case: Case, element: str) -> Problem:
    """Return the program of a case, with torch's results."""
    return case.problem(element, torch_gradient)
