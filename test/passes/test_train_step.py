"""A training step: its parameters and states, and its one reduction of all gradients."""

from typing import Any

import numpy as np
import pytest
import torch
from support.bodies import matmul, mean
from support.harness import (
    MESH,
    Arg,
    add_step,
    collectives,
    compiled,
    function,
    laid_out,
    numbers,
    parts,
    program,
)

import shardir
from shardir.backend.torch.emit.plan import plan_of
from shardir.dialects import dist, nn
from shardir.dialects.builder import OpBuilder
from shardir.interpret import run


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


# ---- states ----


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
    """The results of the function that update them have the layouts of the states."""
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


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_with_batch_norm_is_torchs(count: int):
    """Statistics are of the global batch, which is split unevenly; only all-reduces communicate.
    Those of one microbatch pass to the next."""
    several = f" accumulate <sum, microbatches = {count}>\n"
    module = shardir.compile(BATCH_NORM.rstrip() + several).module
    assert set(collectives(function(module, "step").body.block.ops)) == {"all_reduce"}
    norm = torch.nn.BatchNorm1d(4, momentum=0.1, dtype=torch.float64)
    x = torch.randn(count, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        norm.weight.copy_(x[0, 0])
    mean, var = norm.running_mean, norm.running_var
    assert mean is not None and var is not None
    state = [norm.weight, norm.bias, mean, var]
    given = [x.squeeze(0).numpy(), *(v.detach().numpy().copy() for v in state)]
    loss = torch.stack([(norm(batch) ** 2).sum() for batch in x]).sum()
    loss.backward()
    with torch.no_grad():
        wanted = [
            loss,
            mean,
            var,
            *(v - 0.5 * v.grad for v in (norm.weight, norm.bias) if v.grad is not None),
        ]
    for y, want in zip(run(module, "step", given), wanted, strict=True):
        assert np.allclose(y, want.detach().numpy(), rtol=1e-9, atol=1e-9)
