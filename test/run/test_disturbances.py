"""Disturbed commands: some cases of `make faults`, forked from one process."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.extent import extent

pytest.importorskip("torch")


def test_commands_end_as_they_should() -> None:
    words = [Path(__file__).parents[1] / "disturbances.py", "--forked", "--seed=3"]
    done = subprocess.run(
        [sys.executable, *words, f"--cases={extent(2, 200)}"],
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
