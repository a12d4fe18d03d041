"""shard-bench: the options of a benchmark, and what the exit code says."""

import json
import re
import sys
import time
from datetime import date
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.extent import extent

from shardir.diagnostics import ShardirError
from shardir.tools import bench


def test_a_benchmark_may_have_several_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    """The file has the records as they are, and what they are of."""
    records = [{"a": 1, "b": 2.5}, {"a": 3, "b": None}]
    wide = "as wide as the title of the table"
    rows = {"firsts": [{wide: r["a"]} for r in records], "all": [{wide: 4}]}
    two = SimpleNamespace(records=lambda log: records, tables=lambda given: rows)
    monkeypatch.setattr(bench, "load", lambda name: two)
    assert bench.main(["simulator", "--json", str(tmp_path / "all.json")]) == 0
    out = capsys.readouterr().out
    titles = [out.index(title) for title in ("shard-bench simulator: firsts", "simulator: all")]
    assert titles == sorted(titles)
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["records"] == records
    assert found["command"].startswith("shard-bench simulator --json ")
    assert {"commit", "date"} <= found.keys()


def test_the_tables_of_the_simulator() -> None:
    """Of each strategy its own figures, and those of all and of a model once."""
    figures = {
        f"{w}_{of}{f}": i + j / 10
        for i, w in enumerate(("step", "exposed"))
        for j, (of, f) in enumerate(product(("", "model_"), ("spearman", "halves", "median_error")))
    }
    times = {f"{w}_{t}": 1.0 for w in ("step", "exposed")
             for t in ("predicted_ms", "measured_ms", "error")}  # fmt: skip
    records = [
        {"backend": backend, "model": model, "strategy": s, **times, **figures}
        for backend, model, s in (
            ("gloo", "mlp", "data"), ("gloo", "mlp", "zero"), ("gloo", "bert", "data"),
            ("shm", "mlp", "data"),
        )
    ]  # fmt: skip
    strategies, all = bench.load("simulator").tables(records).values()
    assert [(r["model"], r["strategy"]) for r in strategies] == [
        ("mlp", "data"), ("mlp", "zero"), ("bert", "data"), ("mlp", "data"),
    ]  # fmt: skip
    assert [(r["backend"], r["model"]) for r in all] == [
        ("gloo", "all"), ("gloo", "mlp"), ("gloo", "bert"), ("shm", "all"), ("shm", "mlp"),
    ]  # fmt: skip
    assert [r["step Spearman"] for r in all] == [0.0, 0.3, 0.3, 0.0, 0.3]
    assert [r["step halves"] for r in all] == [0.1, 0.4, 0.4, 0.1, 0.4]
    assert [r["exposed median error"] for r in all] == [1.2, 1.5, 1.5, 1.2, 1.5]


def test_kept_rounds_of_the_simulator(tmp_path: Path) -> None:
    """More rounds are added, a half has every other one with its calls, and those of other programs
    are an error."""
    bench.load("simulator")  # puts the folder on the path
    kept: Any = import_module("bench.kept_rounds")
    calls = [[[{"step": [{"begin": k} for k in range(n, n + 4)]}]] for n in (0, 4)]
    first, more = (
        kept.Rounds([{"step": seconds}], recorded)
        for seconds, recorded in zip(([1.0, 2.0], [3.0, 4.0]), calls, strict=True)
    )
    file = tmp_path / "gloo.json"
    assert len(kept.read(file, "these")) == 0
    kept.write(file, "these", kept.Rounds([], []) + first)
    both = kept.read(file, "these") + more
    assert both.seconds == [{"step": [1.0, 2.0, 3.0, 4.0]}]
    second = both.half(1)
    assert second.seconds == [{"step": [2.0, 4.0]}]
    assert [c["begin"] for c in second.calls[0][0]["step"]] == [2, 3, 6, 7]
    with pytest.raises(ShardirError, match="expected rounds of these programs, got others"):
        kept.read(file, "those")
    file.write_text("{")
    with pytest.raises(ShardirError, match="expected rounds of these programs, got another text"):
        kept.read(file, "these")


@pytest.mark.parametrize(("package", "extra"), [("scipy", "calibrate"), ("torch", "torch")])
def test_a_missing_package_is_an_error(
    package: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    def load(name: str) -> None:
        raise ImportError(name=package)

    monkeypatch.setattr(bench, "load", load)
    assert bench.main(["laws"]) == 2
    expected = f"error: laws requires {package}; use pip install 'shardir[{extra}]'\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["laws", "--cases", "0"], "expected at least 1 case, got 0"),
        (["--json", "step", "search"], "expected the benchmark before its options"),
        (["simulator", "--rounds", "-1"], "expected 0 rounds or more, got -1"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(arguments)
    assert message in capsys.readouterr().err


def test_an_error_of_a_benchmark_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def records(log: object) -> None:
        raise ShardirError("expected rounds, got none")

    monkeypatch.setattr(bench, "load", lambda name: SimpleNamespace(records=records))
    assert bench.main(["laws"]) == 2
    assert capsys.readouterr().err == "error: expected rounds, got none\n"


LONG = ("arena", "auto", "checkpoint", "cost-model", "decode", "gpu-step", "launch", "loop",
        "overlap", "pipeline-step", "recompute", "redistribution", "simulator", "stablehlo", "step",
        "zero", "zoo")  # fmt: skip
"""The benchmarks whose smoke forms take longest, 1 to 5 CPU seconds: CI runs them too."""


@pytest.mark.parametrize("name", [n for n in bench.names() if n not in extent(LONG, ())])
def test_each_benchmark_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In its smoke form: to the end, with a row."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert bench.main([name, "--smoke", "--json", str(tmp_path / "all.json")]) == 0
    assert json.loads((tmp_path / "all.json").read_text())["records"]


def test_the_values_of_a_smoke_form_have_names_in_the_benchmark() -> None:
    for name in bench.names():
        module = bench.load(name)
        assert module.SMOKE.keys() <= vars(module).keys(), name


WAITING = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(0 if os.environ["RANK"] == sys.argv[2] else 100)
sys.exit(os.environ["RANK"] == sys.argv[2])
"""


@pytest.mark.parametrize(("failing", "error"), [("none", KeyboardInterrupt), ("1", SystemExit)])
def test_no_rank_of_a_benchmark_outlives_it(
    failing: str, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is interrupted while it waits, or a rank fails while another one waits."""
    started: Any = import_module("bench.started")
    (script := tmp_path / "waiting.py").write_text(WAITING)
    (there := tmp_path / "ranks").mkdir()

    def interrupted() -> float:
        if failing == "none" and len([f for f in there.iterdir() if f.read_text()]) == 2:
            raise KeyboardInterrupt
        return time.monotonic()

    monkeypatch.setattr(started, "time", SimpleNamespace(monotonic=interrupted))
    with pytest.raises(error):
        started.run(str(script), [str(there), failing], 2, 60)
    pids = [int(text) for f in there.iterdir() if (text := f.read_text())]
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_records_say_what_they_are_of() -> None:
    stale: Any = import_module("bench.stale")
    rows = {row["benchmark"]: row for row in stale.listing()}
    assert {file.stem for file in bench.RECORDS.glob("*.json")} == set(rows) <= set(bench.names())
    for name, row in rows.items():
        assert row["command"].startswith(f"shard-bench {name}")
        assert re.fullmatch(r"[0-9a-f]{12}", row["commit"])
        assert date.fromisoformat(row["date"])
        assert json.loads((bench.RECORDS / f"{name}.json").read_text())["records"]
