"""Steps that run again to find the first value that is not finite, before the loss that is not."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.device import DEVICE
from support.extent import extent
from support.ranks.orders import batch_rows

pytest.importorskip("torch")

import torch

import shardir
from shardir.backend.runs import Options, RunError
from shardir.backend.torch.launch.start import run
from shardir.backend.torch.shardir_runtime.checkpoints.saving import Beginning
from shardir.backend.torch.shardir_runtime.run.anomalies import NotFiniteError
from shardir.backend.torch.shardir_runtime.run.replay import Replay

ROWS, BATCH = 26, 6
TEXT = """dist.mesh @m <dp = 2>
func.func private @loss(
  %x: tensor<6x3xf32> {train.input = #train.init<file, path = "data.npz", array = "x">},
  %t: tensor<6x2xf32> {train.input = #train.init<file, path = "data.npz", array = "t">},
  %w: tensor<3x2xf32> {train.parameter = "w", train.init = #train.init<constant, value = 0.5>}
) -> tensor<f32> {
  %y = nn.matmul %x, %w : (tensor<6x3xf32>, tensor<3x2xf32>) -> tensor<6x2xf32>
  %d = nn.sub %y, %t : (tensor<6x2xf32>, tensor<6x2xf32>) -> tensor<6x2xf32>
  %s = nn.square %d : (tensor<6x2xf32>) -> tensor<6x2xf32>
  %loss = nn.reduce <mean> %s dims <0, 1> : (tensor<6x2xf32>) -> tensor<f32>
  func.return %loss : tensor<f32>
}
train.step @step of @loss <sgd, lr = 0.01>
"""
ROOT = TEXT.replace(
    "  %loss = nn.reduce <mean> %s",
    "  %r = nn.sqrt %s : (tensor<6x2xf32>) -> tensor<6x2xf32>\n  %loss = nn.reduce <mean> %r",
)
"""The root of a square has no derivative at 0: the product of 0 and infinity."""

EXPECTED = "step: expected a finite loss, got "
USE = "\n  help: use a lower learning rate, or --allow-nan"
IN_PYTHON = USE.replace("--allow-nan", "allow_nan=True")


def _data() -> dict[str, Any]:
    random = np.random.default_rng(0)
    shapes = {"x": (ROWS, 3), "t": (ROWS, 2)}
    return {name: random.normal(size=s).astype(np.float32) for name, s in shapes.items()}


def _program(folder: Path, data: dict[str, Any], text: str = TEXT) -> Path:
    np.savez(folder / "data.npz", **data)
    (folder / "model.ir").write_text(text)
    return shardir.compile_file(folder / "model.ir").save(folder / "out")


def _error(program: Path, **options: Any) -> str:
    with pytest.raises(RunError) as caught:
        shardir.run(program, steps=30, timeout=30, **options)
    found = str(caught.value)
    assert found.startswith(EXPECTED), found
    return found.removeprefix(EXPECTED)


def _at(text: str, line: str, part: str = "") -> str:
    """The pattern of a place whose line of the source has a text, and that is of a part of it."""
    (number,) = (i for i, x in enumerate(text.splitlines(), 1) if line in x)
    return rf"at program\.py:\d+ \(model\.ir:{number}{part}\)"


def _step_and_rank(row: int) -> tuple[int, int]:
    """The first step, from 1 on, that reads a row, and the rank that does."""
    for step in range(ROWS):
        rows = batch_rows(ROWS, step, BATCH, 0)
        if row in rows:
            return step + 1, rows.index(row) // (BATCH // 2)
    raise AssertionError


@pytest.mark.parametrize("row", extent([5], [3, 5]))
def test_the_rank_that_reads_a_row_with_nan_is_named(tmp_path, row):
    data = _data()
    data["x"][row, 1] = math.nan
    step, rank = _step_and_rank(row)
    log = tmp_path / "log.jsonl"
    found = _error(_program(tmp_path, data), log=log)
    assert (
        found
        == f"nan in step {step}\n  step {step}, rank {rank}: nan first in the input x{IN_PYTHON}"
    )
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [e["loss"] for e in entries if e["event"] == "step"]
    later = 0 if DEVICE == "cpu" else len(losses) - step  # it is read some steps later
    assert [x is None for x in losses] == [False] * (step - 1) + [True] * (1 + later)


def test_the_rows_that_name_a_rank_differ():
    assert {_step_and_rank(row)[1] for row in (3, 5)} == {0, 1}


def test_a_nan_of_the_backward_part_is_of_the_step_before(tmp_path):
    """A row whose error is 0 in the first epoch's step that reads it, as parameters do not move."""
    data, row = _data(), 11
    data["x"][row], data["t"][row] = 1.0, 1.5
    step, rank = _step_and_rank(row)
    text = ROOT.replace("lr = 0.01", "lr = 0.0")
    first = rf"step {step}, rank {rank}"
    pattern = (
        rf"nan in step {step + 1}\n  {first}: nan first as a result of aten\.mul "
        rf"{_at(text, 'nn.square', ', backward')}\n  before that {first}: infinite first as a "
        rf"result of aten\.div {_at(text, 'nn.sqrt', ', backward')}{IN_PYTHON}"
    )
    found = _error(_program(tmp_path, data, text))
    assert re.fullmatch(pattern, found), found


def test_steps_run_again_from_the_last_checkpoint_before(tmp_path):
    """Of the steps 2, 4, ... the last before the one that is watched; none is written or removed
    when steps run again."""
    data, row = _data(), 2
    data["x"][row], data["t"][row] = 1.0, 1.5
    step, rank = _step_and_rank(row)
    program = _program(tmp_path, data, ROOT.replace("lr = 0.01", "lr = 0.0"))
    folder, events = tmp_path / "ckpt", list[dict]()
    options = Options(steps=30, timeout=30, checkpoints=folder, save_every=2, keep=2)
    with pytest.raises(RunError, match=rf"step {step}, rank {rank}: nan first as a result of"):
        run(program, options, on_event=events.append)
    (repeat,) = (e for e in events if e["event"] == "repeat")
    assert repeat["first"] == (step - 1) // 2 * 2 + 1
    last = step // 2 * 2
    assert sorted(p.name for p in folder.iterdir()) == [f"step-{k:08}" for k in (last - 2, last)]


# ---- the search, on one rank that is none ----

READ, WRITTEN = 10, 4
"""The step whose loss reads what an earlier step has written."""


class Steps:
    """Steps that use two values: one of them writes a NaN, which a later one reads."""

    def __init__(self) -> None:
        self.mesh = SimpleNamespace(size=1, rank=0, device="cpu")
        self.states = SimpleNamespace(
            values={"w": torch.ones(2)}, plan=SimpleNamespace(directory=Path())
        )
        self.inputs = {"step": SimpleNamespace(at=lambda _: [], ahead=lambda s: ([] for _ in s))}
        self.sent: list[dict] = []
        self.events = SimpleNamespace(send=lambda **event: self.sent.append(event))
        self.functions = self.eager = {}
        self.done: list[int] = []

    def train_step(self, function: Any, step: int, inputs: list) -> list:
        self.done.append(step + 1)
        w = self.states.values["w"]
        if step + 1 == WRITTEN:
            w[1] = torch.zeros(()) / 0.0
        return [w.sum() if step + 1 == READ else w[0]]

    def loss(self, function: Any, outputs: list) -> float:
        return float(outputs[0])


def _searched(
    runner: Steps, steps: list[int], seconds: float = 0.01, skips: bool = False,
    source: Any = None, asked: bool = False,
) -> str:  # fmt: skip
    """The error where steps can run again from the states after these numbers of steps."""

    def beginning(step: int) -> Any:
        w = torch.tensor([1.0, math.nan if step >= WRITTEN else 1.0])
        path = Path(f"step-{step}") if step else None
        return Beginning(step, path, lambda: runner.states.values.update(w=w.clone()))

    saved: Any = SimpleNamespace(
        beginnings=lambda: [beginning(step) for step in steps], asked=lambda: asked
    )
    function: Any = SimpleNamespace(
        name="step", args=[SimpleNamespace(role="state", source=source)]
    )
    with pytest.raises(NotFiniteError) as caught:
        Replay(runner, function, saved, READ, math.nan).search(seconds, skips)
    found = str(caught.value)
    assert found.startswith(f"{EXPECTED}nan in step {READ}\n  ") and found.endswith(USE), found
    return found.removeprefix(f"{EXPECTED}nan in step {READ}\n  ").removesuffix(USE)


@pytest.mark.parametrize("skips", [False, True])
def test_a_nan_that_is_read_later_is_of_the_step_that_writes_it(skips):
    runner = Steps()
    found = _searched(runner, [2, 0], skips=skips)
    assert found.startswith(f"step {WRITTEN}, rank 0: nan first as a result of aten.div")
    before = READ - (1 if skips else 2)
    assert runner.done == [*range(3, before + 1), 3, WRITTEN]
    assert [event["first"] for event in runner.sent] == [3, 3]


def test_states_with_nan_lead_to_those_before():
    runner = Steps()
    found = _searched(runner, [9, 6, 4, 3, 0])
    assert found.startswith(f"step {WRITTEN}, rank 0: nan first as a result of aten.div")
    assert [event["first"] for event in runner.sent] == [7, 5, 4]
    assert runner.done == [WRITTEN]


def test_states_with_nan_without_others_before_are_the_cause():
    assert _searched(Steps(), [6]) == "rank 0: nan in w of step-6"
    assert _searched(Steps(), [9]) == "rank 0: nan in w of step-9"


def test_a_search_has_its_limits():
    finds = "--detect-anomaly finds the first such value"
    runner = Steps()
    assert _searched(runner, [0], seconds=100) == (
        f"10 steps since the start take too long to run again; {finds}"
    )
    assert _searched(runner, [2, 0], seconds=100) == (
        f"8 steps since step-2 take too long to run again; {finds} with --resume step-2"
    )
    assert _searched(runner, [0], source=7) == f"batches of Python come once; {finds}"
    assert _searched(runner, []).startswith("the checkpoint with which the run began is gone")
    assert not runner.done
    assert _searched(Steps(), [0], asked=True) == finds


class FiniteSteps(Steps):
    """Steps without a NaN."""

    def train_step(self, function: Any, step: int, inputs: list) -> list:
        return [torch.ones(())]


def test_a_loss_that_is_finite_when_steps_run_again():
    assert _searched(FiniteSteps(), [0]) == "it is 1 when the steps run again"
