"""The processes of a run: none is left, and the one that is the cause of an error is named."""

import json
import os
import random
import resource
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.extent import extent
from support.forked import run_ranks

from shardir.backend.runs import LaunchError, Options, RunError
from shardir.backend.torch.directory import RUNTIME
from shardir.backend.torch.launch.positions import Records
from shardir.backend.torch.launch.ranks import Ranks, allow_files
from shardir.backend.torch.shardir_runtime.run.events import event_of

pytest.importorskip("torch")
PROGRAM = """
import json, os, signal, subprocess, sys, time
sys.path.append({folder!r})
from shardir_runtime.run.events import Events
rank = int(os.environ["RANK"])
events = Events(rank)
def done():
    events.send(always=True, event="done")
def error(kind):
    events.send(always=True, event="error", kind=kind, message="of " + kind)
    sys.exit(1)
{lines}
"""


def run(folder: Path, lines: str, count: int = 3, **options: Any) -> list[dict[str, Any]]:
    """Run these lines on all ranks; return the events. None of the ranks is left."""
    program = folder / "program.py"
    program.write_text(PROGRAM.format(folder=str(RUNTIME.parent), lines=lines))
    ranks, events = Ranks(program, count, Options(timeout=60, **options)), []
    try:
        ranks.run(events.append)
    finally:
        running = [process.poll() is None for process in ranks.processes]
        for process in ranks.processes:
            process.kill()
        assert not any(running)
    return events


@pytest.mark.parametrize(("failing", "code"), extent([(2, 0), (0, 3)], [*product((0, 2), (0, 3))]))
def test_no_rank_outlives_one_that_leaves(failing: int, code: int, tmp_path: Path) -> None:
    lines = f"sys.exit({code}) if rank == {failing} else time.sleep(100)"
    with pytest.raises(RunError, match=f"^rank {failing} ended with exit code {code} before"):
        run(tmp_path, lines)


def test_what_a_finished_rank_has_started_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signals go to groups whose number is that of a rank, which is not reaped: to no others."""
    killpg = os.killpg

    def of_a_rank(group: int, number: int) -> None:
        assert Path(f"/proc/{group}/stat").exists()
        killpg(group, number)

    monkeypatch.setattr(os, "killpg", of_a_rank)
    lines = f"""
child = subprocess.Popen(["sleep", "100"])
open("{tmp_path}/" + str(rank), "w").write(str(child.pid))
done()
"""
    assert run(tmp_path, lines) == []
    until = time.monotonic() + 20
    while any(alive((tmp_path / str(rank)).read_text()) for rank in range(3)):
        assert time.monotonic() < until
        time.sleep(0.01)


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        # the others lose their connection, and report it, before a rank is seen to end
        ("time.sleep(1) or os._exit(7) if rank == 2 else error('lost')",
         "rank 2 ended with exit code 7"),
        ("time.sleep(1) or os.kill(os.getpid(), 9) if rank == 2 else error('lost')",
         "rank 2 was killed by SIGKILL"),
        # of two that are silent, one is stopped
        ("os.kill(os.getpid(), signal.SIGSTOP) if rank == 2 else"
         " time.sleep(100) if rank == 0 else time.sleep(1) or error('late')",
         "rank 2 is stopped: the others waited"),
        ("time.sleep(100) if rank == 2 else error('late')",
         "rank 2 is alive but does not answer: the others waited"),
        ("time.sleep(0.2) or error('program') if rank == 2 else error('lost')",
         "rank 2 failed: of program"),
        ("os.kill(os.getpid(), 40) if rank == 2 else time.sleep(100)",
         "rank 2 was killed by signal 40"),
    ],
)  # fmt: skip
def test_the_rank_that_is_the_cause_is_named(lines: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        run(tmp_path, lines)
    assert str(caught.value).startswith(message)


def test_what_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(
        LaunchError, match=r"^the ranks cannot be started: No such file or directory"
    ):
        run(tmp_path, "done()", python=str(tmp_path / "python"))


START = {"event": "start", "ranks": 3, "backend": "gloo", "rank": 0, "time": 1.5}
LOSSES = {"event": "steps", "function": "f", "first": 1, "losses": [1.0, 2],
          "seconds": 0.5, "memory": 7, "metrics": {"m": [0.5, 1]},
          "rank": 0, "time": 2}  # fmt: skip


def test_foreign_lines_are_no_events(tmp_path: Path) -> None:
    """A program may write to any of its files. Another rank writes before or after that: what is
    longer than PIPE_BUF does not arrive in one piece."""
    lines = """
def reached(name):
    open(os.path.join(sys.path[0], name), "w").close()
def wait_for(name):
    while not os.path.exists(os.path.join(sys.path[0], name)):
        time.sleep(0.01)
texts = ["x", "[" * 100000, "1" * 5000, '{"event": []}', "[]", "null", "\\0", "\\x80\\xff",
         json.dumps({"event": "steps"}), json.dumps({"event": "done", "rank": 7, "time": 0}),
         json.dumps({"event": "error", "rank": "0", "time": 0, "kind": "plan", "message": ""})]
if rank == 0:
    for text in texts:
        os.write(events.fd, text.encode("latin1") + b"\\n")
    events.send(event="start", ranks=3, backend="gloo")
    reached("written")
    wait_for("done1")
    wait_for("done2")
    os.write(events.fd, b"no end")
else:
    wait_for("written")
    done()
    reached(f"done{rank}")
"""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with pytest.raises(RunError, match=r"^rank 0 ended with exit code 0 before the end"):
        run(first, lines)
    again = lines.replace('os.write(events.fd, b"no end")', "done()")
    assert [event["event"] for event in run(second, again)] == ["start"]


def test_an_event_has_the_fields_of_its_kind() -> None:
    for event in (START, LOSSES):
        assert event_of(json.dumps(event).encode(), 3) == event
    chance = random.Random(0)
    others: list[Any] = [None, "x", [], {}, -1, ["x"], [[]], {"x": 1}]
    for _ in range(300):
        event = dict(chance.choice([START, LOSSES]))
        field = chance.choice(list(event))
        event[field] = chance.choice(others)
        is_text = isinstance(event[field], str) and field in ("backend", "function")
        is_number = event[field] == -1 and field in ("time", "seconds")
        line = json.dumps(event).encode()
        is_empty = event[field] == {} and field == "metrics"
        assert (event_of(line, 3) is not None) == (is_text or is_number or is_empty), event


def test_ranks_need_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is raised where it may be; the ranks that it does not allow are not started."""
    limits = (200, 500)

    def set_limits(_: int, new: tuple[int, int]) -> None:
        nonlocal limits
        limits = new

    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    for ranks, soft in ((100, 200), (300, 364), (1, 364), (436, 500)):
        allow_files(ranks)
        assert limits == (soft, 500)
    with pytest.raises(LaunchError, match="at least 501 open files for 437 ranks, got 500"):
        Ranks(Path("program.py"), 437, Options()).run(print)


def test_a_file_that_may_not_hold_the_positions_of_ranks_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A system writes a part of what is longer than files may be, and reports no error."""
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: len(data) // 3)
    with pytest.raises(OSError, match="File too large"):
        Records(2)
    with pytest.raises(LaunchError, match=r"positions of 1 ranks .*: File too large; allow longer"):
        Ranks(Path("program.py"), 1, Options()).run(print)


def module_of(path: Path) -> str:
    """The name of a file of the runtime, as programs import it."""
    return ".".join(path.relative_to(RUNTIME.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    )


def test_a_rank_imports_no_compiler(tmp_path: Path) -> None:
    """torch.compile's takes a rank half a second, several times what its start takes otherwise."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import importlib, sys\n"
        f"sys.path.append({str(RUNTIME.parent)!r})\n"
        f"for module in {[module_of(path) for path in RUNTIME.rglob('*.py')]}:\n"
        "    importlib.import_module(module)\n"
        "assert 'shardir_runtime.ops.attention' in sys.modules\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    (out,) = run_ranks(script, 1, [], 60)
    assert out.endswith("(ended with 0)"), out
