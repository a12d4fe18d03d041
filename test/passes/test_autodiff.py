"""The communication that differentiation derives, and gradients compared with torch."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.bodies import f64, matmul, mean, relu
from support.extent import sampled
from support.harness import (
    ELEMENTS,
    MESH,
    PIPELINE,
    Arg,
    Problem,
    apply,
    collectives,
    compiled,
    laid_out,
    layout,
    parts,
    problem,
    program,
)

from shardir.algebra.mesh import Mesh
from shardir.algebra.notation import mesh_of
from shardir.diagnostics import Failure
from shardir.dialects import dist, nn
from shardir.dialects.builder import OpBuilder
from shardir.dialects.nn.properties import int_attr

FOUR = mesh_of("m", "d = 4")
UNFUSED = tuple(p for p in PIPELINE if p != "fuse-communication")


def counted(
    p: Problem,
    texts: Sequence[str | None],
    results: Sequence[str | None] = (),
    mesh: Mesh = MESH,
    passes: Sequence[str] = UNFUSED,
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the numbers of collectives in the forward and the backward part, by kind.

    The results of the program are checked. By default there is no fusion, which moves the sum of a
    loss to those of the gradients."""
    layouts = [None if t is None else layout(t, mesh) for t in texts]
    wanted = [None if t is None else layout(t, mesh) for t in results]
    module = laid_out(p.module, mesh, layouts, wanted)
    module = compiled(module, passes, check=True)
    assert not p.errors(module, 10)
    forward, backward = parts(module, p.name)
    return collectives(forward), collectives(backward)


# ---- transposed collectives ----


def test_an_all_gather_whose_users_vary_pairs_with_a_reduce_scatter():
    """X by rows over 4, then B by columns over 4."""
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


def test_the_sum_of_a_partial_value_pairs_with_nothing():
    p = problem([f64(8, 4)], relu, (0,))
    assert counted(p, ["[{}, {}], partial sum {d}"], mesh=FOUR) == ({"all_reduce": 1}, {})


def test_no_all_reduce_follows_an_all_reduce():
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
    assert backward == {"all_reduce": 3}  # the loss and all weights share one


# ---- partial cotangents are added before they are reduced ----


def test_a_tied_parameter_is_reduced_once():
    p = problem(
        [f64(8, 4), f64(4, 4)], lambda b, x, w: matmul(b, relu(b, matmul(b, x, w)), w), (1,)
    )
    assert counted(p, ["[{d}, {}]", "[{}, {}]"], mesh=FOUR) == ({}, {"all_reduce": 1})


def test_the_input_of_three_branches_is_reduced_once():
    """q, k, v by columns: their addends of the input's cotangent are added first."""

    def branches(b: OpBuilder, x: Any, *weights: Any) -> list[Any]:
        return [matmul(b, x, w) for w in weights]

    p = problem([f64(4, 8), *[f64(8, 8)] * 3], branches, (0,))
    texts = ["[{a}, {}]", *["[{}, {b}]"] * 3]
    assert counted(p, texts) == ({}, {"all_reduce": 1})
    p = problem([f64(4, 8), *[f64(8, 8)] * 3], branches, (0, 1, 2, 3))
    assert counted(p, texts) == ({}, {"all_reduce": 4})
    fused = counted(p, texts, passes=PIPELINE)
    assert fused == ({}, {"all_reduce": 2})  # one buffer for the three weights


def test_a_cotangent_through_views_is_reduced_once():
    """Each branch flattens the input for itself, as exported linear layers do."""

    def branches(b: OpBuilder, x: Any, *weights: Any) -> list[Any]:
        return [matmul(b, b.reshape(b.neg(x), (8, 8)), w) for w in weights]

    p = problem([f64(4, 2, 8), *[f64(8, 8)] * 3], branches, (0,))
    texts = ["[{a}, {}, {}]", *["[{}, {b}]"] * 3]
    assert counted(p, texts) == ({}, {"all_reduce": 1})


def test_a_cotangent_is_reduced_before_it_is_broadcast():
    """The cotangent of a sum is broadcast, and so is reduced while it is small."""

    def sums(b: OpBuilder, x: Any, w: Any) -> Any:
        return matmul(b, b.reshape(b.reduce(x, "sum", (2,)), (4, 6)), w)

    p = problem([f64(4, 6, 5), f64(6, 8)], sums, (0,))
    module = compiled(
        laid_out(p.module, FOUR, [layout("[{}, {}, {}]", FOUR), layout("[{}, {d}]", FOUR)])
    )
    assert not p.errors(module, 10)
    (reduced,) = [o for o in parts(module, "g")[1] if isinstance(o, dist.AllReduceOp)]
    assert str(reduced.values[0].type).startswith("tensor<4x6xf64")


def test_addends_of_different_layouts():
    """x is used where it is split and where it is gathered."""

    def uses(b: OpBuilder, x: Any, w: Any) -> list[Any]:
        return [relu(b, x), matmul(b, x, w)]

    p = problem([f64(8, 4), f64(4, 12)], uses, (0, 1))
    texts, results = ["[{d}, {}]", "[{}, {d}]"], ["[{d}, {}]", "[{}, {d}]"]
    forward, backward = counted(p, texts, results, FOUR)
    assert forward == {"all_gather": 1} and backward == {"reduce_scatter": 1}


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
    """One all-reduce each for maximum, sum of exponentials and loss, and one for a split batch."""

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
    """Each device looks up its own rows; the results are summed, and their cotangents are not."""

    def lookup(b: OpBuilder, table: Any, ids: Any) -> Any:
        return b.value(nn.GatherOp, table, ids, props={"axis": int_attr(0)})

    for rows in (12, 7):
        p = problem([f64(rows, 4), Arg("i64", (8,))], lookup, (0,), ("normal", f"below:{rows}"))
        assert counted(p, ["[{d}, {}]", "[{}]"], mesh=FOUR) == ({"all_reduce": 1}, {})


BY_TIES = ("[{a}, {}]", "[{}, {b}]", "[{a}, {b}]", "[{}, {b, a}]")


@pytest.mark.parametrize(
    ("kind", "text", "dims"), sampled(product(["max", "min"], BY_TIES, [(0,), (1,), (0, 1)]), 8)
)
def test_ties_of_an_extremum_share_its_cotangent(kind: str, text: str, dims: tuple[int, ...]):
    """Also where they are on different devices."""
    for shape in ((4, 4), (5, 3)):
        p = problem([f64(*shape)], lambda b, x: b.reduce(x, kind, dims, True), (0,), ("ties",))
        counted(p, [text])
    p.arguments[0][:] = 1.0
    shared = np.broadcast_to(p.arguments[1] / np.prod([shape[d] for d in dims]), shape)
    p.wanted = [np.ones_like(p.wanted[0]), shared]
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
    with pytest.raises(Failure, match="of a float type, got"):
        apply(program(args, body, (0,)), "distributed-autodiff")


def test_no_cotangent_goes_through_integers_or_stop_gradient():
    def body(b: OpBuilder, x: Any) -> Any:
        there_and_back = b.convert(b.convert(x, ELEMENTS["i64"]), ELEMENTS["f64"])
        return b.add(b.mul(x, there_and_back), b.value(nn.StopGradientOp, b.mul(x, x)))

    p = problem([f64(4, 4)], body, (0,))
    counted(p, ["[{a}, {b}]"])


def test_an_op_without_gradient_may_follow_stop_gradient():
    """No cotangent is needed of ops that depend on the arguments only through it."""

    def body(b: OpBuilder, x: Any) -> Any:
        stopped = b.value(nn.StopGradientOp, x)
        return b.mul(x, b.value(nn.SiluGradOp, stopped, stopped))

    counted(problem([f64(4, 4)], body, (0,)), ["[{a}, {b}]"])
