"""The candidates of ops: each takes the time of its lowered program."""

from collections.abc import Hashable
from random import Random

import pytest
from extent import extent
from harness import MESH, apply, function, laid_out, program
from op_cases import CASES
from op_layouts import is_elementwise

from shardir.algebra.mesh import Mesh
from shardir.cost import report
from shardir.dialects.dist import StrategyAttr
from shardir.dialects.nn.base import TensorOp
from shardir.search.candidates import CandidateSource

TWO, FOUR = (Mesh("m", (("d", n),)) for n in (2, 4))


@pytest.mark.parametrize("mesh", extent([TWO], [TWO, FOUR, MESH]), ids=str)
def test_a_candidate_takes_the_time_of_its_program(mesh: Mesh):
    """One of each op and kind of factors; of elementwise ops one of each kind of factors."""
    source, draw, seen = CandidateSource(mesh), Random(0), set[Hashable]()
    for case in CASES:
        element = draw.choice(case.elements)
        module = program(case.args(element), case.body(element))
        op = function(module, "f").body.block.first_op
        assert isinstance(op, TensorOp)
        f = op.factors()
        kind = "elementwise" if is_elementwise(op) else op.name
        key = kind, f.operands, f.results, f.replicate, f.moved
        if extent(key, str(case)) in seen:
            continue
        seen.add(extent(key, str(case)))
        found = source.of(op, False)
        for c in draw.sample(found, extent(1, len(found))):
            if op.operands:
                op.properties["strategy"] = StrategyAttr(c.strategy)
            plan = laid_out(module, mesh, c.operands, c.results)
            (cost,) = report(apply(plan, "insert-redistributions", "lower-to-spmd"))
            assert sum(o.seconds for o in cost.ops) == pytest.approx(c.seconds), (case, c.strategy)
