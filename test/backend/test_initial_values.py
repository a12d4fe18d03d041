"""Initial values, inputs from files, and the names by which inputs are drawn."""

import json
from pathlib import Path

import numpy as np
import pytest

import shardir
from shardir.diagnostics import ShardirError


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<normal>", "<normal, std = -1.0>", r"\[G10\] expected std to be at least 0, got -1.0"),
        ("<normal>", "<uniform, low = 2.0, high = 1.0>", "expected low to be at most high, 1.0"),
        (
            "<normal>",
            "<integers, low = 0, high = 9223372036854775808>",
            r"\[G10\] expected high to be",
        ),
        (
            "<normal>",
            "<normal, std = 1e400>",
            "expected a number in the range of floats, got 1e400",
        ),
        ("lr = 0.1", "lr = 1e400", "expected a number in the range of floats, got 1e400"),
        (
            '#train.init<file, path = "data.npz", array = "x">',
            '"x"',
            'expected train.input .*got "x"',
        ),
    ],
)
def test_distributions_without_values_are_refused(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    """Some were drawn differently, or ended a run; an attribute that is no init was ignored."""
    np.savez(tmp_path / "data.npz", x=np.zeros(4, np.float32), y=np.zeros(4, np.float32))
    text = STEP.replace("BATCH", "4")
    assert old in text
    with pytest.raises(ShardirError, match=message):
        shardir.compile(text.replace(old, new), base_dir=tmp_path).save(tmp_path / "out")


STEP = """
    func.func private @f(
        %x: tensor<4xf32> {train.input = #train.init<file, path = "data.npz", array = "x">},
        %y: tensor<BATCHxf32> {train.input = #train.init<file, path = "data.npz", array = "y">},
        %w: tensor<f32> {train.parameter = "w", train.init = #train.init<normal>}
    ) -> tensor<f32> {
      %a = nn.reduce <sum> %x dims <0> : (tensor<4xf32>) -> tensor<f32>
      %b = nn.reduce <sum> %y dims <0> : (tensor<BATCHxf32>) -> tensor<f32>
      %c = nn.mul %a, %w : (tensor<f32>, tensor<f32>) -> tensor<f32>
      %loss = nn.mul %b, %c : (tensor<f32>, tensor<f32>) -> tensor<f32>
      func.return %loss : tensor<f32>
    }
    train.step @step of @f <sgd, lr = 0.1>
"""


@pytest.mark.parametrize(("rows", "batch"), [(5, 4), (9, 2)])
def test_inputs_and_labels_stay_together(rows: int, batch: int, tmp_path: Path) -> None:
    """The order of rows depends on their number: other rows were drawn for the labels."""
    np.savez(tmp_path / "data.npz", x=np.zeros(9, np.float32), y=np.zeros(rows, np.float32))
    text = STEP.replace("BATCH", str(batch))
    with pytest.raises(ShardirError, match="expected equal numbers"):
        shardir.compile(text, base_dir=tmp_path).save(tmp_path / "out")


def test_step_that_is_not_differentiated_is_named() -> None:
    with pytest.raises(ShardirError, match="expected functions in place of requests"):
        _ = shardir.compile(STEP.replace("BATCH", "4"), "propagate-strategies").program


def test_no_passes_are_no_passes(tmp_path: Path) -> None:
    """An empty pipeline was replaced by the default one."""
    path = tmp_path / "f.ir"
    path.write_text(STEP.replace("BATCH", "4"))
    assert "train.step @step" in shardir.compile_file(path, "").text
    assert "train.step @step" not in shardir.compile_file(path).text


def test_inputs_that_differ_in_a_number_are_drawn_apart(tmp_path: Path) -> None:
    text = """
    func.func @f(%x_1: tensor<4xf32>, %x_2: tensor<4xf32>) -> tensor<4xf32> {
      %d = nn.sub %x_1, %x_2 : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
      func.return %d : tensor<4xf32>
    }"""
    plan = json.loads((shardir.compile(text).save(tmp_path / "p") / "plan.json").read_text())
    first, second = plan["functions"]["f"]["args"]
    assert first["key"] != second["key"]
