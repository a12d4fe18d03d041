"""Clipping and loss scaling are torch's on one device, and take one reduction."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from support.emitted import functions_of
from support.extent import sampled
from support.harness import (
    Array,
    collectives,
    compiled,
    parts,
)
from support.regression_steps import (
    LAYOUTS,
    Ours,
    by_torch,
    compare,
    loss_of,
    module_of,
    start,
)

from shardir.backend.torch.emit.program import program_text
from shardir.backend.torch.shardir_runtime.runtime import Mesh
from shardir.dialects import train
from shardir.interpret import run
from shardir.syntax.parser import parse

# ---- clipping ----


@pytest.mark.parametrize(("most", "texts"), sampled(product([0.3, 100.0], LAYOUTS.values()), 4))
def test_gradients_are_clipped_by_their_global_norm(most: float, texts: list[str | None]):
    values, parameters = start()
    clip = train.ClipAttr.read(f"norm, max = {most}")
    ours = Ours(compiled(module_of("sgd, lr = 0.1", texts, clip=clip), check=True), values)
    optimizer = torch.optim.SGD(parameters, 0.1)

    def clipped(*_: object) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, most)

    optimizer.register_step_pre_hook(clipped)
    compare(ours, parameters, by_torch(optimizer, parameters))


def test_gradients_are_clipped_by_value():
    values, parameters = start()
    clip = train.ClipAttr.read("value, max = 0.05")
    ours = Ours(compiled(module_of("sgd, lr = 0.1", LAYOUTS["both"], clip=clip)), values)
    optimizer = torch.optim.SGD(parameters, 0.1)
    optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_value_(parameters, 0.05))
    compare(ours, parameters, by_torch(optimizer, parameters))


@pytest.mark.parametrize("name", ["both", "split weights", "uneven"])
def test_the_global_norm_takes_one_reduction(name: str):
    """Though parameters are split over different axes."""
    clip = train.ClipAttr.read("norm, max = 1.0")
    plain, clipped = (
        collectives(parts(compiled(made), "step")[1])
        for made in (
            module_of("sgd, lr = 0.1", LAYOUTS[name]),
            module_of("sgd, lr = 0.1", LAYOUTS[name], clip=clip),
        )
    )
    assert clipped["all_reduce"] == plain.get("all_reduce", 0) + 1


# ---- loss scaling ----

TORCH: dict[str, Callable[[Any], Any]] = {
    "sgd, lr = 0.1": lambda p: torch.optim.SGD(p, 0.1),
    "adamw, lr = 0.01": lambda p: torch.optim.AdamW(p, 0.01),
}


@pytest.mark.parametrize(("optimizer", "texts"), sampled(product(TORCH, LAYOUTS.values()), 4))
def test_a_dynamic_loss_scale_is_torchs(optimizer: str, texts: list[str | None]):
    """Steps whose gradients are not finite change nothing, and the scale as GradScaler does."""
    values, parameters = start()
    scale = train.LossScaleAttr.read("dynamic, initial = 1024.0, interval = 3")
    module = module_of(optimizer, texts, loss_scale=scale)
    ours = Ours(compiled(module, check=texts[0] is not None), values)
    theirs = TORCH[optimizer](parameters)
    scaler = torch.amp.GradScaler("cpu", 1024.0, growth_interval=3)

    def step(inputs: list[Array]) -> torch.Tensor:
        theirs.zero_grad()
        loss = loss_of(inputs, parameters)
        scaler.scale(loss).backward()
        scaler.step(theirs)
        scaler.update()
        return loss.detach()

    compare(ours, parameters, step, spoil=(4, 5, 11))
    assert ours.values["step.loss_scale"] == scaler.get_scale() != 1024.0
    if optimizer.startswith("adamw"):
        assert ours.values["step.count"] == 17


NEXT_SCALE = """func.func @f(%scale: tensor<f32>, %good: tensor<i64>, %finite: tensor<i1>) -> (tensor<f32>, tensor<i64>) {
  %s, %g = train.next_loss_scale %scale, %good, %finite growth 2.0 backoff 0.5 interval 3 : (tensor<f32>, tensor<i64>, tensor<i1>) -> (tensor<f32>, tensor<i64>)
  func.return %s, %g : tensor<f32>, tensor<i64>
}"""  # noqa: E501 - the text of a program


@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("good", [0, 1, 2])
@pytest.mark.parametrize("scale", [1.0, 2.0**126, 2.0**127])
def test_the_next_loss_scale_is_torchs(scale: float, good: int, finite: bool):
    """That of the op that GradScaler calls; it does not grow to infinity."""
    module = parse(NEXT_SCALE, verify=True)
    given = [np.array(scale, np.float32), np.array(good), np.array(finite)]
    tensors = [torch.tensor(scale), torch.tensor(good, dtype=torch.int32)]
    amp: Any = torch
    amp._amp_update_scale_(*tensors, torch.tensor(float(not finite)), 2.0, 0.5, 3)
    expected = [float(t) for t in tensors]
    emitted = functions_of(program_text(module))["f"](Mesh((), 0), *map(torch.from_numpy, given))
    assert [float(x) for x in run(module, "f", given)] == expected
    assert [float(x) for x in emitted] == expected
    assert np.isfinite(expected[0])


def test_a_static_loss_scale_changes_nothing_else():
    values, parameters = start()
    scale = train.LossScaleAttr.read("static, factor = 512.0")
    clip = train.ClipAttr.read("norm, max = 0.3")
    module = module_of("sgd, lr = 0.1", LAYOUTS["uneven"], loss_scale=scale, clip=clip)
    optimizer = torch.optim.SGD(parameters, 0.1)
    inner = optimizer.step

    def clipped() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 0.3)
        if all(bool(p.grad.isfinite().all()) for p in parameters if p.grad is not None):
            inner()

    optimizer.step = clipped  # type: ignore[method-assign] - wrapped
    compare(Ours(compiled(module, check=True), values), parameters,
            by_torch(optimizer, parameters), spoil=(3,))  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_whether_all_are_finite_takes_one_reduction(name: str):
    """And the global norm travels with it."""
    options: dict[str, Any] = {"loss_scale": train.LossScaleAttr.read("dynamic"),
               "clip": train.ClipAttr.read("norm, max = 1.0")}  # fmt: skip
    plain, scaled = (
        collectives(parts(compiled(module_of("sgd, lr = 0.1", LAYOUTS[name], **o)), "step")[1])
        for o in ({}, options)
    )
    extra = scaled["all_reduce"] - plain.get("all_reduce", 0)
    assert extra == (name != "data parallel")
