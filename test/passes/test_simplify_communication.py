"""simplify-communication: equal results with no more communication."""

import itertools

import pytest
from support.extent import sampled
from support.harness import (
    MESH,
    Arg,
    compiled,
    laid_out,
    layout,
    layouts,
    problem,
    traffic,
)
from support.pass_inputs import forms, upto

from shardir.compat.xdsl import set_type
from shardir.dialects import dist, nn
from shardir.dialects.nn.types import unsharded_type


def test_simplifying_never_communicates_more():
    fewer = 0
    for module, mesh, p in forms("simplify-communication"):
        before = traffic(module, p.name, mesh)
        compiled(module, ("simplify-communication",))
        after = traffic(module, p.name, mesh)
        assert after[0] <= before[0] and after[1] <= before[1] + 1e-6
        fewer += after < before
        assert not p.errors(module, 100)
    assert fewer


@pytest.mark.parametrize("shape, dims", [((4,), (1,)), ((2, 1), (0, 1)), ((4, 2), (1, 0))])
def test_a_broadcast_of_any_redistribution_communicates_no_more(
    shape: tuple[int, ...], dims: tuple[int, ...]
):
    """A dimension along which the operand is repeated is one that it lacks, or of size 1 there."""
    p = problem([Arg("f64", shape)], lambda b, x: b.neg(b.broadcast(x, dims, (2, 4))))
    for source, target in sampled(itertools.product(layouts(2), repeat=2), 50):
        module = laid_out(p.module, MESH, [None], [target])
        (y,) = (op.results[0] for op in module.walk() if isinstance(op, nn.BroadcastOp))
        set_type(y, dist.with_layout(unsharded_type(y), source))
        before = compiled(module, upto("simplify-communication"))
        counts = traffic(before, "f", MESH)
        after = traffic(compiled(module, ("simplify-communication",)), "f", MESH)
        fewer = all(x <= y for x, y in zip(after, counts, strict=True))
        assert fewer and not p.errors(module), (source, target)


MOVED = {
    "transpose": lambda b, x: b.transpose(x, [1, 0]),
    "reshape": lambda b, x: b.reshape(x, (16, 2)),
    "slice": lambda b, x: b.slice(x, [0, 1], [4, 3], [1, 1]),
    "slice of half": lambda b, x: b.slice(x, [0, 4], [4, 8], [1, 1]),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_reduction_moves_after_an_op_that_only_moves_elements(name: str):
    """Whatever the layout that is reduced, and also where the op makes a partial value."""
    move, fewer = MOVED[name], 0
    p = problem(
        [Arg("f64", (4, 2)), Arg("f64", (2, 8)), Arg("f64", (2, 8))],
        lambda b, x, w, v: b.add(*(move(b, b.value(nn.MatmulOp, x, y)) for y in (w, v))),
    )
    for made in layouts(2):
        given = [layout("[{}, {a}]"), layout("[{a}, {}]"), layout("[{a}, {}]")]
        module = laid_out(p.module, MESH, given)
        for op in module.walk():
            if isinstance(op, nn.MatmulOp):
                set_type(op.out, dist.with_layout(unsharded_type(op.out), made))
        before = compiled(module, upto("simplify-communication"))
        counts = traffic(before, "f", MESH)
        after = traffic(compiled(module, ("simplify-communication",)), "f", MESH)
        assert after[0] <= counts[0] and after[1] <= counts[1] and not p.errors(module), made
        fewer += after < counts
    assert fewer


@pytest.mark.parametrize("kind, count", [("sum", 1), ("mean", 1), ("max", 2), ("min", 2)])
def test_only_sums_are_reduced_after_they_are_added(kind: str, count: int):
    """The maximum of a sum is not the sum of the maxima."""
    p = problem(
        [Arg("f64", (4, 4))] * 2,
        lambda b, x, y: b.add(b.reduce(x, kind, [0]), b.reduce(y, kind, [0])),
    )
    given = [layout("[{a}, {}]")] * 2
    module = compiled(laid_out(p.module, MESH, given), upto("fuse-communication"))
    assert not p.errors(module)
    assert traffic(module, "f", MESH)[0] == count
