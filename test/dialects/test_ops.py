"""The law of every op: one device computes what torch does, forward and gradient; and on any layout
of its operands all ranks together do.

The laws are those of `shardir.testing`, which packages with ops of their own check too.
"""

from collections.abc import Sequence
from math import copysign, prod
from typing import Any

import pytest
from op_cases import CASES, EVEN, REFERENCES, Case
from support.each import check_each
from support.harness import (
    FLOATS,
    MESH,
    Arg,
    collectives,
    compiled,
    function,
    laid_out,
    layout,
    names,
    parts,
    problem,
    traffic,
)
from support.op_laws import LAWS, OPS
from support.reference import shape_of
from xdsl.ir import SSAValue

from shardir.dialects import dist, nn
from shardir.dialects.builder import OpBuilder
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.properties import dims_attr, float_attr, int_attr
from shardir.dialects.nn.types import unsharded_type
from shardir.testing.op_laws import told

pytestmark = pytest.mark.filterwarnings("ignore:no rule is registered of the op")


def holds(errors: Sequence[str]) -> None:
    """Fail with the first errors of a law."""
    assert not errors, f"{len(errors)} cases are wrong{told(errors)}"


def test_every_law_of_every_op_is_covered():
    """Each op has cases, an uneven split, and a gradient or the reason for none."""
    assert {c.op for c in CASES} == set(OPS) == set(REFERENCES)
    assert len(LAWS.layouts.by_name) == len(CASES), "two cases of one name"
    holds(LAWS.missing(OPS))


def test_an_element_type_is_tested_or_refused():
    """Types without a case of an op are an error that the user reads, not a surprise."""
    holds([e for op in OPS for e in LAWS.of_element_types(op)])


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_one_device_and_all_ranks_are_torch(op: type[TensorOp]):
    holds(LAWS.of_values(op))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_sub_axes_and_explicit_sizes(op: type[TensorOp]):
    """Eight ranks, some of them with nothing; differentiated before it is lowered or after."""
    holds(LAWS.of_odd_layouts(op))


@pytest.mark.parametrize(
    "op",
    [op for op in OPS if any(c.operands for c in LAWS.cases_of(op))],
    ids=lambda op: op.name,
)
def test_partial_operands(op: type[TensorOp]):
    """Partial values pass through what is linear in them, and are reduced before what is not."""
    holds(LAWS.of_partial_operands(op))


def test_results_have_the_partial_layouts_that_are_annotated():
    """Whether an op is placed or decomposed."""
    holds(LAWS.of_partial_results(OPS))


LINEAR = {
    "add": lambda b, x, y: b.add(x, y),
    "sub": lambda b, x, y: b.sub(x, y),
    "neg": lambda b, x, y: b.neg(x),
    "transpose": lambda b, x, y: b.transpose(x, [1, 0]),
    "reshape": lambda b, x, y: b.reshape(x, (32,)),
    "broadcast": lambda b, x, y: b.broadcast(x, [1, 2], (1, 4, 8)),
    "sum": lambda b, x, y: b.reduce(x, "sum", [1]),
    "mean": lambda b, x, y: b.reduce(x, "mean", [1]),
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_op_keeps_partial_values(name: str):
    """Its result is reduced once, at the end: before it no data moves."""
    given = [layout("[{b}, {}], partial sum {a}")] * 2
    p = problem([Arg("f32", EVEN)] * 2, LINEAR[name], (0, 1))
    forward, _ = parts(module := compiled(laid_out(p.module, MESH, given)), "g")
    assert not p.errors(module)
    ours = next(i for i, op in enumerate(forward) if isinstance(op, TensorOp))
    assert not collectives(forward[:ours])
    assert collectives(forward) == {"all_reduce": 1}
    assert "all_gather" not in collectives(function(module, "g").body.block.ops)


def test_partial_values_are_reduced_before_they_are_repeated():
    """A broadcast would double what the all-reduce takes."""
    given = [layout("[{b}, {}], partial sum {a}")]
    p = problem([Arg("f32", EVEN)], lambda b, x: b.broadcast(x, [1, 2], (2, 4, 8)), (0,))
    forward, _ = parts(module := compiled(laid_out(p.module, MESH, given)), "g")
    assert not p.errors(module)
    assert [type(op) for op in forward] == [dist.AllReduceOp, nn.BroadcastOp]


def shrinking() -> list[Case]:
    """A case of each linear op whose only float operand has more elements than its result: the
    transpose makes a cotangent larger."""
    found: dict[type, Case] = {}
    for case in CASES:
        if "f32" not in case.elements or not case.gradient or len(case.wrt("f32")) != 1:
            continue
        op = LAWS.layouts.op_of(str(case), "f32")
        if op.factors().linear and len(op.results) == 1:
            size = (prod(unsharded_type(v).get_shape()) for v in (*op.operands[:1], *op.results))
            large, small = size
            if 1 < small < large:
                found.setdefault(case.op, case)
    return [*found.values()]


def test_cotangents_are_reduced_before_they_are_made_larger():
    cases = shrinking()
    assert len(cases) > 3
    check_each(reduces_its_cotangent, cases)


def reduces_its_cotangent(case: Case):
    """The result is repeated along a split dimension, so that its cotangent is partial."""
    args, sizes = case.args("f32"), list[int]()

    def repeated(b: OpBuilder, *given: SSAValue) -> SSAValue:
        (y,) = case.body("f32")(b, *given[:-1])
        shape = unsharded_type(y).get_shape()
        sizes.append(prod(shape))
        dims = range(1, len(shape) + 1)
        return b.mul(b.broadcast(y, dims, (4, *shape)), b.broadcast(given[-1], [0], (4, *shape)))

    p = problem([*args, Arg("f32", (4,))], repeated, case.wrt("f32"), case.kinds)
    given = [*[layout("[" + ", ".join(["{}"] * len(a.shape)) + "]") for a in args], layout("[{a}]")]
    module = compiled(laid_out(p.module, MESH, given))
    assert not p.errors(module)
    _, backward = parts(module, "g")
    reduced = [v for op in backward if isinstance(op, dist.AllReduceOp) for v in op.values]
    assert reduced
    assert all(prod(dist.global_shape(v.type, MESH)) <= sizes[0] for v in reduced)


# ---- rows that are split ----

ROWS: dict[str, tuple[list[Arg], Any, str, dict[str, int]]] = {
    "softmax": (
        [Arg("f64", (4, 8))],
        lambda b, x: b.value(nn.SoftmaxOp, x, props={"axis": int_attr(-1)}),
        "[{a}, {b}]", {"all_reduce": 2},  # maximum, sum of exponentials
    ),
    "softmax over both axes": (
        [Arg("f64", (4, 8))],
        lambda b, x: b.value(nn.SoftmaxOp, x, props={"axis": int_attr(-1)}),
        "[{}, {b, a}]", {"all_reduce": 2},
    ),
    "uneven softmax": (
        [Arg("f64", (3, 7))],
        lambda b, x: b.value(nn.SoftmaxOp, x, props={"axis": int_attr(1)}),
        "[{a}, {b}]", {"all_reduce": 2},
    ),
    "log_softmax": (
        [Arg("f64", (8, 4))],
        lambda b, x: b.value(nn.LogSoftmaxOp, x, props={"axis": int_attr(0)}),
        "[{b}, {a}]", {"all_reduce": 2},
    ),
    "layer_norm": (
        [Arg("f64", (4, 8)), Arg("f64", (8,)), Arg("f64", (8,))],
        lambda b, x, w, c: b.value(nn.LayerNormOp, x, w, c, props={"eps": float_attr(1e-5)}),
        "[{a}, {b}]", {"all_reduce": 2},  # mean, variance
    ),
    "rms_norm": (
        [Arg("f64", (4, 8)), Arg("f64", (8,))],
        lambda b, x, w: b.value(nn.RmsNormOp, x, w, props={"eps": float_attr(1e-5)}),
        "[{a}, {b}]", {"all_reduce": 1},
    ),
    "cross_entropy": (
        [Arg("f64", (4, 8)), Arg("i64", (4,))],
        lambda b, x, ids: b.value(nn.CrossEntropyOp, x, ids),
        "[{a}, {b}]", {"all_reduce": 3},  # maximum, sum of exponentials, the label's logit
    ),
    "uneven cross_entropy": (
        [Arg("f64", (3, 7)), Arg("i64", (3,))],
        lambda b, x, ids: b.value(nn.CrossEntropyOp, x, ids),
        "[{}, {a, b}]", {"all_reduce": 3},
    ),
    "logsumexp": (
        [Arg("f64", (3, 7))],
        lambda b, x: b.value(nn.LogsumexpOp, x, props={"dims": dims_attr(1)}),
        "[{a}, {b}]", {"all_reduce": 2},  # maximum, sum of exponentials
    ),
    "var": (
        [Arg("f64", (3, 7))],
        lambda b, x: b.value(
            nn.VarOp, x, props={"dims": dims_attr(0, 1), "correction": int_attr(1)}
        ),
        "[{a}, {b}]", {"all_reduce": 2},  # mean, sum of squares
    ),
    "argmax": (
        [Arg("f64", (3, 7))],
        lambda b, x: b.value(nn.ArgmaxOp, x, props={"axis": int_attr(1)}),
        "[{a}, {b}]", {"all_reduce": 2},  # maximum, minimum index
    ),
    "softmax_grad": (
        [Arg("f64", (4, 8)), Arg("f64", (4, 8))],
        lambda b, y, dy: b.value(nn.SoftmaxGradOp, y, dy, props={"axis": int_attr(1)}),
        "[{a}, {b}]", {"all_reduce": 1},  # sum of y dy
    ),
    "uneven log_softmax_grad": (
        [Arg("f64", (3, 7)), Arg("f64", (3, 7))],
        lambda b, y, dy: b.value(nn.LogSoftmaxGradOp, y, dy, props={"axis": int_attr(1)}),
        "[{a}, {b}]", {"all_reduce": 1},  # sum of dy
    ),
    "layer_norm_grad": (
        [Arg("f64", s) for s in ((4, 8), (8,), (4, 8), (4,), (4,))],
        lambda b, *given: b.results(nn.LayerNormGradOp, *given),
        # both sums of dx; of the weight's and the bias' gradient over a
        "[{a}, {b}]", {"all_reduce": 2},
    ),
    "rms_norm_grad": (
        [Arg("f64", s) for s in ((4, 8), (8,), (4, 8), (4,))],
        lambda b, *given: b.results(nn.RmsNormGradOp, *given),
        "[{a}, {b}]", {"all_reduce": 2},
    ),
    "uneven cross_entropy_grad": (
        [Arg("f64", (3, 7)), Arg("i64", (3,)), Arg("f64", (3,))],
        lambda b, x, ids, dy: b.value(nn.CrossEntropyGradOp, x, ids, dy),
        "[{a}, {b}]", {},
    ),
}  # fmt: skip


SHARDS: dict[str, Any] = {
    "cumsum": lambda b, x: b.value(nn.CumsumOp, x, props={"axis": int_attr(1)}),
    "topk": lambda b, x: b.op(nn.TopkOp, x, props={"axis": int_attr(1), "k": int_attr(1)}).results,
    "prod": lambda b, x: b.reduce(x, "prod", [1]),
}


@pytest.mark.parametrize("name", SHARDS)
def test_a_split_dimension_is_computed_by_shards(name: str):
    """The received elements do not grow with the shards."""
    p = problem([Arg("f64", (4, 64))], SHARDS[name], (0,))
    module = compiled(laid_out(p.module, MESH, [layout("[{}, {a, b}]")]))
    assert not p.errors(module)
    _, moved = traffic(module, "f", MESH)
    assert 0 < moved < 4 * 64 * 8 / 8


@pytest.mark.parametrize("name", ROWS)
def test_a_split_row_is_computed_in_parts(name: str):
    """Only maxima and sums move: the row itself is never gathered."""
    args, body, text, expected = ROWS[name]
    floats = tuple(i for i, a in enumerate(args) if a.element in FLOATS)
    wrt = () if name.endswith("_grad") else floats
    p = problem(args, body, wrt, ["below:7" if a.element == "i64" else "normal" for a in args])
    full = function(p.module, "f").body.block.first_op
    assert full is not None
    module = compiled(laid_out(p.module, MESH, [layout(text), *[None] * (len(args) - 1)]))
    assert not p.errors(module)
    forward, backward = parts(module, p.name)
    assert full.name not in names(forward)
    assert collectives(forward) == expected
    assert set(collectives(backward)) <= {"all_reduce"}
    for op in (*forward, *backward):
        if isinstance(op, dist.AllReduceOp):
            for v in op.values:
                assert shape_of(v) != shape_of(function(module, p.name).body.block.args[0])


def test_a_negative_zero_is_an_attribute_of_its_own():
    """It equals zero, and is returned for none."""
    signs = [copysign(1, float_attr(x).value.data) for x in (0.0, -0.0, 0.0, -0.0)]
    assert signs == [1, -1, 1, -1]
