"""A user's script, for type checkers: `make lint` checks it beside the source, and
test_types.py as it is beside an installed package. Nothing runs it."""

from typing import assert_type

import torch
from torch import nn

import shardir
from shardir.api.model import CompiledModel
from shardir.api.steps import CompiledSteps
from shardir.backend.runs import Report


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    program = shardir.compile(
        model, x, labels=y, loss=nn.functional.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters()), mesh="dp = 2, tp = 2",
        plan="megatron(tp) * fsdp(dp)",
    )  # fmt: skip
    assert_type(program, CompiledModel)
    report = program.run([(x, y)], steps=10)
    assert_type(report, Report)
    losses: list[float] = [*report.losses["step"]]
    print(losses[-1], program.text, program.program)
    with program.ranks() as trainer:
        trainer.step(x, y)
    states: dict[str, torch.Tensor] = program.state_dict()
    return states


def train_two(model: nn.Module, x: torch.Tensor) -> CompiledSteps:
    step = shardir.Step(lambda m, x: m(x).sum(), x, optimizer="sgd, lr = 0.1")
    samples = shardir.Inference(lambda m, x: m(x), x)
    program = shardir.compile(model, steps={"step": step, "samples": samples}, mesh={"dp": 2})
    assert_type(program, CompiledSteps)
    return program


def compile_text(path: str) -> None:
    compiled = shardir.compile_file(path, mode="auto")
    assert_type(compiled, shardir.Compiled)
    assert_type(shardir.compile(compiled.text), shardir.Compiled)
    assert_type(shardir.run(compiled, steps=3), Report)
    mesh = shardir.Mesh("m", (("dp", 2),))
    shardir.compare(path, plans=["fsdp", "ddp"], meshes=[mesh])
    try:
        shardir.parse("")
    except shardir.ShardirError as error:
        print(error)
