"""Metrics of steps, callbacks that end a run, and TensorBoard's files."""

import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.extent import extent
from torch import nn

import shardir
from shardir.backend.runs import RunError

STEPS, MICROBATCHES, MAXIMUM = 5, 2, 0.1
METRICS = ("largest", "near", "learning_rate", "gradient_norm")


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def _optimizer(model: nn.Module, steps: int = STEPS) -> tuple[Any, Any]:
    found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return found, torch.optim.lr_scheduler.CosineAnnealingLR(found, T_max=steps, eta_min=0.01)


def _loss(outputs: torch.Tensor, labels: torch.Tensor) -> Any:
    """The loss, and metrics of a float and of an integer that depend on parameters, and have no
    gradient."""
    loss = nn.functional.mse_loss(outputs, labels)
    near = outputs.argmax(-1) == labels.argmax(-1)
    return loss, {"largest": 3 * outputs.max(), "near": near.sum()}


def _compiled(steps: int = STEPS, **options: Any) -> Any:
    model = _model()
    optimizer, scheduler = _optimizer(model, steps)
    return shardir.compile(
        model, torch.zeros(8, 6), labels=torch.zeros(8, 4), loss=_loss,
        optimizer=optimizer, scheduler=scheduler, metrics="learning_rate, gradient_norm",
        **options,
    )  # fmt: skip


def _batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=random), torch.randn(8, 4, generator=random))
            for _ in range(count)]  # fmt: skip


def _trained(
    steps: int, clips: bool, of: int = STEPS, mean: bool = True
) -> tuple[nn.Module, dict[str, list[float]]]:
    """The model after so many `of` the steps, and the metrics, by torch on one device. `mean`: the
    losses of microbatches become their mean, else their sum."""
    model, batches = _model(), _batches(steps * MICROBATCHES)
    optimizer, scheduler = _optimizer(model, of)
    found: dict[str, list[float]] = {name: [] for name in METRICS}
    for step in range(steps):
        optimizer.zero_grad()
        means = dict.fromkeys(("largest", "near"), 0.0)
        for x, y in batches[step * MICROBATCHES : (step + 1) * MICROBATCHES]:
            loss, metrics = _loss(model(x), y)
            (loss / (MICROBATCHES if mean else 1)).backward()
            for name, value in metrics.items():
                means[name] += value.item() / MICROBATCHES
        for name, mean_value in means.items():
            found[name].append(mean_value)
        found["learning_rate"].append(scheduler.get_last_lr()[0])
        maximum = MAXIMUM if clips else float("inf")
        norm = nn.utils.clip_grad_norm_(model.parameters(), maximum)
        found["gradient_norm"].append(float(norm))
        optimizer.step()
        scheduler.step()
    return model, found


CLIPPED = {"clip": f"norm, max = {MAXIMUM}", "loss_scale": "static, factor = 1024.0"}
CASES: list[tuple[dict[str, Any], bool, str]] = [
    ({"mesh": "dp = 2, tp = 2", "plan": "megatron(tp) * fsdp(dp)"}, False, "mean"),
    ({"stages": "1f1b, ranks = 2"}, False, "mean"),
    ({"mesh": "dp = 2", "plan": "fsdp", "trace": True, **CLIPPED}, True, "sum"),
    ({"mesh": "dp = 2", "plan": "fsdp", **CLIPPED}, True, "mean"),
    ({"mesh": "dp = 2", "plan": "fsdp", "trace": True}, False, "sum"),
]


@pytest.mark.parametrize(("options", "clips", "kind"), extent(CASES[1:3], CASES))
def test_metrics_are_those_of_torch(
    options: dict[str, Any], clips: bool, kind: str, tmp_path: Path
) -> None:
    program = _compiled(accumulate=f"{kind}, microbatches = {MICROBATCHES}", **options)
    report = program.run(
        _batches(STEPS * MICROBATCHES), steps=STEPS, log=tmp_path / "log", tensorboard=tmp_path
    )
    _, expected = _trained(STEPS, clips, mean=kind == "mean")
    found = report.metrics["step"]
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5)
    lines = map(json.loads, (tmp_path / "log").read_text().splitlines())
    logged = [line for line in lines if line["event"] == "step"]
    assert [line["metrics"] for line in logged] == [
        {n: found[n][i] for n in found} for i in range(STEPS)
    ]
    for line in logged:
        assert line["rates"]["samples"] == line["rates"]["steps"] * report.samples["step"]
    (board,) = tmp_path.glob("events.out.tfevents.*")
    drawn = _scalars(board.read_bytes())
    of_run = ("memory", "steps_per_second", "samples_per_second")
    assert drawn.keys() == {f"step/{name}" for name in ("loss", *METRICS, *of_run)}
    for name, values in {"loss": report.losses["step"], **found}.items():
        assert [step for step, _ in drawn[f"step/{name}"]] == [*range(1, STEPS + 1)]
        np.testing.assert_allclose([x for _, x in drawn[f"step/{name}"]], values, rtol=1e-6)


def _scalars(data: bytes) -> dict[str, list[tuple[int, float]]]:
    """The scalars of a file of TensorBoard: records of a length, its checksum, an event, and the
    checksum of that."""
    # pyrefly: ignore[missing-module-attribute] - protobuf makes it while it is imported
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, list[tuple[int, float]]] = {}
    while data:
        (size,) = struct.unpack_from("<Q", data)
        event = Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_a_callback_ends_the_training() -> None:
    """The ranks end after the same step, and the values are those of so many steps."""
    entries = list[dict[str, Any]]()

    def stop(entry: dict[str, Any]) -> bool:
        entries.append(entry)
        return entry["event"] == "step" and entry["step"] == 2

    program = _compiled(2000, mesh="dp = 2", accumulate=f"mean, microbatches = {MICROBATCHES}")
    batches = _batches(2000 * MICROBATCHES)
    slow = (batch for batch in batches if time.sleep(0.01) is None)
    report = program.run(slow, steps=2000, callback=stop, parameters=True)
    steps = len(report.losses["step"])
    assert 2 <= steps < 2000
    assert [e["loss"] for e in entries if e["event"] == "step"] == report.losses["step"]
    assert [e["event"] for e in entries if e["event"] != "step"] == ["start", "trained"]
    model, _ = _trained(steps, clips=False, of=2000)
    states = program.state_dict()
    assert list(report.parameters) == [name for name, _ in model.named_parameters()]
    for name, value in report.parameters.items():
        np.testing.assert_array_equal(value, states[name])
    for name, value in states.items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_an_exception_of_a_callback_is_raised() -> None:
    def fail(entry: dict[str, Any]) -> None:
        if entry["event"] == "step":
            raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        _compiled(mesh="dp = 2").run(_batches(1), steps=50, callback=fail)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((shardir.backend.runs.LaunchError, RunError), match="cannot write"):
        _compiled(mesh="dp = 2").run(_batches(1), steps=1, tensorboard=tmp_path / "file")
