"""The exit codes of shard-run after a run, and the words for an error of the system."""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from io import TextIOWrapper
from itertools import product
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from shardir.backend.runs import Report
from shardir.backend.torch import backend  # noqa: F401 (before `start.run` is replaced)
from shardir.backend.torch.launch import report, start
from shardir.backend.torch.launch.report import Difference
from shardir.tools import commands, run

WITHIN, BEYOND = 0.1, 0.3
ALLOWED = 0.2


@pytest.mark.parametrize("count", [1, 2, 3])
def test_it_is_1_if_any_result_disagrees(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "forks", lambda _: nullcontext())
    monkeypatch.setattr(start, "read_plan", lambda *_: None)
    monkeypatch.setattr(report, "summary", lambda _: ())
    for found in product((WITHIN, BEYOND), repeat=count):
        differences = [Difference(f"w{i}", d, ALLOWED) for i, d in enumerate(found)]
        checked = Report(1, "gloo"), differences
        monkeypatch.setattr(report, "run_and_check", lambda *_, c=checked: c)
        assert run.main([str(tmp_path), "--check"]) == int(BEYOND in found)
        assert capsys.readouterr().out.count("DISAGREE") == found.count(BEYOND)


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ([2.0, 1.0], ""),
        ([nan, 1.0], "warning: step: 1 losses are not finite, the first in step 1\n"),
        ([1.0, inf, nan], "warning: step: 2 losses are not finite, the first in step 2\n"),
    ],
)
def test_losses_that_are_not_finite_are_a_warning_where_they_are_allowed(
    losses: list[float],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run, "forks", lambda _: nullcontext())
    monkeypatch.setattr(start, "read_plan", lambda *_: None)
    found = Report(1, "gloo", losses={"step": losses}, steps_per_second={"step": 10.0})
    monkeypatch.setattr(start, "run", lambda *_, **__: found)
    assert run.main([str(tmp_path), "--allow-nan"]) == 0
    assert capsys.readouterr().err == message


def test_an_error_of_the_system_says_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(work: Callable[[], Any]) -> str:
        with pytest.raises(OSError) as e:
            commands._exit_code(work)
        return commands._subject(e.value)

    assert failing(lambda: os.stat("/no/file")) == "/no/file"
    of_ours = failing(lambda: os.dup(-1))
    assert of_ours.startswith("the system refused what tools/commands.py:")
    with Path("/dev/full").open("wb", buffering=0) as full, monkeypatch.context() as m:
        m.setattr(sys, "stdout", commands.Output(TextIOWrapper(full, write_through=True)))
        assert failing(lambda: print("text", flush=True)) == "cannot write the output"


def test_a_warning_of_the_compiler_has_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "forks", lambda _: nullcontext())
    monkeypatch.setattr(start, "run", lambda *_, **__: Report(1, "gloo"))
    path = tmp_path / "f.ir"
    body = "  %y = nn.relu %x : (tensor<f32>) -> tensor<f32>\n  func.return %y : tensor<f32>"
    text = f"func.func @f(%x: tensor<f32>) -> tensor<f32> {{\n{body}\n}}\n"
    path.write_text(f"\n{text}")
    assert run.main([str(path), "--mode", "auto"]) == 0
    assert capsys.readouterr().err.startswith(f"{path}:2:1: warning: expected a mesh for @f")
