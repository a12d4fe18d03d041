"""insert-redistributions: every op is computable, and each redistribution is made once."""

from support.harness import (
    compiled,
    function,
)
from support.pass_inputs import forms

from shardir.dialects import dist
from shardir.dialects.dist import layout_of
from shardir.dialects.nn.base import TensorOp, layout_mismatch


def test_every_op_is_computable_afterwards():
    for module, mesh, _ in forms("insert-redistributions"):
        compiled(module, ("insert-redistributions",))
        for op in function(module, "f").body.block.ops:
            if isinstance(op, TensorOp):
                operands = tuple(layout_of(v) for v in op.operands)
                results = tuple(layout_of(v) for v in op.results)
                assert not layout_mismatch(op.factors(), operands, results, mesh, op.MULTILINEAR)
                assert op.strategy is None


def test_a_redistribution_of_a_value_is_made_once():
    for module, _, _ in forms("insert-redistributions"):
        compiled(module, ("insert-redistributions",))
        seen = set()
        for op in function(module, "f").body.block.ops:
            if isinstance(op, dist.RedistributeOp):
                assert (op.value, op.out.type) not in seen
                seen.add((op.value, op.out.type))
