"""Ranks are forked from a process that has imported torch (server.py), except in the tests of how
they are started."""

import subprocess
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

OWN = ("test_launch", "test_calibrate_on_ranks")
"""Their subject is how ranks are started and ended."""


@pytest.fixture(autouse=True)
def forked_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.module.__name__ in OWN:
        return
    from forked import Forked

    from shardir.backend.torch.launch import ranks

    monkeypatch.setattr(ranks, "subprocess", SimpleNamespace(
        Popen=Forked, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT,
        TimeoutExpired=subprocess.TimeoutExpired,
    ))  # fmt: skip


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A function that runs an example (the arguments are those of a `Job`), each job once."""
    from example_runs import Job

    @cache
    def run_once(job: Job) -> Any:
        return job.run(tmp_path_factory.mktemp("example"))

    return lambda *arguments, **options: run_once(Job(*arguments, **options))
