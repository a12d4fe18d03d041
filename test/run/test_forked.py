"""Ranks are forked: each is as a process of Python, its exit code is reported, and none is left
running."""

import os
import signal
import time
from pathlib import Path

import pytest
from support.extent import long_form
from support.forked import run_ranks, server, started

pytest.importorskip("torch")

from shardir.backend.runs import Options
from shardir.backend.torch.launch.forks import forks

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


@long_form
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


def test_a_number_is_that_of_a_rank_until_it_is_waited_for(tmp_path: Path) -> None:
    """Signals go to groups by their numbers, also after the end of a rank."""
    (tmp_path / "script.py").write_text("")
    with (tmp_path / "out").open("w") as out:
        rank = started([tmp_path / "script.py"], os.environ, out)
        until = time.monotonic() + 60
        while rank.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(rank.pid, 0)
        assert rank.wait() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(rank.pid, 0)


@long_form
@pytest.mark.started_ranks
def test_no_rank_outlives_the_process_that_forks_them(tmp_path: Path) -> None:
    """All runs within a `with` have the same one; where it is killed, so are its ranks."""
    (tmp_path / "script.py").write_text("import time; time.sleep(1000)")
    options = Options(timeout=60)
    with forks(options) as here, forks(options) as again, (tmp_path / "out").open("w") as out:
        assert again is here
        request = [str(tmp_path / "script.py")], os.environ, out.fileno()
        rank = here.start(*request)
        here.process.kill()
        assert rank.wait(60) == -signal.SIGKILL
        with pytest.raises(OSError, match="the process that it is a fork of has ended"):
            here.start(*request)
        until = time.monotonic() + 60
        while Path(f"/proc/{rank.pid}").exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert not Path(f"/proc/{rank.pid}").exists()


@long_form
@pytest.mark.started_ranks
def test_the_process_that_forks_ends_with_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time; time.sleep(1000)")
    with forks(Options(timeout=60)) as here, (tmp_path / "out").open("w") as out:
        rank = here.start([str(tmp_path / "script.py")], os.environ, out.fileno())
    for pid in (rank.pid, here.process.pid):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
