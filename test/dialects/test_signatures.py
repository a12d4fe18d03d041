"""Memos of signatures: the names of properties count, not their order."""

from itertools import combinations

import pytest
from op_cases import CASES, Case
from support.harness import problem_of
from xdsl.ir import Operation

from shardir.diagnostics import ParseErrors, ShardirError
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.signatures import rules
from shardir.syntax.parser import parse


def with_several_properties() -> list[Case]:
    """A case of each op that has two properties of a type."""
    found: dict[type, Case] = {}
    for case in CASES:
        kinds = [type(a) for a in case.props.values()]
        if len(kinds) > len(set(kinds)):
            found.setdefault(case.op, case)
    return [*found.values()]


def factors(op: Operation) -> str:
    assert isinstance(op, TensorOp)
    try:
        return str(op.factors())
    except (ShardirError, ValueError, IndexError) as e:
        return str(e)


@pytest.mark.parametrize("case", with_several_properties(), ids=str)
def test_properties_are_told_apart_by_name(case: Case) -> None:
    """The factors follow the values that two properties exchange."""
    module = problem_of(case, case.elements[0]).module
    op = next(op for op in module.walk() if isinstance(op, case.op))
    names, values = list(op.properties), list(op.properties.values())
    a, b = next(
        (i, j) for i, j in combinations(range(len(values)), 2) if type(values[i]) is type(values[j])
    )
    factors(op)
    names[a], names[b] = names[b], names[a]
    op.properties = dict(zip(names, values, strict=True))
    remembered = factors(op)
    rules.clear()
    assert remembered == factors(op)


def test_ops_that_differ_in_properties_alone_are_each_verified() -> None:
    """Each signature is verified once in a module."""
    op = "nn.transpose %x perm <{}> : (tensor<4x4xf32>) -> tensor<4x4xf32>"
    lines = [f"%y{i} = {op.format(perm)}" for i, perm in enumerate(("1, 0", "0, 0", "1, 0"))]
    text = "\n".join(["func.func @f(%x: tensor<4x4xf32>) {", *lines, "func.return", "}"])
    with pytest.raises(ParseErrors) as caught:
        parse(text, verify=True)
    assert [error.line for error in caught.value.errors] == [3]
