"""The clocks of a trace: the work of all threads, and that of the threads that compute."""

import threading
import time
from pathlib import Path

import pytest
import torch

from shardir.backend.torch.shardir_runtime.run.process import ranks_of_a_core
from shardir.backend.torch.shardir_runtime.run.trace import Recorder

SPUN = 0.05
"""The seconds for which another thread works."""


def spin() -> None:
    begun = time.thread_time()
    while time.thread_time() - begun < SPUN:
        pass


@pytest.mark.parametrize("threads", [1, 2])
def test_what_threads_of_a_library_work_is_apart_where_torch_has_one(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread works during the second of three lines."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    recorder = Recorder(1, tmp_path, torch.device("cpu"))
    mark = recorder._mark()
    with recorder.call("step"):
        for line in (1, 2, 3):
            mark(line)
            if line == 2:
                other = threading.Thread(target=spin)
                other.start()
                other.join()
    (call,) = recorder.calls["step"]
    work, own = ([s * 1e-9 for s in call[clock]] for clock in ("work", "own"))
    assert work[1] >= SPUN and max(work[0], work[2]) < SPUN / 2
    assert (own[1] < SPUN / 2) == (threads == 1)


def test_the_work_of_a_mark_is_without_that_of_the_ops_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of clocks that go on when they are read, by 1 and by 3, and by much when an op is called."""
    now = [0, 0]

    def read() -> tuple[int, int]:
        now[:] = now[0] + 1, now[1] + 3
        return now[0], now[1]

    def op(x: torch.Tensor) -> torch.Tensor:
        now[:] = (clock + 1000 for clock in now)
        return x

    recorder = Recorder(1, tmp_path, torch.device("cpu"))
    monkeypatch.setattr(recorder._clock, "work", read)
    monkeypatch.setattr(torch, "exp", op)
    assert recorder._work_of_mark() == [1, 3]


def test_marks_take_no_work(tmp_path: Path) -> None:
    """Of lines that do nothing most of the work is that of the marks, which is subtracted."""
    recorder = Recorder(1, tmp_path, torch.device("cpu"))
    mark, begun = recorder._mark(), time.process_time()
    with recorder.call("step"):
        for line in range(3_000):
            mark(line)
    spent = time.process_time() - begun
    (call,) = recorder.calls["step"]
    for clock in ("work", "own"):
        assert sum(call[clock]) * 1e-9 / ranks_of_a_core() < spent / 2
