"""Ranks are forked from a process that has imported torch (server.py), but in the tests of what
starts them."""

import subprocess
from types import SimpleNamespace

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
