"""The exit code of shard-run --check."""

from itertools import product
from pathlib import Path

import pytest

from shardir.backend.torch.launch.report import Difference
from shardir.tools import run

WITHIN, BEYOND = 0.1, 0.3
ALLOWED = 0.2


@pytest.mark.parametrize("count", [1, 2, 3])
def test_it_is_1_if_any_result_disagrees(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("read_plan", "_check_compiled"):
        monkeypatch.setattr(run, name, lambda *_: None)
    monkeypatch.setattr(run, "summary", lambda _: ())
    for found in product((WITHIN, BEYOND), repeat=count):
        differences = [Difference(f"w{i}", d, ALLOWED) for i, d in enumerate(found)]
        monkeypatch.setattr(run, "run_and_check", lambda *_, d=differences: (None, d))
        assert run.main([str(tmp_path), "--check"]) == int(BEYOND in found)
        assert capsys.readouterr().out.count("DISAGREE") == found.count(BEYOND)
