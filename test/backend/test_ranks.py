"""The processes of a run: none is left."""

from pathlib import Path

import pytest

from shardir.backend.interface import Options, RunError
from shardir.backend.torch.launch.ranks import Ranks

PROGRAM = """
import os, sys, time
if os.environ["RANK"] == "{failing}":
    sys.exit(3)
time.sleep(100)
"""


@pytest.mark.parametrize("failing", [0, 2])
def test_no_rank_outlives_one_that_fails(failing: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(failing=failing))
    ranks = Ranks(program, 3, Options(timeout=60))
    try:
        with pytest.raises(RunError, match=f"^rank {failing} ended with exit code 3"):
            ranks.run(lambda event: None)
        assert [process.poll() is None for process in ranks.processes] == [False] * 3
    finally:
        for process in ranks.processes:
            process.kill()
