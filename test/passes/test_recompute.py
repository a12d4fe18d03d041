"""recompute: marked ops run again in the backward part, and results do not change."""

from typing import Any

import numpy as np
import pytest
from support.bodies import f64, matmul
from support.harness import (
    MESH,
    collectives,
    compiled,
    function,
    laid_out,
    layout,
    names,
    parts,
    problem,
)
from xdsl.dialects.builtin import ModuleOp, UnitAttr

from shardir.dialects import nn
from shardir.dialects.builder import OpBuilder
from shardir.interpret import run


def marked(module: ModuleOp, *kinds: type) -> ModuleOp:
    """Mark the ops of some classes to be recomputed."""
    for op in function(module, "f").body.block.ops:
        if isinstance(op, kinds):
            op.attributes["recompute"] = UnitAttr()
    return module


@pytest.mark.parametrize(
    "texts", [["[{}, {}]"] * 3, ["[{a}, {}]", "[{}, {b}]", "[{b}, {}]"]], ids=str
)
def test_marked_ops_are_recomputed_with_equal_bits(texts: list[str]):
    def block(b: OpBuilder, x: Any, w: Any, u: Any) -> Any:
        return matmul(b, b.value(nn.GeluOp, b.value(nn.TanhOp, matmul(b, x, w))), u)

    p = problem([f64(4, 8), f64(8, 12), f64(12, 8)], block, (0, 1, 2))
    layouts = [layout(t) for t in texts]
    retained = compiled(laid_out(p.module, MESH, layouts))
    recomputed = marked(laid_out(p.module, MESH, layouts), nn.GeluOp, nn.TanhOp)
    recomputed = compiled(recomputed, check=True)
    for x, y in zip(*(run(m, "g", p.arguments) for m in (retained, recomputed)), strict=True):
        assert np.array_equal(x, y)
    forward, backward = parts(recomputed, "g")
    for name in ("nn.tanh", "nn.gelu"):
        assert names(forward).count(name) == 1 == names(backward).count(name)
        assert names(parts(retained, "g")[1]).count(name) == 0
    late = {op for op in backward if op.name in ("nn.tanh", "nn.gelu")}
    for op in forward:
        if op.name in ("nn.tanh", "nn.gelu"):
            uses = {u.operation for v in op.results for u in v.uses}
            assert not uses & set(backward) - late
    assert collectives(backward) == collectives(parts(retained, "g")[1])
