"""Activity, and the cotangents of values that are used several times."""

from functools import reduce
from typing import Any

import pytest
from support.harness import MESH, Arg, compiled, function, laid_out, layout, problem

from shardir.dialects import nn
from shardir.dialects.builder import OpBuilder
from shardir.rewriting.autodiff.activity import Activity
from shardir.rewriting.functions import bodies
from shardir.syntax.parser import parse


def used(b: OpBuilder, x: Any) -> Any:
    """Use a value nine times, some in one op."""
    found = [b.add(x, x), b.mul(x, x), b.value(nn.MatmulOp, x, x), b.transpose(x, [1, 0])]
    return reduce(b.add, [x, *found, b.neg(x)])


@pytest.mark.parametrize(
    "text", ["[{a}, {}]", "[{}, {b}]", "[{a}, {b}]", "[{}, {}]", "[{b, a}, {}]"]
)
def test_a_cotangent_is_the_sum_of_those_of_all_uses(text: str) -> None:
    p = problem([Arg("f64", (4, 4))], used, (0,))
    assert not p.errors(compiled(laid_out(p.module, MESH, [layout(text)]), check=True))


def test_one_sum_of_addends_is_live() -> None:
    """And what is added to it, however many ops use the value."""

    def five(b: OpBuilder, x: Any) -> Any:
        return reduce(b.add, [b.value(nn.MatmulOp, x, b.neg(x)) for _ in range(5)])

    p = problem([Arg("f64", (4, 4))], five, (0,))
    ops = [*function(compiled(p.module), p.name).body.block.ops]
    addends = [*ops[-1].operands[-1:]]
    for v in addends:
        if isinstance(v.owner, nn.AddOp):
            addends += v.owner.operands
    made = {v: i for i, op in enumerate(ops) for v in op.results if v in addends}
    ended = {v: max(ops.index(use.operation) for use in v.uses) for v in made}
    assert len(made) > 10
    assert max(sum(made[v] <= i < ended[v] for v in made) for i in range(len(ops))) == 2


STOPPED = """func.func @f(%x: tensor<4xf32>, %c: tensor<4xf32>) -> tensor<4xf32> {
  %a = nn.neg %x : (tensor<4xf32>) -> tensor<4xf32>
  %s = nn.stop_gradient %a : (tensor<4xf32>) -> tensor<4xf32>
  %t = nn.exp %s : (tensor<4xf32>) -> tensor<4xf32>
  %d = nn.mul %c, %t : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %b = nn.mul %a, %d : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  func.return %b : tensor<4xf32>
}
"""


def test_what_depends_on_an_argument_but_through_stop_gradient_is_active() -> None:
    ((_, block),) = bodies(parse(STOPPED))
    activity = Activity([block.args[0]])
    activity.mark(block.ops)
    assert {v.name_hint for v in activity.active} == {"x", "a", "b"}
