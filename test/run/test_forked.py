"""Ranks that are forked: their exit codes are reported, and none is left running."""

import os
from pathlib import Path

import pytest
from forked import run_ranks, server

pytest.importorskip("torch")

SCRIPT = """
import os, sys, time
print("rank", sys.argv[-1], os.getcwd(), os.environ["GLOO_SOCKET_IFNAME"])
{}
"""


def ran(folder: Path, line: str, seconds: float = 60) -> list[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(line))
    return run_ranks(script, 2, ["a"], seconds)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("pass", "(ended with 0)"),
        ("sys.exit(3)", "(ended with 3)"),
        ("sys.exit('no more')", "no more\n\n(ended with 1)"),
        ("raise ValueError('no such luck')", "ValueError: no such luck\n\n(ended with 1)"),
        ("os.abort()", "(ended with -6)"),
    ],
)
def test_the_exit_code_of_a_rank_is_reported(tmp_path: Path, line: str, wanted: str) -> None:
    for rank, out in enumerate(ran(tmp_path, line)):
        assert f"rank {rank} {os.getcwd()} lo" in out or "abort" in line
        assert out.endswith(wanted)


def test_a_rank_that_hangs_is_killed(tmp_path: Path) -> None:
    line = "open(f'pid{sys.argv[-1]}', 'w').write(str(os.getpid())); time.sleep(1000)"
    line = line.replace("f'pid", f"f'{tmp_path}/pid")
    assert all(out.endswith("(ended with -9)") for out in ran(tmp_path, line, 5))
    for rank in range(2):
        pid = int((tmp_path / f"pid{rank}").read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_changes_of_a_rank_are_its_own(tmp_path: Path) -> None:
    """The next one has its own modules and environment; the server lives on."""
    pid = server().process.pid
    ran(tmp_path, "import torch; torch.mine = 1; os.environ['MINE'] = '1'")
    for out in ran(tmp_path, "import torch; print(hasattr(torch, 'mine'), 'MINE' in os.environ)"):
        assert "False False" in out
    assert server().process.pid == pid and server().process.poll() is None
