"""Compile time and memory do not depend on the number of elements: the ops compile, forward and
backward, with a dimension of 2^40."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from op_cases import CASES, Case
from support.extent import LONG, extent, sampled
from support.harness import MESH, compiled, laid_out, program
from support.limits import problems_of
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.layout import Layout, Shape
from shardir.diagnostics import ShardirError
from shardir.syntax.parser import parse
from shardir.syntax.printer import print_module

LARGE = 1 << 40

PARTS = extent(1, 8)
"""Each part of the ops is compiled in a process of its own."""

SLIDING = ("nn.conv", "nn.avg_pool", "nn.max_pool", "nn.adaptive_avg_pool")
"""The first letters of the names of ops that slide."""


def enlarged(case: Case) -> Iterator[Case]:
    """The case with one of its sizes replaced by LARGE, in turn; with rules of its own it may
    refuse them. Regions have types of their own."""
    if case.regions:
        return

    def grown(operand: Any, size: int) -> Any:
        if operand and isinstance(operand[0], str):
            return operand[0], grown(operand[1], size)
        return tuple(LARGE if n == size else n for n in operand)

    for size in sorted({n for a in case.args(case.elements[0]) for n in a.shape if n > 1}):
        operands = tuple(grown(o, size) for o in case.operands)
        yield replace(case, operands=operands, result=case.result and grown(case.result, size))


def compiles(case: Case) -> bool:
    """Whether the verifier accepts a case; then it is compiled, with each operand split along its
    large dimension, printed and parsed."""
    element = case.elements[0]
    args = case.args(element)
    try:
        module = program(args, case.body(element), case.wrt(element) or None)
        module.verify()
    except (ShardirError, VerifyException):
        return False
    module = laid_out(module, MESH, [layout(a.shape) for a in args])
    printed = print_module(compiled(module))
    assert print_module(parse(printed)) == printed
    return True


def layout(shape: Shape) -> Layout | None:
    if shape.count(LARGE) != 1:
        return None
    return Layout(MESH.name, tuple(MESH.names[:1] if n == LARGE else () for n in shape))


def kin(op: type[Any]) -> object:
    """The key of ops of which one is tried in the default form: the same types and factors."""
    return op if LONG else (op.infer.__func__, op.rule.__func__, op.decompose)


def not_compiled(part: int) -> list[str]:
    """The ops of a part of which no enlarged case compiles. All cases of pools and convolutions are
    tried, whose masks and divisors depend on the place, and in the long form those of the other
    ops."""
    cases: dict[object, list[Case]] = {}
    for case in CASES:
        for large in enlarged(case):
            cases.setdefault(kin(case.op), []).append(large)
    found = []
    for some in sampled(cases.values(), 60)[part::PARTS]:
        tried = (compiles(c) for c in some)
        every = LONG or some[0].op.name.startswith(SLIDING)
        if not any(list(tried) if every else tried):
            found.append(str(some[0]))
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_each_op_compiles_with_a_dimension_of_2_to_the_40(part: int) -> None:
    """Within limits of time and memory (limits.py). The numbers of a constant are text."""
    problems = problems_of(partial(not_compiled, part))
    assert [p for p in problems if not p.startswith("constant")] == []
