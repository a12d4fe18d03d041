"""Disturbed commands: some cases of `make faults`, forked from one process."""

import os
from pathlib import Path

import pytest
from support.extent import extent
from support.forked import started

pytest.importorskip("torch")


def test_commands_end_as_they_should(tmp_path: Path) -> None:
    script, log = Path(__file__).parents[1] / "disturbances.py", tmp_path / "log"
    with log.open("w") as file:
        words = [script, "--forked", "--seed=3", f"--cases={extent(2, 200)}"]
        process = started(words, os.environ, file)
    try:
        assert process.wait(extent(100, 1800)) == 0, log.read_text()
    finally:
        process.kill()
