"""Replicas that train on their own between synchronisations: local SGD and DiLoCo."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.extent import extent
from support.ranks.example_runs import EXAMPLES
from torch import nn

import shardir

REPLICAS, EVERY, STEPS, BATCH = 2, 3, 8, 4
OUTER = "nesterov, replicas = 2, every = 3, lr = 0.7, momentum = 0.9"


class Model(nn.Module):
    """Two layers, and a norm whose running statistics the evaluation uses too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def _compiled(**options: Any) -> Any:
    model = Model()
    given: dict[str, Any] = {"sync": OUTER, "mesh": "tp = 2", "plan": "megatron(tp)", **options}
    return shardir.compile(
        model, torch.zeros(BATCH, 6), labels=torch.zeros(BATCH, 4), loss=nn.functional.mse_loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), **given,
    )  # fmt: skip


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [(torch.randn(BATCH, 6, generator=random), torch.randn(BATCH, 4, generator=random))
            for _ in range(STEPS * REPLICAS)]  # fmt: skip


def _by_torch(microbatches: int = 1) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The mean losses of the replicas, and the values that were synchronised last, by torch."""
    shared = Model()
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    replicas = [copy.deepcopy(shared) for _ in range(REPLICAS)]
    inner = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in replicas]
    losses, rows = list[float](), iter(_batches())
    for step in range(STEPS // microbatches):
        each = []
        for model, optimizer in zip(replicas, inner, strict=True):
            optimizer.zero_grad()
            for _ in range(microbatches):
                x, y = next(rows)
                loss = nn.functional.mse_loss(model(x), y) / microbatches
                loss.backward()
                each.append(loss.item())
            optimizer.step()
        losses.append(sum(each) / REPLICAS)
        if (step + 1) % EVERY:
            continue
        for name, w in shared.named_parameters():
            w.grad = w.detach() - torch.stack([m.state_dict()[name] for m in replicas]).mean(0)
        outer.step()
        for name, x in shared.state_dict().items():
            if name not in dict(shared.named_parameters()):
                each = torch.stack([m.state_dict()[name] for m in replicas])
                x.copy_(each.mean(0) if x.is_floating_point() else each.amax(0))
        for model in replicas:
            with torch.no_grad():
                for name, x in model.state_dict().items():
                    x.copy_(shared.state_dict()[name])
    return losses, shared.state_dict()


@pytest.mark.parametrize("microbatches", extent([2], [1, 2]))
def test_replicas_are_those_of_torch(microbatches: int, tmp_path: Path) -> None:
    several = {"accumulate": f"mean, microbatches = {microbatches}"} if microbatches > 1 else {}
    program = _compiled(**several)
    dump = tmp_path / "dump.npz"
    report = program.run(_batches(), steps=STEPS // microbatches, dump=dump)
    losses, states = _by_torch(microbatches)
    np.testing.assert_allclose(report.losses["step"], losses, rtol=1e-5)
    with np.load(dump) as found:
        for name, x in states.items():
            np.testing.assert_allclose(found[f"states/{name}"], x, rtol=1e-4, atol=1e-6)


ROWS = """
dist.mesh @m <MESH>
func.func private @loss(
    %x: tensor<4x6xf32> {train.input = #train.init<file, path = "rows.npz", array = "x">},
    %w: tensor<6x3xf32, #dist.layout<@m, [{}, {}]>>
      {train.parameter = "w", train.init = #train.init<normal, std = 0.5>}
) -> tensor<f32> {
  %y = nn.matmul %x, %w : (tensor<4x6xf32>, tensor<6x3xf32, #dist.layout<@m, [{}, {}]>>)
    -> tensor<4x3xf32>
  %t = nn.tanh %y : (tensor<4x3xf32>) -> tensor<4x3xf32>
  %s = nn.square %t : (tensor<4x3xf32>) -> tensor<4x3xf32>
  %loss = nn.reduce <mean> %s dims <0, 1> : (tensor<4x3xf32>) -> tensor<f32>
  func.return %loss : tensor<f32>
}
train.step @step of @loss <sgd, lr = 0.2> CLAUSE
"""


def _of_rows(folder: Path, clause: str, mesh: str = "d = 1") -> Any:
    rows = np.random.default_rng(0).standard_normal((37, 6)).astype(np.float32)
    np.savez(folder / "rows.npz", x=rows)
    source = folder / "rows.ir"
    source.write_text(ROWS.replace("MESH", mesh).replace("CLAUSE", clause))
    return shardir.compile_file(source)


def _values(program: Any, folder: Path, **options: Any) -> tuple[list[float], Any]:
    report = program.run(dump=folder / "dump.npz", **options)
    with np.load(folder / "dump.npz") as found:
        return report.losses["step"], found["states/w"]


def test_synchronous_replicas_are_data_parallel(tmp_path: Path) -> None:
    """Gradient descent whose parameters are averaged after each step is one whose gradients are, on
    the same rows of a file."""
    sync = "sync <sgd, replicas = 4, every = 1, lr = 1.0>"
    found = _values(_of_rows(tmp_path, sync), tmp_path, steps=9)
    expected = _of_rows(tmp_path, "accumulate <mean, microbatches = 4>", "d = 2")
    for x, y in zip(found, _values(expected, tmp_path, steps=9), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)


def test_a_resumed_run_is_the_one_that_was_not_interrupted(tmp_path: Path) -> None:
    """Between two synchronisations each replica goes on from its own values, on any mesh."""
    sync = "sync <momentum, replicas = 2, every = 4, lr = 0.9, momentum = 0.5>"
    program, checkpoints = _of_rows(tmp_path, sync), tmp_path / "checkpoints"
    uninterrupted = _values(program, tmp_path, steps=9)
    program.run(steps=6, checkpoints=checkpoints, save_every=6)
    for other, tolerance in ((program, 0.0), (_of_rows(tmp_path, sync, "d = 2"), 1e-5)):
        losses, w = _values(other, tmp_path, steps=9, resume=checkpoints)
        np.testing.assert_allclose(losses, uninterrupted[0][6:], rtol=tolerance)
        np.testing.assert_allclose(w, uninterrupted[1], rtol=tolerance)


COUNTED = """

def _counted(mesh, x, reduction, axes, *args, _call=all_reduce, **options):
    each = x if isinstance(x, list) else [x]
    with open(f"{__file__}.{mesh.rank}", "a") as file:
        print("replica" in axes, sum(t.nbytes for t in each), file=file)
    return _call(mesh, x, reduction, axes, *args, **options)


all_reduce = _counted
"""
REDUCTIONS = "shardir_runtime/collectives/reductions.py"


def test_replicas_communicate_what_the_cost_model_says(tmp_path: Path) -> None:
    """Between two synchronisations nothing but their losses, 8 bytes for each step."""
    program = _compiled()
    out = program.save(tmp_path / "out")
    with (out / REDUCTIONS).open("a") as file:
        file.write(COUNTED)
    shardir.run(out, steps=STEPS)
    (received, _), = (
        cost for axes, cost in program.cost("step_sync").communication.items()
    )  # fmt: skip
    for rank in range(REPLICAS * 2):
        lines = (out / f"{REDUCTIONS}.{rank}").read_text().split("\n")[:-1]
        found = sum(int(n) for over, n in map(str.split, lines) if over == "True")
        ring = 2 * (REPLICAS - 1) / REPLICAS
        assert ring * found == received * (STEPS // EVERY) + ring * 8 * STEPS


def test_a_parameter_server_descends_as_one_device_does(tmp_path: Path) -> None:
    """Its workers have all rows, the server none."""
    rows = np.random.default_rng(0)
    x, t = (rows.standard_normal((4, n)).astype(np.float32) for n in (4, 2))
    np.savez(tmp_path / "rows.npz", x=x, t=t)
    program = shardir.compile_file(EXAMPLES / "parameter_server.ir", pipeline="lower-layouts")
    data = {"x,t": tmp_path / "rows.npz"}
    _, first = _values(program, tmp_path, data=data, steps=1)
    losses, last = _values(program, tmp_path, data=data, steps=STEPS)
    w = torch.from_numpy(first).requires_grad_()
    optimizer = torch.optim.SGD([w], lr=0.08)
    expected = []
    for _ in range(1, STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(torch.from_numpy(x) @ w, torch.from_numpy(t))
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    np.testing.assert_allclose(losses[1:], expected, rtol=1e-5)
    np.testing.assert_allclose(last, w.detach(), rtol=1e-4, atol=1e-6)
