"""Gradients of microbatches: their sum is torch's; reductions and memory do not grow with them."""

from typing import Any

import pytest
import torch
from harness import (
    MESH,
    Arg,
    Array,
    collectives,
    compiled,
    function,
)
from regression_steps import (
    LAYOUTS,
    Ours,
    compare,
    loss_of,
    module_of,
    start,
)

from shardir.cost import report
from shardir.dialects import dist, nn, train
from shardir.dialects.builder import OpBuilder
from shardir.dialects.nn.types import size_of


def accumulated(how: str, count: int) -> train.AccumulateAttr:
    return train.AccumulateAttr.read(f"{how}, microbatches = {count}")


@pytest.mark.parametrize("texts", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("how", ["mean", "sum"])
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


@pytest.mark.parametrize("name", ["data parallel", "both"])
def test_reductions_over_the_batch_do_not_grow_with_the_microbatches(name: str):
    def reductions(count: int) -> int:
        module = module_of("sgd, lr = 0.1", LAYOUTS[name], accumulate=accumulated("mean", count))
        ops = function(compiled(module), "step").body.block.ops
        axis = next(iter(MESH.names))
        return sum(
            isinstance(op, dist.AllReduceOp) and any(a.name == axis.name for a in op.axes.data)
            for op in ops
        )

    assert reductions(1) == reductions(2) == reductions(5) > 0


@pytest.mark.parametrize("name", ["data parallel", "both"])
def test_the_memory_of_microbatches_is_that_of_their_inputs(name: str):
    """Gradients are added up after each microbatch; only its inputs and loss are live longer."""

    def memory(count: int) -> tuple[int, int]:
        module = compiled(
            module_of("sgd, lr = 0.1", LAYOUTS[name], accumulate=accumulated("mean", count))
        )
        (cost,) = (f for f in report(module) if f.name == "step")
        arguments = function(module, "step").body.block.args
        return cost.memory.peak, sum(map(size_of, arguments))

    (peak, arguments), (more, more_arguments) = memory(3), memory(5)
    assert more - peak <= more_arguments - arguments + 2 * 8


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
