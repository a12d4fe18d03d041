# ruff: noqa: E402 (torch may not be installed)
"""The rows at the end of an epoch that are no batch: they begin the next one, are left out, padded
with a mask, or refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ranks import orders

torch = pytest.importorskip("torch")

import shardir
from shardir.backend.runs import Batches, LaunchError, Options
from shardir.backend.torch.launch.start import run
from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.backend.torch.shardir_runtime.data.inputs import Inputs
from shardir.backend.torch.shardir_runtime.data.sources import with_data
from shardir.backend.torch.shardir_runtime.plan.arrays import array_in
from shardir.backend.torch.shardir_runtime.plan.program import (
    PlanArgument,
    PlanFunction,
    ProgramPlan,
)
from shardir.backend.torch.shardir_runtime.run.states import States
from shardir.tools import run as tool

SEED = 5


def batches(rows: int, batch: int, last: str, count: int, shuffle: bool) -> list[list[int]]:
    """Return the rows of batches, made as the documentation says it: epoch by epoch. Those of the
    padding are -1."""
    found: list[list[int]] = []
    begun: list[int] = []
    for epoch in range(count * batch // rows + 2):
        order = [orders.row(rows, epoch, p, SEED) if shuffle else p for p in range(rows)]
        order, begun = begun + order, []
        found += [order[k : k + batch] for k in range(0, len(order), batch)]
        if len(found[-1]) < batch and last == "wrap":
            begun = found.pop()
        elif len(found[-1]) < batch and last == "drop":
            found.pop()
        elif len(found[-1]) < batch:
            found[-1] += [-1] * (batch - len(found[-1]))
    return found[:count]


def inputs_of(rank: int, ranks: int, args: list[PlanArgument], last: str) -> Inputs:
    step = PlanFunction("step", "step", "step", "f32", tuple(args), ())
    axes = (("d", ranks),)
    plan = with_data(ProgramPlan(Path(), "m", axes, (), (step,), None), None, last)
    return Inputs(States(plan, rt.Mesh(axes, rank), SEED), plan.functions[0])


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("last", ["wrap", "drop", "pad=m"])
@pytest.mark.parametrize(("rows", "batch"), [(13, 5), (12, 4), (4, 4), (9, 8)])
def test_rows_of_batches_are_those_of_their_epoch(rows, batch, last, shuffle, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(rows))
    for micro in (0, 2):
        shape, dims = ((batch,), (("d",),)) if not micro else ((2, batch), ((), ("d",)))
        init = {"kind": "file", "shuffle": shuffle} | ({"microbatches": 2} if micro else {})
        x = PlanArgument("x", shape, "i32", dims, "input", "x", init, array_in(tmp_path / "x.npy"))
        one = {**init, "kind": "constant", "value": 1.0}
        mask = PlanArgument("m", shape, "f32", dims, "input", "m", one)
        steps = [7, *range(7)]
        wanted = batches(rows, batch, last, 2 * (max(steps) + 1), shuffle)
        found: dict[int, list[Any]] = {step: [] for step in steps}
        for rank in range(2):
            inputs = inputs_of(rank, 2, [x, mask], last)
            for step in steps:
                found[step].append(inputs.at(step))
        for step in steps:
            got, ones = (torch.cat(part, -1) for part in zip(*found[step], strict=True))
            want = torch.tensor(wanted[2 * step : 2 * step + 2] if micro else wanted[step])
            assert ones.dtype == torch.float32
            assert ones.tolist() == (want >= 0).float().tolist()
            assert torch.where(want >= 0, got, -1).tolist() == want.tolist()
            assert ((got >= 0) & (got < rows)).all()  # padding is of the values of rows


# ---- on ranks ----

ROWS, BATCH, VALID, STEPS = 10, 4, 14, 7
MASKED = """
dist.mesh @m <dp = 2>
func.func private @loss(
  %x: tensor<4x3xf32, #dist.layout<@m, [{dp}, {}]>> {train.input = #train.init<normal>},
  %t: tensor<4xf32> {train.input = #train.init<normal>},
  %rows: tensor<4xf32> {train.input = #train.init<constant, value = 1.0>},
  %w: tensor<3xf32> {train.parameter = "w", train.init = #train.init<constant, value = 0.5>}
) -> tensor<f32> {
  %y = nn.einsum "ij,j->i" %x, %w : (tensor<4x3xf32, #dist.layout<@m, [{dp}, {}]>>, tensor<3xf32>) -> tensor<4xf32>
  %d = nn.sub %y, %t : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %q = nn.mul %d, %d : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %m = nn.mul %q, %rows : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %total = nn.reduce <sum> %m dims <0> : (tensor<4xf32>) -> tensor<f32>
  %count = nn.reduce <sum> %rows dims <0> : (tensor<4xf32>) -> tensor<f32>
  %loss = nn.div %total, %count : (tensor<f32>, tensor<f32>) -> tensor<f32>
  func.return %loss : tensor<f32>
}
func.func @valid(
  %x: tensor<4x3xf32> {train.input = #train.init<normal>},
  %rows: tensor<4xf32> {train.input = #train.init<constant, value = 1.0>},
  %w: tensor<3xf32> {train.parameter = "w", train.init = #train.init<constant, value = 0.5>}
) -> (tensor<f32>) {
  %y = nn.einsum "ij,j->i" %x, %w : (tensor<4x3xf32>, tensor<3xf32>) -> tensor<4xf32>
  %m = nn.mul %y, %rows : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %total = nn.reduce <sum> %m dims <0> : (tensor<4xf32>) -> tensor<f32>
  %count = nn.reduce <sum> %rows dims <0> : (tensor<4xf32>) -> tensor<f32>
  %mean = nn.div %total, %count : (tensor<f32>, tensor<f32>) -> tensor<f32>
  func.return %mean : tensor<f32>
}
train.step @step of @loss <sgd, lr = 0.05>
"""  # noqa: E501 - the text of a program


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A directory, and data for it: beside the steps those of four batches, the last with two
    rows."""
    folder = tmp_path_factory.mktemp("masked")
    random = np.random.default_rng(0)
    shapes = {"x": (ROWS, 3), "t": (ROWS,), "v": (VALID, 3)}
    data: dict[str, Any] = {
        name: random.normal(size=shape).astype("<f4") for name, shape in shapes.items()
    }
    np.savez(folder / "d.npz", **data)
    shardir.compile(MASKED, "train").save(folder / "out")
    return folder, data


def test_a_padded_batch_has_the_loss_of_its_rows(program, capsys):
    """In torch each batch has the rows that the epoch has left, and the evaluation all rows at
    once."""
    folder, data = program
    words = ["--data", f"x,t={folder}/d.npz", "--data", f"valid.x={folder}/d.npz:v",
             "--last", "pad=rows", "--seed", str(SEED), "--check", f"--log={folder}/log",
             f"--steps={STEPS}", "--eval-every=3"]  # fmt: skip
    assert tool.main([str(folder / "out"), *words]) == 0
    assert ": agree" in capsys.readouterr().out
    x, t, v = (torch.tensor(data[name]).double() for name in "xtv")
    w = torch.full((3,), 0.5, dtype=torch.float64, requires_grad=True)
    losses, values = [], []
    for rows in batches(ROWS, BATCH, "pad", STEPS, shuffle=True):
        mine = [row for row in rows if row >= 0]
        loss = torch.nn.functional.mse_loss(x[mine] @ w, t[mine])
        (gradient,) = torch.autograd.grad(loss, w)
        w = (w - 0.05 * gradient).detach().requires_grad_()
        losses.append(loss.item())
        values.append((v @ w).mean().item())
    events = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    found = [e["loss"] for e in events if e["event"] == "step"]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    found = [e["value"] for e in events if e["event"] in ("evaluation", "result")]
    np.testing.assert_allclose(found, [values[2], values[5], values[6]], rtol=1e-5)


@pytest.mark.parametrize(
    ("last", "given", "message"),
    [
        ("refuse", "x,t", "--last refuse: expected a multiple of the 4 rows of a batch, got 10 of"),
        ("drop", "", "--last drop: expected rows of files, which step does not read"),
        ("pad=mask", "x,t", "expected an input of x, t, rows as the mask, got 'mask'"),
        ("pad=x", "x,t", r"expected a number for each row of a batch as the mask, got x of [4, 3]"),
        ("pad=rows", "", "with equally many rows of files, 4 at a step as rows has them, got none"),
    ],
)
def test_what_cannot_be_padded_or_left_is_an_error(last, given, message, program, capsys):
    folder, _ = program
    words = ["--data", f"{given}={folder}/d.npz"] if given else []
    assert tool.main([str(folder / "out"), "--last", last, *words]) == 2
    assert message in capsys.readouterr().err


def test_of_batches_of_python_none_is_short(program):
    folder, _ = program
    for last in ("some", "pad=", "padding"):
        with pytest.raises(SystemExit):
            tool.main([str(folder / "out"), "--last", last])
    with pytest.raises(LaunchError, match="--last drop: expected rows of files, got batches"):
        run(folder / "out", Options(last="drop"), batches=Batches(iter([])))
