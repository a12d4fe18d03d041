"""Evaluations between steps, the log of a run, and values that are not finite."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardir
from shardir.backend.runs import RunError
from shardir.tools import run as tool

ROWS, BATCH, STEPS = 26, 6, 7
MESH = "dist.mesh @m <dp = 2>\n"
LINEAR = """
func.func private @loss(
  %x: tensor<6x3xf32> {train.input = #train.init<batches, path = "data.npz", array = "x">},
  %t: tensor<6x2xf32> {train.input = #train.init<batches, path = "data.npz", array = "t">},
  %w: tensor<3x2xf32> {train.parameter = "w", train.init = #train.init<constant, value = 0.5>}
) -> tensor<f32> {
  %y = nn.matmul %x, %w : (tensor<6x3xf32>, tensor<3x2xf32>) -> tensor<6x2xf32>
  %loss = nn.mse_loss <mean> %y, %t : (tensor<6x2xf32>, tensor<6x2xf32>) -> tensor<f32>
  func.return %loss : tensor<f32>
}
func.func @valid(
  %x: tensor<6x3xf32> {train.input = #train.init<batches, path = "data.npz", array = "vx">},
  %t: tensor<6x2xf32> {train.input = #train.init<batches, path = "data.npz", array = "vt">},
  %w: tensor<3x2xf32> {train.parameter = "w", train.init = #train.init<constant, value = 0.5>}
) -> (tensor<f32>, tensor<6x2xf32>) {
  %y = nn.matmul %x, %w : (tensor<6x3xf32>, tensor<3x2xf32>) -> tensor<6x2xf32>
  %error = nn.mse_loss <mean> %y, %t : (tensor<6x2xf32>, tensor<6x2xf32>) -> tensor<f32>
  func.return %error, %y : tensor<f32>, tensor<6x2xf32>
}
train.step @step of @loss <sgd, lr = 0.01>
"""


def _data(folder: Path, **others: Any) -> dict[str, Any]:
    """Data of which a step has all rows, so that its order does not matter; the evaluation has 4
    batches and two rows more."""
    random = np.random.default_rng(0)
    shapes = {"x": (BATCH, 3), "t": (BATCH, 2), "vx": (ROWS, 3), "vt": (ROWS, 2)}
    data: dict[str, Any] = {
        name: random.normal(size=s).astype(np.float32) for name, s in shapes.items()
    }
    data |= others
    np.savez(folder / "data.npz", **data)
    return data


def _compiled(folder: Path, text: str = LINEAR, base: Path | None = None) -> Path:
    program = shardir.compile(MESH + text, "train", base_dir=base or folder)
    return program.save(folder / "out")


def _expected(data: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses, and after each step the mean error of the four complete batches, in numpy."""
    w, losses, errors = np.full((3, 2), 0.5), [], []
    x, t, vx, vt = (data[name].astype(np.float64) for name in ("x", "t", "vx", "vt"))
    for _ in range(STEPS):
        d = x @ w - t
        losses.append(float((d * d).mean()))
        w = w - 0.01 * 2 / d.size * x.T @ d
        e = vx @ w - vt
        errors.append(float(np.mean([(e[k : k + 6] ** 2).mean() for k in (0, 6, 12, 18)])))
    return losses, errors


def test_functions_are_evaluated_between_steps_over_all_batches(tmp_path):
    data = _data(tmp_path)
    losses, errors = _expected(data)
    log = tmp_path / "log.jsonl"
    report = shardir.run(_compiled(tmp_path), steps=STEPS, eval_every=3, log=log, seed=3)
    np.testing.assert_allclose(report.losses["step"], losses, rtol=1e-5)
    assert [e["step"] for e in report.evaluations] == [3, 6]
    values = [e["value"] for e in report.evaluations] + [report.results[0]["value"]]
    np.testing.assert_allclose(values, [errors[2], errors[5], errors[6]], rtol=1e-5)
    assert (report.samples, report.tokens) == ({"step": BATCH}, {})
    assert 1 << 24 < report.memory < 1 << 34

    lines = [json.loads(line) for line in log.read_text().splitlines()]
    kinds = ["start", *["step"] * 3, "evaluation", *["step"] * 3, "evaluation", "step", "trained",
             "result", "result"]  # fmt: skip
    assert [line["event"] for line in lines] == kinds
    steps = [line for line in lines if line["event"] == "step"]
    assert [line["step"] for line in steps] == [*range(1, STEPS + 1)]
    assert [line["loss"] for line in steps] == report.losses["step"]
    assert lines[4] == {"event": "evaluation", "of": "step", "step": 3, "function": "valid",
                        "name": "error", "value": report.evaluations[0]["value"]}  # fmt: skip


LABELLED = """
func.func @{name}(
  %x: tensor<{rows}x3xf32> {{train.input = #train.init<batches, path = "data.npz", array = "vx">}},
  %t: tensor<{rows}xi64>
      {{train.input = #train.init<batches, path = "data.npz", array = "labels">}},
  %w: tensor<3x2xf32> {{train.parameter = "w", train.init = #train.init<constant, value = 0.5>}}
) -> (tensor<f32>, tensor<f32>) {{
  %y = nn.matmul %x, %w : (tensor<{rows}x3xf32>, tensor<3x2xf32>) -> tensor<{rows}x2xf32>
  %s = nn.mul %y, %y : (tensor<{rows}x2xf32>, tensor<{rows}x2xf32>) -> tensor<{rows}x2xf32>
  %loss = nn.cross_entropy_loss <mean> %s, %t ignore -1 :
      (tensor<{rows}x2xf32>, tensor<{rows}xi64>) -> tensor<f32>
  %mean = nn.reduce <mean> %s dims <0, 1> : (tensor<{rows}x2xf32>) -> tensor<f32>
  func.return %loss, %mean : tensor<f32>, tensor<f32>
}}
"""


def test_an_evaluation_is_over_all_tokens(tmp_path):
    """Its batches have other numbers of labels, one of them none; and so have microbatches."""
    labels = np.random.default_rng(1).integers(-1, 2, ROWS)
    labels[:5] = labels[6:12] = -1
    data = _data(tmp_path, labels=labels)
    text = LABELLED.format(name="valid", rows=6) + LABELLED.format(name="f", rows=3).replace(
        "func.func @f", "func.func private @f"
    )
    request = "train.forward @parts of @f accumulate <tokens, microbatches = 2>\n"
    report = shardir.run(_compiled(tmp_path, text + request))
    x, labels = data["vx"][:24].astype(np.float64), labels[:24]
    y = (x @ np.full((3, 2), 0.5)) ** 2
    log_p = y - np.log(np.exp(y).sum(1, keepdims=True))
    counts = labels >= 0
    loss = -log_p[counts, labels[counts]].mean()
    assert [r["name"] for r in report.results] == ["loss", "mean"] * 2
    found = [r["value"] for r in report.results]
    np.testing.assert_allclose(found, [loss, y.mean()] * 2, rtol=1e-5)


def test_inputs_of_an_evaluation_have_as_many_batches(tmp_path):
    _data(tmp_path, vt=np.zeros((13, 2), np.float32))
    error = r"valid: expected the same number of batches in every input, got 2 of"
    with pytest.raises(RunError, match=error):
        shardir.run(_compiled(tmp_path), steps=1)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, capsys):
    _data(tmp_path)
    program = _compiled(tmp_path, LINEAR.replace("lr = 0.01", "lr = 1e30"))
    infinite = r"step 2, rank [01]: infinite first as a result of aten\.pow at .*:9\)"
    found = rf"^step: .* loss, got inf in step 2\n  {infinite}\n  help: use a lower"
    with pytest.raises(RunError, match=found):
        shardir.run(program, steps=5)
    _data(tmp_path, x=np.full((BATCH, 3), np.nan, np.float32))
    with pytest.raises(RunError, match=r"nan in step 1\n  step 1, rank [01]: nan first in the in"):
        shardir.run(_compiled(tmp_path / "nan", base=tmp_path), steps=5)
    log = tmp_path / "log.jsonl"
    options = ["--steps", "4", "--allow-nan", "--log", str(log)]
    assert tool.main([str(program), *options]) == 0
    assert "warning: step: 3 losses are not finite, the first in step 2" in capsys.readouterr().err
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["loss"] for line in lines if line["event"] == "step"][1:] == [None] * 3


def test_an_infinite_loss_names_its_op_and_leaves_the_checkpoint(tmp_path):
    """The first step is finite, and its checkpoint is complete although the second one is not."""
    loss, exp = "  %loss = nn.mse_loss <mean> %", "  %z = nn.exp %y : (tensor<6x2xf32>)"
    text = LINEAR.replace(f"{loss}y", f"{exp} -> tensor<6x2xf32>\n{loss}z")
    x = np.full((BATCH, 3), 10, np.float32)
    x[::2] *= -1  # the first update makes the products of these rows very large
    _data(tmp_path, x=x)
    with pytest.raises(RunError, match=r"in step 2\n.*: infinite first as a result of aten\.exp"):
        shardir.run(_compiled(tmp_path, text), steps=9, detect_anomaly=True,
                    checkpoints=tmp_path / "ckpt", save_every=1)  # fmt: skip
    assert [path.name for path in (tmp_path / "ckpt").iterdir()] == ["step-00000001"]


def test_the_first_op_with_nan_is_named(tmp_path):
    """The logarithm of a product that is negative for one row."""
    loss, log = "  %loss = nn.mse_loss <mean> %", "  %z = nn.log %y : (tensor<6x2xf32>)"
    text = LINEAR.replace(f"{loss}y", f"{log} -> tensor<6x2xf32>\n{loss}z")
    x = np.ones((BATCH, 3), np.float32)
    x[4] = -1.0  # rank 0 has the rows 0 to 2
    _data(tmp_path, x=x)
    options: dict[str, Any] = {"steps": 2, "allow_nan": True}
    program = _compiled(tmp_path, text)
    with pytest.raises(RunError) as error:
        shardir.run(program, **options, detect_anomaly=True)
    found = re.fullmatch(
        r"step 1, rank 1: nan first as a result of aten\.log at program\.py:(\d+) "
        r"\(.*:(\d+)\)",
        str(error.value),
    )
    assert found is not None, error.value
    line = (program / "program.py").read_text().splitlines()[int(found[1]) - 1]
    assert ".log" in line
    assert "nn.log" in (MESH + text).splitlines()[int(found[2]) - 1]
