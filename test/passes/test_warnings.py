"""Programs that compile, but perhaps not as intended: each gets a sentence."""

from pathlib import Path

import numpy as np
import pytest

import shardir
from shardir.syntax.source import collect_warnings

MESH = "dist.mesh @m <d = 4>\n"
SMALL = """func.func @f(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %y = nn.relu %x : (tensor<8x4xf32>) -> tensor<8x4xf32>
  func.return %y : tensor<8x4xf32>
}
"""
LAID_OUT = """func.func @f(%x: tensor<8x4xf32, #dist.layout<@m, [{}, {}]>>)
    -> tensor<8x4xf32, #dist.layout<@m, [{}, {}]>> {
  %y = nn.relu %x : (tensor<8x4xf32, #dist.layout<@m, [{}, {}]>>)
    -> tensor<8x4xf32, #dist.layout<@m, [{}, {}]>>
  func.return %y : tensor<8x4xf32, #dist.layout<@m, [{}, {}]>>
}
"""
EMPTY = "func.func @f() {\n  func.return\n}\n"


def warnings_of(text: str, mode: str) -> list[str]:
    with collect_warnings() as found:
        shardir.compile(text, mode=mode)
    return [message for _, message in found]


@pytest.mark.parametrize("mode", ["semi_auto", "auto"])
def test_a_program_without_a_mesh(mode: str) -> None:
    (message,) = warnings_of(SMALL, mode)
    assert message.startswith("expected a mesh for @f, got none")
    assert warnings_of(MESH + SMALL, "semi_auto") == warnings_of(EMPTY, mode) == []
    assert warnings_of(SMALL, "stand_alone") == []


def test_a_plan_that_replicates_all_values() -> None:
    (message,) = warnings_of(MESH + LAID_OUT, "auto")
    assert message.startswith("expected a plan for @f that splits something over the 4 devices")
    one = MESH.replace("4", "1")
    split = LAID_OUT.replace("[{}, {}]", "[{d}, {}]")
    assert warnings_of(one + LAID_OUT, "auto") == warnings_of(MESH + split, "auto") == []


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (7, 1), (8, 0), (9, 0)])
def test_a_batch_that_is_larger_than_the_data(tmp_path: Path, rows: int, count: int) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((rows, 4), np.float32))
    text = """func.func private @loss(
    %x: tensor<8x4xf32> {train.input = #train.init<file, path = "d.npz", array = "x">},
    %w: tensor<4x2xf32> {train.parameter = "w", train.init = #train.init<normal, std = 1.0>}
) -> tensor<f32> {
  %y = nn.matmul %x, %w : (tensor<8x4xf32>, tensor<4x2xf32>) -> tensor<8x2xf32>
  %l = nn.reduce <mean> %y dims <0, 1> : (tensor<8x2xf32>) -> tensor<f32>
  func.return %l : tensor<f32>
}
train.step @step of @loss <sgd, lr = 0.1>
"""
    compiled = shardir.compile(text, "single-device", base_dir=tmp_path)
    with collect_warnings() as found:
        compiled.save(tmp_path / "out")
    messages = [message for _, message in found]
    assert len(messages) == count
    assert all("expected at least the 8 rows of a batch" in m for m in messages)


def test_a_strategy_that_is_lost_is_a_warning() -> None:
    text = """
    dist.mesh @m <a = 2>
    func.func private @f(%x: tensor<4x8xf32>, %w: tensor<8xf32> {train.parameter = "w", train.init = #train.init<normal>}) -> tensor<f32> {
      %y = nn.mul %x, %w : (tensor<4x8xf32>, tensor<8xf32>) -> tensor<4x8xf32>
      %l = nn.mse_loss <mean> %y, %x strategy<((2, 1), (2, 1))> : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<f32>
      func.return %l : tensor<f32>
    }
    train.step @step of @f <sgd, lr = 0.1>
    """  # noqa: E501 - the text of a program
    with collect_warnings() as early:
        shardir.compile(text, "distributed-autodiff,propagate-strategies")
    assert ["the strategy of nn.mse_loss is lost" in message for _, message in early] == [True]
    with collect_warnings() as late:
        shardir.compile(text, "train")
    assert not late
