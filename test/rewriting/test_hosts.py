"""Ops of values that are `on host`, in numpy on all ranks: results are those without it,
bit by bit unless sums have another order; states do not move; an op's values are in one memory."""

import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from support.extent import sampled
from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import BlockArgument, Operation, SSAValue

import shardir
from shardir.cost.functions import functions
from shardir.dialects import dist
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.random import fill
from shardir.dialects.train import Argument, Update, arguments
from shardir.interpret import run

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "offload.ir"
TEXT = re.sub(r"(, train.state_layout =|,) #dist.layout<[^>]*>", "", EXAMPLE.read_text())
KINDS = {"f32": np.float32, "f64": np.float64, "i64": np.int64, "i32": np.int32}
OPTIMIZERS = [
    "sgd, lr = 0.1>", "momentum, lr = 0.1, momentum = 0.9> loss_scale <dynamic>",
    "lamb, lr = 0.1> clip <norm, max = 0.5>", "adafactor, lr = 0.1>",
    "lars, lr = 0.1, momentum = 0.9>", "nesterov, lr = 0.1, momentum = 0.9>",
    "adamw, lr = cosine<rate = 0.1, steps = 9>>",
]  # fmt: skip
PLANS = ['"*" : [], states [{dp}] on host', '"*" : [{tp}] on host']


def lowered(text: str, plan: str, pipeline: str) -> FuncOp:
    module = shardir.compile(text, pipeline, plan=f"inputs : [{{dp}}]\n{plan}").module
    return next(f for f, _ in functions(module))


def on_host(v: SSAValue) -> bool:
    layout = dist.layout_of(v)
    return layout is not None and layout.host


@pytest.mark.parametrize(
    ("optimizer", "plan", "pipeline"),
    sampled(product(OPTIMIZERS, PLANS, ["train", "auto{overlap=false}"]), 9),
)
def test_states_stay_where_they_are(optimizer: str, plan: str, pipeline: str) -> None:
    """But in plans of presets, which may gather a state by way of devices."""
    text = TEXT.replace("adamw, lr = 0.1>", optimizer)
    f = lowered(text, plan, pipeline)
    args = zip(f.body.block.args, arguments(f), strict=True)
    states = {v for v, a in args if a.role == "state" and on_host(v)}
    assert bool(states) is ("sgd" not in optimizer)
    for op in f.body.block.ops:
        if isinstance(op, dist.CopyOp):
            assert states.isdisjoint(op.values)
            assert all(
                on_host(v) is not on_host(x) for v, x in zip(op.values, op.outs, strict=True)
            )
        elif isinstance(op, TensorOp):
            assert len({on_host(v) for v in (*op.operands, *op.results)}) == 1
            if isinstance(op, Update) and not states.isdisjoint(op.operands):
                assert on_host(op.results[0])
    returned = f.body.block.last_op
    assert isinstance(returned, Operation)
    new = [v for v in returned.operands if on_host(v)]
    made = [v.owner for v in new]
    assert len(new) >= len(states)
    assert sum(not isinstance(op, dist.CollectiveOp | dist.WaitOp) for op in made) >= len(states)


@pytest.mark.parametrize("by", ["plan", "budget"])
@pytest.mark.parametrize("optimizer", ["adamw, lr = 0.1>", OPTIMIZERS[-1]])
def test_hosts_compute_the_numbers_of_their_updates(optimizer: str, by: str) -> None:
    """Of scalars they get copies of arguments alone, wherever it is decided what is on hosts."""
    text = TEXT.replace("adamw, lr = 0.1>", optimizer)
    if by == "plan":
        f = lowered(text, PLANS[0], "train")
    else:
        f = lowered(text, "", "train{recompute=0.65 offload=true}")
    updates = [op for op in f.body.block.ops if isinstance(op, Update)]
    there = [op for op in updates if on_host(op.results[0])]
    assert there and all(on_host(v) for op in there for v in op.operands)
    for op in f.body.block.ops:
        if isinstance(op, dist.CopyOp):
            layout = dist.layout_of(op.values[0])
            assert layout is not None and (layout.dims or isinstance(op.values[0], BlockArgument))


def initial(v: SSAValue, a: Argument, shape: tuple[int, ...]) -> np.ndarray:
    assert isinstance(v.type, TensorType)
    kind = KINDS[str(v.type.element_type)]
    if a.role == "state":
        return np.full(shape, "loss_scale" in (a.key or ""), kind)
    if kind is np.int32:
        return np.arange(8, dtype=kind) % 3
    return fill("normal", {"mean": 0.0, "std": 0.5}, shape, None, a.key or "x", kind)


@pytest.mark.parametrize(("optimizer", "plan"), sampled(product(OPTIMIZERS, PLANS), 5))
def test_results_are_those_without_hosts(optimizer: str, plan: str) -> None:
    text = TEXT.replace("adamw, lr = 0.1>", optimizer)
    found = []
    for p in (plan, plan.replace(" on host", "")):
        compiled = shardir.compile(text, plan=f"inputs : [{{dp}}]\n{p}")
        f, mesh = next(functions(compiled.module))
        args = zip(f.body.block.args, arguments(f), strict=True)
        values = [initial(v, a, dist.global_shape(v.type, mesh)) for v, a in args]
        found.append(run(compiled.module, "step", values))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5 if "adafactor" in optimizer else 0)
