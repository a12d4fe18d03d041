"""propagate-strategies: annotations stay, and layouts do not depend on the order of ops."""

import random

import pytest
from support.harness import (
    MESH,
    Arg,
    apply,
    compiled,
    function,
    laid_out,
    program,
)
from support.pass_inputs import SEEDS, every_value, forms
from support.random_programs import random_problem
from xdsl.ir import Operation

from shardir.algebra.notation import parse_strategy
from shardir.diagnostics import Failure
from shardir.dialects import dist, nn
from shardir.dialects.dist import layout_of
from shardir.testing.random_layouts import random_form


def test_annotated_layouts_stay():
    for seed in SEEDS:
        module, mesh = random_form(random_problem(seed).module, seed)
        annotated = [layout_of(v) for v in every_value(module)]
        compiled(module, ("propagate-strategies",))
        for before, after in zip(annotated, every_value(module), strict=True):
            found = layout_of(after)
            assert found is not None
            assert before is None or found == before.simplified(mesh)


def shuffled(ops: list[Operation], rng: random.Random) -> list[Operation]:
    """Return the ops in another order in which values are defined before their uses."""
    left, done, out = list(ops), set(), []
    while left:
        ready = [
            op
            for op in left
            if all(not isinstance(v.owner, Operation) or v.owner in done for v in op.operands)
        ]
        out.append(rng.choice(ready))
        done.add(out[-1])
        left.remove(out[-1])
    return out


def test_the_order_of_ops_does_not_matter():
    moved = 0
    for seed, (module, _, _) in zip(SEEDS, forms("propagate-strategies"), strict=True):
        other = module.clone()
        block = function(other, "f").body.block
        *same, last = list(block.ops)
        order = shuffled(same, random.Random(seed))
        moved += order != same
        for op in order:
            op.detach()
            block.insert_op_before(op, last)
        compiled(module, ("propagate-strategies",))
        compiled(other, ("propagate-strategies",))
        expected = [layout_of(v) for op in function(module, "f").body.block.ops for v in op.results]
        assert [layout_of(v) for op in same for v in op.results] == expected
    assert moved > len(SEEDS) / 2


def test_an_axis_for_two_factors_is_refused():
    def body(b, x, y):
        out = b.value(nn.MatmulOp, x, y)
        out.owner.properties["strategy"] = dist.StrategyAttr(
            parse_strategy("(({a}, {}), ({}, {a}))")
        )
        return out

    module = laid_out(program([Arg("f32", (4, 4))] * 2, body), MESH, [None, None])
    with pytest.raises(Failure, match=r"\[S9\]"):
        apply(module, "propagate-strategies")
