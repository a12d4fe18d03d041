"""The laws of the passes, on random programs. test/filecheck has the cases of each pass."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
from support.extent import extent
from support.harness import (
    MESH,
    PIPELINE,
    Arg,
    Problem,
    apply,
    compiled,
    defined,
    function,
    laid_out,
    layout,
    layouts,
    problem,
    program,
    traffic,
)
from support.random_layouts import random_form
from support.random_programs import random_problem
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.algebra.notation import parse_strategy
from shardir.analysis.functions import values
from shardir.compat.xdsl import set_type
from shardir.diagnostics import Failure
from shardir.dialects import dist, nn
from shardir.dialects.dist import is_local, layout_of
from shardir.dialects.nn.base import TensorOp, layout_mismatch
from shardir.dialects.nn.types import unsharded_type
from shardir.interpret import check_pass, run
from shardir.interpret.equivalence import NotEquivalentError
from shardir.passes import inline_calls
from shardir.passes.fuse_communication import FuseCommunication
from shardir.syntax.parser import parse

SEEDS = range(200, 200 + extent(9, 25))


def upto(name: str) -> tuple[str, ...]:
    """Return the passes of the pipeline before this one."""
    return PIPELINE[: PIPELINE.index(name)]


@cache
def made(seed: int, before: str) -> tuple[ModuleOp, Mesh, Problem]:
    """Return a random program as it reaches a pass. Callers clone it before they change it."""
    p = random_problem(seed)
    module, mesh = random_form(p, seed)
    return compiled(module, upto(before), verify=False), mesh, p


def forms(before: str) -> Iterator[tuple[ModuleOp, Mesh, Problem]]:
    for seed in SEEDS:
        module, mesh, p = made(seed, before)
        yield module.clone(), mesh, p


def every_value(module: ModuleOp) -> list[SSAValue]:
    return [v for op in module.body.ops if isinstance(op, FuncOp) for v in values(op.body.block)]


# ---- all passes ----


@pytest.mark.parametrize("name", PIPELINE)
def test_a_pass_is_deterministic_and_a_second_run_changes_nothing(name: str):
    for module, _, _ in forms(name):
        other = module.clone()
        once = str(compiled(module, (name,)))
        assert str(compiled(other, (name,))) == once
        assert str(compiled(module, (name,))) == once


@pytest.mark.parametrize("left_out", ["recompute", "simplify-communication", "fuse-communication"])
def test_a_pass_can_be_left_out(left_out: str):
    for seed in SEEDS:
        p = random_problem(seed)
        module, _ = random_form(p, seed)
        compiled(module, tuple(n for n in PIPELINE if n != left_out))
        assert not p.errors(module, 100)


def test_the_check_of_equivalence_notices_a_change():
    p = problem([Arg("f32", (4, 4))], lambda b, x: b.neg(x))
    for change in (lambda b, x: b.scale(x, -1.001), lambda b, x: b.reshape(x, (16,))):
        other = program([Arg("f32", (4, 4))], change)
        with pytest.raises(
            NotEquivalentError, match=r"after some-pass: .*(result 0|another signature)"
        ):
            check_pass(p.module, other, "some-pass")


# ---- propagate-strategies ----


def test_annotated_layouts_stay():
    for seed in SEEDS:
        module, mesh = random_form(random_problem(seed), seed)
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


# ---- insert-redistributions ----


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


# ---- lower-to-spmd ----


def test_every_value_is_local_afterwards():
    for module, _, _ in forms("lower-to-spmd"):
        compiled(module, ("lower-to-spmd",))
        assert all(is_local(v.type) for v in every_value(module))
        assert not any(isinstance(op, dist.RedistributeOp) for op in module.walk())


def test_each_op_that_is_not_computable_is_an_error():
    def body(b, x, y):
        return [b.add(x, y), b.neg(x), b.mul(x, y)]

    module = laid_out(
        program([Arg("f32", (4, 4))] * 2, body), MESH, [layout("[{a}, {}]"), layout("[{}, {a}]")]
    )
    for v in every_value(module):
        if layout_of(v) is None:
            set_type(v, dist.with_layout(unsharded_type(v), layout("[{a}, {}]")))
    with pytest.raises(Failure) as e:
        apply(module, "lower-to-spmd")
    assert len(e.value.errors) == 2 and all("[T3]" in message for _, message in e.value.errors)


# ---- simplify-communication, fuse-communication ----


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
    for source, target in itertools.product(layouts(2), repeat=2):
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


def test_fusing_moves_the_same_bytes_in_fewer_collectives():
    fewer = 0
    for module, mesh, p in forms("fuse-communication"):
        counts = []
        for max_bytes in (0, 64, 1 << 20):
            fused = module.clone()
            FuseCommunication(max_bytes=max_bytes).apply(Context(), fused)
            fused.verify()
            count, received = traffic(fused, p.name, mesh)
            assert received == pytest.approx(traffic(module, p.name, mesh)[1])
            counts.append(count)
            assert not p.errors(fused, 100)
        assert counts[0] == traffic(module, p.name, mesh)[0] and counts[2] <= counts[0] >= counts[1]
        fewer += counts[2] < counts[0]
    assert fewer


# ---- inline-calls ----

CALLS = """func.func private @g(%x: tensor<4xf32>) -> tensor<4xf32> {
  %y = nn.relu %x : (tensor<4xf32>) -> tensor<4xf32>
  %z = nn.neg %y : (tensor<4xf32>) -> tensor<4xf32>
  func.return %z : tensor<4xf32>
}
func.func @f(%x: tensor<4xf32>) -> tensor<4xf32> {
  %y = func.call @g(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %z = func.call @g(%y) : (tensor<4xf32>) -> tensor<4xf32>
  func.return %z : tensor<4xf32>
}"""


def test_inlined_ops_have_the_locations_of_the_function_that_is_called():
    module = parse(CALLS)
    *called, _ = function(module, "g").body.block.ops
    wanted = [op.location for op in called] * 2
    assert len({*wanted}) == 2
    *inlined, _ = function(apply(module, "inline-calls"), "f").body.block.ops
    assert [op.location for op in inlined] == wanted


def calling(depth: int, calls: int) -> str:
    """A program of functions, each of which calls the next one `calls` times."""
    value = "tensor<4xf32>"
    functions = [
        f"func.func {'private ' * (i > 0)}@f{i}(%v0: {value}) -> {value} {{"
        + "".join(
            f"\n%v{k + 1} = func.call @f{i + 1}(%v{k}) : ({value}) -> {value}" for k in range(calls)
        )
        + f"\nfunc.return %v{calls} : {value}\n}}\n"
        for i in range(depth)
    ]
    end = f"func.func private @f{depth}(%v0: {value}) -> {value} {{\n%v1 = nn.relu %v0 : ({value})"
    return "".join(functions) + f"{end} -> {value}\nfunc.return %v1 : {value}\n}}\n"


def test_calls_of_calls_are_inlined_at_once():
    module = apply(parse(calling(8, 2)), "inline-calls")
    assert defined(module) == {"f0"}
    assert Counter(op.name for op in function(module, "f0").body.block.ops)["nn.relu"] == 2**8


def test_chains_of_calls_are_as_deep_as_they_are():
    """No function of Python's calls itself for each."""
    module = apply(parse(calling(300, 1)), "inline-calls")
    relu, _ = function(module, "f0").body.block.ops
    assert relu.name == "nn.relu"


def test_a_program_that_would_be_too_large_is_refused_before_it_is_made():
    with pytest.raises(Failure, match=f"at most 200000 ops, got {2**60 - 2} up to @f0"):
        apply(parse(calling(60, 2)), "inline-calls")


def test_only_ops_that_calls_add_are_limited(monkeypatch: pytest.MonkeyPatch):
    """One op in the place of its call is no more."""
    monkeypatch.setattr(inline_calls, "MAX_OPS", 0)
    assert defined(apply(parse(calling(1, 3)), "inline-calls")) == {"f0"}
    with pytest.raises(Failure, match="at most 0 ops, got 2 up to @f0"):
        apply(parse(calling(2, 2)), "inline-calls")


# ---- strip-layouts ----


def test_stripping_layouts_leaves_the_single_device_program():
    for seed in SEEDS:
        p = random_problem(seed)
        module, _ = random_form(p, seed)
        compiled(module, ("strip-layouts", "distributed-autodiff"))
        assert not p.errors(module, 100)
        assert all(layout_of(v) is None for v in every_value(module))
        other = compiled(p.module.clone(), ("distributed-autodiff",))
        for x, y in zip(*(run(m, p.name, p.arguments) for m in (module, other)), strict=True):
            assert (x == y).all()
