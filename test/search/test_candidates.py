"""The candidates of ops: each takes the time of its lowered program."""

from collections.abc import Hashable
from itertools import product
from random import Random

import pytest
from op_cases import CASES
from support.extent import extent
from support.harness import MESH, Arg, apply, function, laid_out, layouts, program
from xdsl.ir import SSAValue

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.algebra.redistribution import estimated_seconds
from shardir.compat.xdsl import set_type
from shardir.cost import report
from shardir.dialects.dist import StrategyAttr, with_layout
from shardir.dialects.nn.base import TensorOp, decomposes, is_in_parts
from shardir.dialects.nn.types import itemsize, unsharded_type
from shardir.search.graph.candidates import CandidateSource
from shardir.testing.op_layouts import is_elementwise

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
        if op.regions:  # its only candidate counts it as one op, and a report the ops of one run
            continue
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


@pytest.mark.parametrize("mesh", extent([TWO], [TWO, FOUR, MESH]), ids=str)
def test_a_decomposed_op_has_only_the_ops_that_used_results_need(mesh: Mesh):
    """Of every op with several results that decomposes, each of which is used alone."""
    source, draw, seen = CandidateSource(mesh), Random(0), set[str]()
    for case in CASES:
        element = draw.choice(case.elements)
        args, body = case.args(element), case.body(element)
        op = function(program(args, body), "f").body.block.first_op
        assert isinstance(op, TensorOp)
        n = len(op.results)
        if n < 2 or not decomposes(type(op)) or extent(op.name, str(case)) in seen:
            continue
        seen.add(extent(op.name, str(case)))
        for i in range(n):
            module = program(args, lambda *xs, body=body, i=i: body(*xs)[i])
            op = function(module, "f").body.block.first_op
            assert isinstance(op, TensorOp)
            found = source.of(op, False)
            in_parts = [c for c in found if is_in_parts(type(op), op.factors(), c.operands)]
            for c in draw.sample(in_parts, min(len(in_parts), extent(1, len(in_parts)))):
                op.properties["strategy"] = StrategyAttr(c.strategy)
                for v, l in zip(op.results, c.results, strict=True):
                    set_type(v, with_layout(unsharded_type(v), l))
                plan = laid_out(module, mesh, c.operands)
                (cost,) = report(apply(plan, "insert-redistributions", "lower-to-spmd"))
                assert sum(o.seconds for o in cost.ops) == pytest.approx(c.seconds), (case, i)


@pytest.mark.parametrize("mesh", extent([TWO], [TWO, FOUR, MESH]), ids=str)
def test_a_candidate_that_is_left_out_is_slower_than_another_with_redistributions(mesh: Mesh):
    """Of every op that decomposes, by the seconds of the candidate's own ops. Where results are
    fixed the other candidate has them complete in the same layouts."""
    draw, seen, source, left_out = Random(0), set[str](), CandidateSource(mesh), 0

    def moving(v: SSAValue, ends: tuple[Layout, Layout]) -> float:
        t = unsharded_type(v)
        return estimated_seconds(t.get_shape(), mesh, *ends, itemsize(t))

    for case in CASES:
        element = draw.choice(case.elements)
        op = function(program(case.args(element), case.body(element)), "f").body.block.first_op
        assert isinstance(op, TensorOp)
        if not decomposes(type(op)) or extent(op.name, str(case)) in seen:
            continue
        seen.add(extent(op.name, str(case)))
        for is_fixed in (False, True):
            retained = source.of(op, False, (is_fixed,) * len(op.results))
            for c in source.of(op, False):
                if c in retained:
                    continue
                left_out += 1
                values = (*op.operands, *op.results)
                assert any(
                    other.seconds + sum(map(moving, values, zip(
                        (*c.operands, *other.results), (*other.operands, *c.results), strict=True
                    ))) < c.seconds
                    for other in retained
                    if not is_fixed or other.results == tuple([l.complete for l in c.results])
                ), (case, c.strategy)  # fmt: skip
    assert left_out


def test_a_product_takes_an_annotated_operand_as_it_is():
    """In every layout, with the axes of a dimension in any order."""
    args = Arg("f32", (8, 4)), Arg("f32", (4, 8))
    module = program(args, lambda builder, x, y: builder.einsum("ij,jk->ik", x, y))
    for i, annotated in product(range(2), layouts(2)):
        given = [annotated if j == i else None for j in range(2)]
        op = function(laid_out(module, MESH, given), "f").body.block.first_op
        assert isinstance(op, TensorOp)
        taken = [c.operands[i] for c in CandidateSource(MESH).of(op, False)]
        assert annotated in taken, (i, annotated)
