"""Gradients of microbatches: their sum is torch's; the program does not grow with them."""

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from support.extent import extent
from support.harness import (
    MESH,
    Arg,
    Array,
    collectives,
    compiled,
    function,
)
from support.regression_steps import (
    LAYOUTS,
    Ours,
    compare,
    loss_of,
    module_of,
    start,
)
from xdsl.ir import Operation

from shardir.cost import FunctionCost, report
from shardir.dialects import nn, train
from shardir.dialects.builder import OpBuilder
from shardir.dialects.dist import layout_of
from shardir.syntax.parser import parse


def accumulated(how: str, count: int) -> train.AccumulateAttr:
    return train.AccumulateAttr.read(f"{how}, microbatches = {count}")


@pytest.mark.parametrize("texts", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("how", extent(["sum"], ["mean", "sum"]))
def test_gradients_of_microbatches_are_accumulated(how: str, texts: list[str | None]):
    values, parameters = start()
    module = module_of("adamw, lr = 0.01", texts, accumulate=accumulated(how, 3))
    ours = Ours(compiled(module, check=True), values)
    optimizer = torch.optim.AdamW(parameters, 0.01)

    def step(inputs: list[Array]) -> float:
        optimizer.zero_grad()
        total = 0.0
        for k in range(3):
            # our inputs: those of the first microbatch, then those of the next
            loss = loss_of(inputs[2 * k : 2 * k + 2], parameters) / (3 if how == "mean" else 1)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        return total

    compare(ours, parameters, step, steps=6, microbatches=3)


@cache
def step_of(name: str, count: int) -> tuple[FunctionCost, list[Operation]]:
    """The cost and the ops of a compiled step over this many microbatches."""
    module = compiled(
        module_of("sgd, lr = 0.1", LAYOUTS[name], accumulate=accumulated("mean", count))
    )
    (cost,) = (f for f in report(module) if f.name == "step")
    return cost, list(function(module, "step").body.block.ops)


@pytest.mark.parametrize("name", ["data parallel", "both"])
def test_a_step_has_as_many_ops_for_any_number_of_microbatches(name: str):
    """Its time grows by that of a microbatch; reductions over the batch by nothing, and memory by
    the inputs."""
    (few, ops), (more, _), (many, others) = (step_of(name, n) for n in (2, 3, 100_000))
    assert [op.name for op in ops] == [op.name for op in others]
    for one in ("seconds", "flops", "computation"):
        a, b, c = (getattr(cost, one) for cost in (few, more, many))
        assert b > a and c - a == pytest.approx((100_000 - 2) * (b - a))
    batch = next(iter(MESH.names))
    for axes in many.communication:
        a, b, c = (cost.communication[axes][0] for cost in (few, more, many))
        assert c - a == (100_000 - 2) * (b - a)
        assert a == b or all(axis.name != batch for axis in axes)
    inputs = {cost: cost.memory.parts["inputs"] for cost in (few, more, many)}
    assert inputs[many] == 50_000 * inputs[few] == 100_000 * (inputs[more] - inputs[few])
    assert len({cost.memory.peak - inputs[cost] for cost in inputs}) == 1


def test_a_gradient_is_added_up_where_it_is_made():
    """At most the arguments, the activations, all sums and one gradient are live."""

    def body(b: OpBuilder, x: Any, *weights: Any) -> Any:
        for w in weights:
            x = b.value(nn.TanhOp, b.value(nn.MatmulOp, x, w))
        return b.reduce(x, "mean", [0, 1])

    count, depth, values, weight = 2, 6, 8 * 16 * 8, 16 * 16 * 8
    args = [Arg("f64", (8, 16)), *(Arg("f64", (16, 16), f"w{i}") for i in range(depth))]
    several, texts = accumulated("mean", count), ["[{}, {}]", *[None] * depth]
    module = module_of("sgd, lr = 0.1", texts, args=args, body=body, accumulate=several)
    (cost,) = (f for f in report(compiled(module)) if f.name == "step")
    arguments, sums = count * values + depth * weight, depth * weight
    assert cost.memory.peak <= arguments + (depth + 1) * values + sums + weight + 8 * count


def test_ops_of_parameters_alone_are_computed_once():
    """The weight is gathered, and its gradient scattered, once for all microbatches."""

    def body(b: OpBuilder, x: Any, w: Any) -> Any:
        h = b.value(nn.TanhOp, b.value(nn.MatmulOp, x, b.value(nn.ExpOp, w)))
        return b.reduce(b.mul(h, h), "mean", [0, 1])

    args = [Arg("f64", (8, 4)), Arg("f64", (4, 6), "w")]
    texts = ["[{a, b}, {}]", "[{a, b}, {}]"]
    module = module_of(
        "sgd, lr = 0.1", texts, args=args, body=body, accumulate=accumulated("mean", 4)
    )
    ops = list(function(compiled(module), "step").body.block.ops)
    found = collectives(ops)
    assert sum(isinstance(op, nn.ExpOp) for op in ops) == 1
    assert found["all_gather"] == found["reduce_scatter"] == 1


OPEN = """
dist.mesh @m <a = 2, b = 2>
func.func private @loss(
    %x: tensor<8x4xf32, #dist.sharding<@m, [{{{}}}, {{{}}}]>> {{train.input = #train.init<normal>}},
    %z: tensor<8x4xf32, #dist.layout<@m, [{{a}}, {{b}}]>> {{train.input = #train.init<normal>}},
    %w: tensor<4xf32, #dist.layout<@m, [{{b}}]>> {{train.parameter = "w", train.init = #train.init<normal>}}
) -> tensor<f32> {{
  %y = nn.add %x, %z : (tensor<8x4xf32, #dist.sharding<@m, [{{{}}}, {{{}}}]>>, tensor<8x4xf32, #dist.layout<@m, [{{a}}, {{b}}]>>) -> tensor<8x4xf32>
  %v = nn.mul %y, %w : (tensor<8x4xf32>, tensor<4xf32, #dist.layout<@m, [{{b}}]>>) -> tensor<8x4xf32>
  %loss = nn.reduce <mean> %v dims <0, 1> : (tensor<8x4xf32>) -> tensor<f32>
  func.return %loss : tensor<f32>
}}
train.step @step of @loss <sgd, lr = 0.1>{}
"""  # noqa: E501 - a program


@pytest.mark.parametrize("dims", [*product(["", "?"], repeat=2)])
def test_an_input_is_split_as_without_microbatches(dims: tuple[str, str]) -> None:
    """Dimensions that may be split still may, beside a dimension of the microbatches."""
    found = []
    for tail in ("", " accumulate <mean, microbatches = 4>"):
        module = parse(OPEN.format(*dims, *dims, tail))
        compiled(module, ("inline-calls", "distributed-autodiff", "propagate-strategies"))
        found.append(layout_of(function(module, "step").body.block.args[0]))
    alone, together = found
    assert alone is not None and together is not None
    assert together.dims == ((), *alone.dims)
