"""The models of the benchmark: their bytes are at most the formulas', their steps are torch's."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from support.extent import extent, sampled
from support.harness import apply, compiled, differs, function
from support.reference import to_torch, torch_forward
from xdsl.dialects.builtin import TensorType

from shardir.dialects import train
from shardir.interpret import run
from shardir.interpret.equivalence import random_arguments
from shardir.syntax.parser import parse
from shardir.tools import bench

communication = bench.load("bytes")

MEGATRON = {2: 7_224_324, 4: 12_999_684, 8: 24_550_404, 16: 47_651_844}
MLP = 1_146_884
LEFT_OUT = extent(("4 layers", "8 layers", "16 layers"), ())
"""The depths that are not compiled by default."""


@pytest.mark.parametrize("model", ["gpt", "mlp", "dlrm", *extent([], ["bert", "resnet50"])])
def test_a_model_communicates_no_more_than_the_formula(model: str):
    rows = [r for r in communication.rows() if r.model.split(",")[0] == model]
    assert rows
    for row in rows:
        if not row.model.endswith(LEFT_OUT):
            _, total = communication.communicated(communication.compiled(row.text))
            assert total <= row.formula, row


MODELS = ["gpt", "bert"]
PLANS = [(2, 4, False), (2, 4, True), (8, 1, False), (8, 1, True), (1, 8, False)]
SIZES = [
    communication.Sizes(2, vocab=32_768),
    communication.Sizes(2, batch=64),
    communication.Sizes(2, hidden=1024, vocab=32_768, seq=16),
]
OTHERS = sampled(product(MODELS, PLANS, SIZES), 3)


@pytest.mark.parametrize(("model", "plan", "sizes"), OTHERS, ids=str)
def test_it_communicates_no_more_at_other_sizes(model: str, plan: tuple[int, int, bool], sizes):
    dp, tp, fsdp = plan
    row = communication.language_model(model, sizes, dp, tp, fsdp=fsdp)
    _, total = communication.communicated(communication.compiled(row.text))
    assert total <= row.formula


def test_formulas_are_those_of_the_peers():
    found = {(r.model, r.plan): r.formula for r in communication.rows()}
    assert {n: found[f"gpt, {n} layers", "Megatron"] for n in MEGATRON} == MEGATRON
    assert found["mlp, 2 layers", "Megatron"] == MLP


# ---- the steps, in small ----

LAYERS = extent(1, 2)
LM = {"layers": LAYERS, "batch": 4, "seq": 6, "hidden": 16, "heads": 4, "vocab": 12, "lr": 0.5}
CLICKS = {
    "devices": 4, "batch": 8, "tables": 4, "rows": 6, "width": 8, "dense": 4, "bottom": (8,),
    "top": (8,), "lr": 0.5,
}  # fmt: skip
SMALL: dict[str, Callable[[], str]] = {
    "gpt": lambda: communication.gpt(**LM),
    "gpt, FSDP + TP": lambda: communication.gpt(**LM, fsdp=True),
    "gpt, FSDP": lambda: communication.gpt(**LM, fsdp=True, mesh=(4, 1)),
    "bert": lambda: communication.bert(**LM),
    "bert, FSDP + TP": lambda: communication.bert(**LM, fsdp=True),
    "mlp": lambda: communication.mlp(batch=4, dim=8, hidden=16, lr=0.5),
    **{
        f"dlrm by {split}": lambda split=split: communication.dlrm(split=split, **CLICKS)
        for split in ("tables", "columns", "rows")
    },
    "resnet": lambda: communication.resnet(
        blocks=(1, 1), width=4, batch=4, image=16, classes=4, element="f32", dp=2
    ),
}


@pytest.mark.parametrize("model", sampled(SMALL, 2))
def test_its_step_is_that_of_torch(model: str):
    module = parse(SMALL[model]())
    plain = apply(module.clone(), "strip-layouts")
    compiled(module, check=True)
    f, step = function(plain, "loss"), function(module, "step")
    values = random_arguments(f, plain)
    leaves = [to_torch(v) for v in values]
    names = [a.key if a.role is train.Role.PARAMETER else None for a in train.arguments(f)]
    weights = [w.requires_grad_() for w, n in zip(leaves, names, strict=True) if n]
    wanted, *_ = torch_forward(f, leaves)
    wanted.backward()
    (request,) = (op for op in plain.body.ops if isinstance(op, train.StepOp))
    options = dict(request.optimizer.values)
    torch.optim.SGD(weights, **options).step()
    for t in step.function_type.inputs.data[len(values) :]:
        assert isinstance(t, TensorType)
        values.append(np.zeros(t.get_shape(), np.float32))  # velocities
    loss, *new = run(module, "step", values)
    assert not differs(loss, wanted.detach().numpy().astype(np.float32), "f32", 10)
    ours = dict(zip(train.updated_keys(step)[1:], new, strict=True))
    for name, w in zip(filter(None, names), weights, strict=True):
        assert not differs(ours[name], w.detach().numpy().astype(np.float32), "f32", 10), name
