"""What communication differentiation makes, counted; and that gradients are torch's."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from harness import (
    ELEMENTS,
    MESH,
    PIPELINE,
    Arg,
    Problem,
    add_step,
    apply,
    collectives,
    compiled,
    differs,
    function,
    laid_out,
    layout,
    names,
    numbers,
    parts,
    problem,
    program,
)
from random_programs import random_form, random_problem
from reference import torch_forward
from xdsl.dialects.builtin import ModuleOp, StringAttr, SymbolRefAttr, UnitAttr
from xdsl.ir import Operation

import shardir
from shardir.algebra.mesh import Mesh
from shardir.algebra.notation import mesh_of
from shardir.backend.torch.emit.plan import plan_of
from shardir.diagnostics import Failure
from shardir.dialects import dist, nn, train
from shardir.dialects.builder import OpBuilder
from shardir.dialects.nn.properties import dims_attr, int_attr
from shardir.interpret import run

FOUR = mesh_of("m", "d = 4")
UNFUSED = tuple(p for p in PIPELINE if p != "fuse-communication")


def matmul(b: OpBuilder, x: Any, y: Any) -> Any:
    return b.value(nn.MatmulOp, x, y)


def relu(b: OpBuilder, x: Any) -> Any:
    return b.value(nn.ReluOp, x)


def mean(b: OpBuilder, x: Any, rank: int = 2) -> Any:
    return b.reduce(x, "mean", range(rank))


def counted(
    p: Problem,
    texts: Sequence[str | None],
    results: Sequence[str | None] = (),
    mesh: Mesh = MESH,
    passes: Sequence[str] = UNFUSED,
) -> tuple[dict[str, int], dict[str, int]]:
    """The collectives of the forward and the backward part, of a program that computes right.
    Fusion is left out: it moves a loss's sum to those of the gradients."""
    layouts = [None if t is None else layout(t, mesh) for t in texts]
    wanted = [None if t is None else layout(t, mesh) for t in results]
    module = laid_out(p.module, mesh, layouts, wanted)
    module = compiled(module, passes, check=True)
    assert not p.errors(module, 10)
    forward, backward = parts(module, p.name)
    return collectives(forward), collectives(backward)


def f64(*shape: int) -> Arg:
    return Arg("f64", shape)


# ---- what pairs with what ----


def test_an_all_gather_whose_users_vary_pairs_with_a_reduce_scatter():
    """Row 7: X by rows over 4, then B by columns over 4."""
    p = problem(
        [f64(8, 4), f64(4, 8), f64(8, 12)], lambda b, x, a, w: matmul(b, matmul(b, x, a), w), (1, 2)
    )
    texts = ["[{d}, {}]", "[{}, {}]", "[{}, {d}]"]
    forward, backward = counted(p, texts, ["[{}, {d}]"], FOUR)
    assert forward == {"all_gather": 1}
    assert backward == {"reduce_scatter": 1, "all_reduce": 1}  # of Y; of the replicated A


def test_an_all_gather_whose_users_are_redundant_pairs_with_a_slice():
    p = problem([f64(8, 4)], lambda b, x: b.mul(b.neg(x), x), (0,))
    forward, backward = counted(p, ["[{d}, {}]"], ["[{}, {}]"], FOUR)
    assert forward == {"all_gather": 1} and backward == {}


def test_a_slice_of_what_is_replicated_pairs_with_an_all_gather():
    p = problem([f64(8, 4)], relu, (0,))
    forward, backward = counted(p, ["[{}, {}]"], ["[{d}, {}]"], FOUR)
    assert forward == {} and backward == {"all_gather": 1}


def test_an_all_to_all_pairs_with_its_reverse():
    p = problem([f64(8, 4)], relu, (0,))
    forward, backward = counted(p, ["[{d}, {}]"], ["[{}, {d}]"], FOUR)
    assert forward == {"all_to_all": 1} and backward == {"all_to_all": 1}


def test_the_sum_that_ends_a_partial_value_pairs_with_nothing():
    p = problem([f64(8, 4)], relu, (0,))
    assert counted(p, ["[{}, {}], partial sum {d}"], mesh=FOUR) == ({"all_reduce": 1}, {})


def test_no_all_reduce_stands_behind_an_all_reduce():
    """Megatron's block: columns, then rows. One all-reduce forward, one backward."""

    def block(b: OpBuilder, x: Any, w: Any, u: Any) -> Any:
        return matmul(b, relu(b, matmul(b, x, w)), u)

    texts = ["[{}, {}]", "[{}, {d}]", "[{d}, {}]"]
    args = [f64(4, 8), f64(8, 12), f64(12, 8)]
    once = {"all_reduce": 1}
    assert counted(problem(args, block, (0, 1, 2)), texts, mesh=FOUR) == (once, once)
    assert counted(problem(args, block, (1, 2)), texts, mesh=FOUR) == (once, {})


def test_two_blocks_reduce_twice_each_way():
    """Data parallel over a, tensor parallel over b: the weights' gradients go together."""

    def blocks(b: OpBuilder, x: Any, *weights: Any) -> Any:
        for w, u in zip(weights[::2], weights[1::2], strict=True):
            x = b.add(x, matmul(b, relu(b, matmul(b, x, w)), u))
        return mean(b, x)

    p = problem([f64(4, 8), *[f64(8, 12), f64(12, 8)] * 2], blocks, (0, 1, 2, 3, 4))
    texts = ["[{a}, {}]", *["[{}, {b}]", "[{b}, {}]"] * 2]
    forward, backward = counted(p, texts)
    assert forward == {"all_reduce": 3}  # one a block, one of the loss
    assert backward == {"all_reduce": 6}  # one a block, one a weight
    forward, backward = counted(p, texts, passes=PIPELINE)
    assert forward == {"all_reduce": 2}
    assert backward == {"all_reduce": 3}  # those of the loss and of all weights are one


# ---- contributions are added while partial ----


def test_a_tied_parameter_is_reduced_once():
    p = problem(
        [f64(8, 4), f64(4, 4)], lambda b, x, w: matmul(b, relu(b, matmul(b, x, w)), w), (1,)
    )
    assert counted(p, ["[{d}, {}]", "[{}, {}]"], mesh=FOUR) == ({}, {"all_reduce": 1})


def test_the_input_of_three_branches_is_reduced_once():
    """q, k, v by columns: their contributions to the input's cotangent are added first."""

    def branches(b: OpBuilder, x: Any, *weights: Any) -> list[Any]:
        return [matmul(b, x, w) for w in weights]

    p = problem([f64(4, 8), *[f64(8, 8)] * 3], branches, (0,))
    texts = ["[{a}, {}]", *["[{}, {b}]"] * 3]
    assert counted(p, texts) == ({}, {"all_reduce": 1})
    p = problem([f64(4, 8), *[f64(8, 8)] * 3], branches, (0, 1, 2, 3))
    assert counted(p, texts) == ({}, {"all_reduce": 4})
    fused = counted(p, texts, passes=PIPELINE)
    assert fused == ({}, {"all_reduce": 2})  # the three weights' in one buffer


def test_what_comes_back_through_views_is_reduced_once():
    """Each branch flattens the input for itself, as exported linear layers do."""

    def branches(b: OpBuilder, x: Any, *weights: Any) -> list[Any]:
        return [matmul(b, b.reshape(b.neg(x), (8, 8)), w) for w in weights]

    p = problem([f64(4, 2, 8), *[f64(8, 8)] * 3], branches, (0,))
    texts = ["[{a}, {}, {}]", *["[{}, {b}]"] * 3]
    assert counted(p, texts) == ({}, {"all_reduce": 1})


def test_what_is_broadcast_is_reduced_before():
    """The cotangent of a sum is spread: better a complete one."""

    def sums(b: OpBuilder, x: Any, w: Any) -> Any:
        return matmul(b, b.reshape(b.reduce(x, "sum", (2,)), (4, 6)), w)

    p = problem([f64(4, 6, 5), f64(6, 8)], sums, (0,))
    module = compiled(
        laid_out(p.module, FOUR, [layout("[{}, {}, {}]", FOUR), layout("[{}, {d}]", FOUR)])
    )
    assert not p.errors(module, 10)
    (reduced,) = [o for o in parts(module, "g")[1] if isinstance(o, dist.AllReduceOp)]
    assert str(reduced.values[0].type).startswith("tensor<4x6xf64")


def test_contributions_of_different_layouts():
    """x is used where it is split and where it is gathered."""

    def uses(b: OpBuilder, x: Any, w: Any) -> list[Any]:
        return [relu(b, x), matmul(b, x, w)]

    p = problem([f64(8, 4), f64(4, 12)], uses, (0, 1))
    texts, results = ["[{d}, {}]", "[{}, {d}]"], ["[{d}, {}]", "[{}, {d}]"]
    forward, backward = counted(p, texts, results, FOUR)
    assert forward == {"all_gather": 1} and backward == {"reduce_scatter": 1}


@pytest.mark.parametrize(
    "text", ["[{a}, {}]", "[{}, {b}]", "[{a}, {b}]", "[{}, {}]", "[{b, a}, {}]"]
)
def test_a_value_used_twice(text: str):
    p = problem([f64(4, 4)], lambda b, x: b.add(b.mul(x, x), matmul(b, x, x)), (0,))
    counted(p, [text])


# ---- losses ----


@pytest.mark.parametrize("text", ["[{a}, {}]", "[{a, b}, {}]", "[{a}, {b}]", "[{}, {}]"])
@pytest.mark.parametrize("rows", [8, 5])
def test_a_mean_is_not_multiplied_by_the_ranks(text: str, rows: int):
    """Mean squared error on a split batch: the gradient is torch's, with one sum for the loss and
    one for the weight."""

    def mse(b: OpBuilder, x: Any, w: Any, y: Any) -> Any:
        e = b.sub(matmul(b, x, w), y)
        return mean(b, b.mul(e, e))

    p = problem([f64(rows, 4), f64(4, 8), f64(rows, 8)], mse, (1,))
    split = text != "[{}, {}]"
    forward, backward = counted(p, [text, "[{}, {}]", None if split else text])
    assert forward.get("all_reduce", 0) == split == backward.get("all_reduce", 0)


def test_a_loss_over_split_classes():
    """Row 21: greatest, sum of exponentials, loss; the mean over the batch makes one more."""

    def loss(b: OpBuilder, x: Any, w: Any, labels: Any) -> Any:
        return mean(b, b.value(nn.CrossEntropyOp, matmul(b, x, w), labels), 1)

    p = problem(
        [f64(8, 4), f64(4, 12), Arg("i64", (8,))], loss, (1,), ("normal",) * 2 + ("below:12",)
    )
    forward, backward = counted(p, ["[{}, {}]", "[{}, {d}]", None], mesh=FOUR)
    assert forward == {"all_reduce": 3} and backward == {}
    forward, backward = counted(p, ["[{a}, {}]", "[{}, {b}]", None])
    assert forward == {"all_reduce": 4} and backward == {"all_reduce": 1}


def test_a_split_vocabulary():
    """Each device looks up what it has; the rows are summed, and their cotangents are not."""

    def lookup(b: OpBuilder, table: Any, ids: Any) -> Any:
        return b.value(nn.GatherOp, table, ids, props={"axis": int_attr(0)})

    for rows in (12, 7):
        p = problem([f64(rows, 4), Arg("i64", (8,))], lookup, (0,), ("normal", f"below:{rows}"))
        assert counted(p, ["[{d}, {}]", "[{}]"], mesh=FOUR) == ({"all_reduce": 1}, {})


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("text", ["[{a}, {}]", "[{}, {b}]", "[{a}, {b}]", "[{}, {b, a}]"])
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
def test_ties_of_a_greatest_share_its_cotangent(kind: str, text: str, dims: tuple[int, ...]):
    """Also where they lie on different devices."""
    for shape in ((4, 4), (5, 3)):
        p = problem([f64(*shape)], lambda b, x: b.reduce(x, kind, dims, True), (0,), ("ties",))
        counted(p, [text])
    p.arguments[0][:] = 1.0
    whole = np.broadcast_to(p.arguments[1] / np.prod([shape[d] for d in dims]), shape)
    p.wanted = [np.ones_like(p.wanted[0]), whole]
    counted(p, [text])


# ---- arguments ----


def test_unused_arguments_have_zero_gradients():
    p = problem([f64(4, 4), f64(5, 3)], lambda b, x, y: relu(b, x), (0, 1))
    assert counted(p, ["[{a}, {}]", "[{b}, {a}]"]) == ({}, {})


def test_a_result_that_depends_on_nothing():
    p = problem([f64(4, 4), f64(4, 4)], lambda b, x, y: [relu(b, y), mean(b, y)], (0,))
    counted(p, ["[{a}, {b}]", "[{b}, {}]"])


def test_an_argument_that_is_returned():
    p = problem([f64(4, 4)], lambda b, x: [x, relu(b, x), x], (0,))
    assert counted(p, ["[{a}, {b}]"]) == ({}, {})


def test_integers_have_no_gradient():
    args = [Arg("i64", (4, 4)), f64(4, 4)]

    def body(b: OpBuilder, i: Any, x: Any) -> Any:
        return b.mul(b.convert(i, ELEMENTS["f64"]), x)

    counted(problem(args, body, (1,)), ["[{a}, {}]", "[{}, {b}]"])
    with pytest.raises(Failure, match="only float tensors have a gradient"):
        apply(program(args, body, (0,)), "distributed-autodiff")


def test_no_cotangent_goes_through_integers_or_stop_gradient():
    def body(b: OpBuilder, x: Any) -> Any:
        there_and_back = b.convert(b.convert(x, ELEMENTS["i64"]), ELEMENTS["f64"])
        return b.add(b.mul(x, there_and_back), b.value(nn.StopGradientOp, b.mul(x, x)))

    p = problem([f64(4, 4)], body, (0,))
    counted(p, ["[{a}, {b}]"])


def test_an_op_without_gradient_may_follow_stop_gradient():
    """No cotangent is asked of what depends on the arguments only through it."""

    def body(b: OpBuilder, x: Any) -> Any:
        stopped = b.value(nn.StopGradientOp, x)
        return b.mul(x, b.value(nn.TanhGradOp, stopped, stopped))

    counted(problem([f64(4, 4)], body, (0,)), ["[{a}, {b}]"])


# ---- training steps ----


def regression(b: OpBuilder, x: Any, y: Any, w: Any, c: Any, u: Any) -> Any:
    e = b.sub(matmul(b, b.value(nn.TanhOp, b.add(matmul(b, x, w), c)), u), y)
    return mean(b, b.mul(e, e))


ARGS = [
    Arg("f64", (8, 4)),
    Arg("f64", (8, 2)),
    Arg("f64", (4, 6), "w"),
    Arg("f64", (6,), "c"),
    Arg("f64", (6, 2), "u"),
]


def test_a_step_leaves_unused_parameters_as_they_are():
    args = [Arg("f64", (8, 4)), Arg("f64", (4, 4), "w"), Arg("f64", (3,), "unused")]
    module = add_step(
        laid_out(program(args, lambda b, x, w, u: mean(b, matmul(b, x, w))), MESH, [None] * 3),
        "momentum, lr = 0.1, momentum = 0.9",
    )
    compiled(module, check=True)
    f = function(module, "step")
    rng = np.random.default_rng(1)
    values = [numbers(rng, "f64", s) for s in ((8, 4), (4, 4), (3,))]
    states = [np.zeros((4, 4))] * (len(f.function_type.inputs) - 3)
    found = run(module, "step", [*values, *states])
    assert any(np.array_equal(x, values[2]) for x in found)


def test_the_gradients_of_a_step_travel_together():
    """Data parallel: one all-reduce for all gradients and the loss."""
    module = add_step(laid_out(program(ARGS, regression), MESH, [None] * 5), "sgd, lr = 0.1")
    forward, backward = parts(compiled(module), "step")
    assert collectives(forward) == {} and collectives(backward) == {"all_reduce": 1}


# ---- recompute ----


def marked(module: ModuleOp, *kinds: type) -> ModuleOp:
    for op in function(module, "f").body.block.ops:
        if isinstance(op, kinds):
            op.attributes["recompute"] = UnitAttr()
    return module


@pytest.mark.parametrize(
    "texts", [["[{}, {}]"] * 3, ["[{a}, {}]", "[{}, {b}]", "[{b}, {}]"]], ids=str
)
def test_recompute_runs_again_and_changes_no_bit(texts: list[str]):
    def block(b: OpBuilder, x: Any, w: Any, u: Any) -> Any:
        return matmul(b, b.value(nn.GeluOp, b.value(nn.TanhOp, matmul(b, x, w))), u)

    p = problem([f64(4, 8), f64(8, 12), f64(12, 8)], block, (0, 1, 2))
    layouts = [layout(t) for t in texts]
    kept = compiled(laid_out(p.module, MESH, layouts))
    again = marked(laid_out(p.module, MESH, layouts), nn.GeluOp, nn.TanhOp)
    again = compiled(again, check=True)
    for x, y in zip(*(run(m, "g", p.arguments) for m in (kept, again)), strict=True):
        assert np.array_equal(x, y)
    forward, backward = parts(again, "g")
    for name in ("nn.tanh", "nn.gelu"):
        assert names(forward).count(name) == 1 == names(backward).count(name)
        assert names(parts(kept, "g")[1]).count(name) == 0
    late = {op for op in backward if op.name in ("nn.tanh", "nn.gelu")}
    for op in forward:
        if op.name in ("nn.tanh", "nn.gelu"):
            uses = {u.operation for v in op.results for u in v.uses}
            assert not uses & set(backward) - late
    assert collectives(backward) == collectives(parts(kept, "g")[1])


# ---- random programs ----


ORDERS = {
    "before the layouts": (
        "distributed-autodiff",
        "propagate-strategies",
        "insert-redistributions",
    ),
    "before redistribution": (
        "propagate-strategies",
        "distributed-autodiff",
        "insert-redistributions",
    ),
    "in the local view": (
        "propagate-strategies",
        "insert-redistributions",
        "lower-to-spmd",
        "distributed-autodiff",
    ),
    "behind all else": (
        "propagate-strategies",
        "insert-redistributions",
        "lower-to-spmd",
        "simplify-communication",
        "fuse-communication",
        "distributed-autodiff",
    ),
}


@pytest.mark.parametrize("order", ORDERS)
def test_differentiation_in_other_places(order: str):
    """It works on the plain program, on the laid-out one, and on that of the local view."""
    for seed in range(1000, 1020):
        p = random_problem(seed)
        module, mesh = random_form(p, seed)
        compiled(module, (*ORDERS[order], "lower-to-spmd"))
        assert not p.errors(module, 100), f"seed {seed} on {mesh}"


COUNTED = """
dist.mesh @m <d = 3>
func.func private @f(
    %x: tensor<7x2xf32, #dist.layout<@m, [{d}, {}]>>,
    %w: tensor<2x5xf32> {train.parameter = "w", train.init = #train.init<normal>},
    %seen: tensor<5xf32, #dist.layout<@m, [STATE]>>
        {train.state = "seen", train.init = #train.init<constant, value = 0.0>}
) -> (tensor<5xf32> {train.updates = "seen"}, tensor<f32>) {
  %y = nn.matmul %x, %w : (tensor<7x2xf32, #dist.layout<@m, [{d}, {}]>>, tensor<2x5xf32>)
      -> tensor<7x5xf32>
  %sum = nn.reduce <sum> %y dims <0> : (tensor<7x5xf32>) -> tensor<5xf32>
  %new = nn.add %seen, %sum : (tensor<5xf32, #dist.layout<@m, [STATE]>>, tensor<5xf32>)
      -> tensor<5xf32>
  %s = nn.reduce <sum> %y dims <0, 1> : (tensor<7x5xf32>) -> tensor<f32>
  func.return %new, %s : tensor<5xf32>, tensor<f32>
}
train.step @step of @f <sgd, lr = 0.5>
"""


@pytest.mark.parametrize("state", ["{}", "{d}"])
def test_a_step_updates_the_states_of_its_function(state: str):
    """By results that are no part of the loss, laid out as the states are."""
    text = COUNTED.replace("STATE", state)
    module = shardir.compile(text).module
    step = function(module, "step")
    layouts = [str(dist.type_layout(t)) for t in step.function_type.outputs]
    assert layouts[0] == f"@m, [{state}]"
    rng = np.random.default_rng(0)
    x, w, seen = (rng.standard_normal(s) for s in ((7, 2), (2, 5), (5,)))
    new, loss, new_w = run(module, "step", [x, w, seen])
    assert np.allclose(new, seen + (x @ w).sum(0), rtol=1e-5)
    assert np.allclose(loss, (x @ w).sum(), rtol=1e-5)
    assert np.allclose(new_w, w - 0.5 * np.repeat(x.sum(0)[:, None], 5, 1), rtol=1e-5)
    assert plan_of(module)[0]["functions"]["step"]["results"][0]["updates"] == "seen"


def test_collectives_of_the_local_view_stay():
    """The forward part is the function as it was written: ops, properties, types."""

    def shown(ops: Sequence[Operation]) -> list[tuple[str, str, str]]:
        return [(o.name, str(o.properties), str([v.type for v in o.results])) for o in ops]

    seen: set[str] = set()
    for seed in range(1000, 1020):
        module, _ = random_form(random_problem(seed), seed)
        compiled(module, ORDERS["behind all else"][:-1])
        before = shown(list(function(module, "f").body.block.ops)[:-1])
        apply(module, "distributed-autodiff")
        assert shown(parts(module, "g")[0]) == before, seed
        seen |= {name for name, _, _ in before}
    assert {"dist.all_reduce", "dist.all_gather", "dist.all_slice"} <= seen


BATCH_NORM = """
dist.mesh @m <d = 3>
func.func private @f(
    %x: tensor<7x4xf64, #dist.layout<@m, [{d}, {}]>>,
    %w: tensor<4xf64> {train.parameter = "w", train.init = #train.init<normal>},
    %b: tensor<4xf64> {train.parameter = "b", train.init = #train.init<normal>},
    %mean: tensor<4xf64>
        {train.state = "mean", train.init = #train.init<constant, value = 0.0>},
    %var: tensor<4xf64> {train.state = "var", train.init = #train.init<constant, value = 1.0>}
) -> (tensor<f64>, tensor<4xf64> {train.updates = "mean"}, tensor<4xf64> {train.updates = "var"}) {
  %y, %mean_1, %var_1 = nn.batch_norm %x, %w, %b, %mean, %var momentum 0.1 eps 1.0e-5
      : (tensor<7x4xf64, #dist.layout<@m, [{d}, {}]>>, tensor<4xf64>, tensor<4xf64>, tensor<4xf64>,
         tensor<4xf64>) -> (tensor<7x4xf64>, tensor<4xf64>, tensor<4xf64>)
  %z = nn.mul %y, %y : (tensor<7x4xf64>, tensor<7x4xf64>) -> tensor<7x4xf64>
  %s = nn.reduce <sum> %z dims <0, 1> : (tensor<7x4xf64>) -> tensor<f64>
  func.return %s, %mean_1, %var_1 : tensor<f64>, tensor<4xf64>, tensor<4xf64>
}
train.step @step of @f <sgd, lr = 0.5>
"""


def test_a_step_with_batch_norm_is_torchs():
    """Statistics of the whole batch, unevenly split; only they and the gradients move."""
    module = shardir.compile(BATCH_NORM).module
    assert set(collectives(function(module, "step").body.block.ops)) == {"all_reduce"}
    norm = torch.nn.BatchNorm1d(4, momentum=0.1, dtype=torch.float64)
    x = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        norm.weight.copy_(x[0])
    state = [norm.weight, norm.bias, norm.running_mean, norm.running_var]
    given = [x.numpy(), *(v.detach().numpy().copy() for v in state)]
    loss = (norm(x) ** 2).sum()
    loss.backward()
    with torch.no_grad():
        wanted = [
            loss,
            norm.running_mean,
            norm.running_var,
            *(v - 0.5 * v.grad for v in (norm.weight, norm.bias) if v.grad is not None),
        ]
    for y, want in zip(run(module, "step", given), wanted, strict=True):
        assert np.allclose(y, want.detach().numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("texts", [None, ["[{a}, {}]", "[{}, {b}]"]], ids=["plain", "laid out"])
def test_second_derivatives(texts: list[str] | None):
    """@h of @g of @f: the cotangent of the gradient, and the loss's own of 1."""
    args = [f64(6, 4), f64(4, 6)]

    def body(b: OpBuilder, x: Any, w: Any) -> Any:
        y = b.value(nn.SoftmaxOp, b.value(nn.TanhOp, matmul(b, x, w)), props={"axis": int_attr(1)})
        return mean(b, b.mul(y, b.value(nn.SigmoidOp, y)))

    module = program(args, body, (0, 1))
    module.body.block.add_op(train.GradientOp.create(properties={
        "sym_name": StringAttr("h"), "function": SymbolRefAttr("g"), "wrt": dims_attr(1, 0),
    }))  # fmt: skip
    f = function(module, "f")
    rng = np.random.default_rng(3)
    x, w, dx, dw = (rng.standard_normal(s) for s in ((6, 4), (4, 6)) * 2)
    leaves = [torch.tensor(v, requires_grad=True) for v in (x, w)]
    (loss,) = torch_forward(f, leaves)
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    total = loss + (first[0] * torch.tensor(dx)).sum() + (first[1] * torch.tensor(dw)).sum()
    second = torch.autograd.grad(total, [leaves[1], leaves[0]])
    if texts is None:
        apply(module, "distributed-autodiff")
    else:
        module = compiled(laid_out(module, MESH, [layout(t) for t in texts]), check=True)
    found = run(module, "h", [x, w, dx, dw])
    for y, wanted in zip(found, (loss, *first, *second), strict=True):
        assert not differs(y, wanted.detach().numpy(), "f64", 10)


@pytest.mark.parametrize("x", [[1.0, 2, 3, 4], [0.0, 2, 3, 4], [0.0, 0, 3, 4], [0.0, 0, 0, 4]])
def test_the_second_derivative_of_a_product_at_zeros(x: list[float]):
    """The slope of sum(g v) + f is H v + g: H has the products of all elements but two."""
    module = shardir.compile("""
      func.func @f(%x: tensor<4xf64>) -> tensor<f64> {
        %y = nn.reduce <prod> %x dims <0> : (tensor<4xf64>) -> tensor<f64>
        func.return %y : tensor<f64>
      }
      train.gradient @g of @f wrt <0>
      train.gradient @h of @g wrt <0>
    """).module
    v = np.random.default_rng(0).standard_normal(4)

    def without(*gone: int) -> float:
        return float(np.prod([x[k] for k in range(4) if k not in gone]))

    hessian = [[without(i, j) if i != j else 0.0 for j in range(4)] for i in range(4)]
    gradient = [without(i) for i in range(4)]
    found = run(module, "h", [np.array(x), v])
    np.testing.assert_allclose(found[1], gradient, atol=1e-12)
    np.testing.assert_allclose(found[2], np.array(hessian) @ v + gradient, atol=1e-12)
