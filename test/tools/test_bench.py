"""shard-bench: the options of a benchmark, and what the exit code says."""

import json
from argparse import ArgumentParser
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardir.tools import bench


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--violations", type=int, default=0)


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--violations", "3"], 1)])
def test_the_exit_code_says_whether_a_law_is_violated(
    options: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    law = SimpleNamespace(
        add_options=add_options, records=lambda log, violations: [{"violations": violations}]
    )
    monkeypatch.setattr(bench, "load", lambda name: law)
    assert bench.main(["laws", *options]) == code
    assert "violations" in capsys.readouterr().out


def test_a_benchmark_may_have_several_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    """The file has the records as they are."""
    records = [{"a": 1, "b": 2.5}, {"a": 3, "b": None}]
    wide = "as wide as the title of the table"
    rows = {"firsts": [{wide: r["a"]} for r in records], "all": [{wide: 4}]}
    two = SimpleNamespace(records=lambda log: records, tables=lambda given: rows)
    monkeypatch.setattr(bench, "load", lambda name: two)
    assert bench.main(["simulator", "--json", str(tmp_path / "all.json")]) == 0
    out = capsys.readouterr().out
    titles = [out.index(title) for title in ("shard-bench simulator: firsts", "simulator: all")]
    assert titles == sorted(titles)
    assert json.loads((tmp_path / "all.json").read_text()) == records


def test_the_tables_of_the_simulator() -> None:
    """Of each strategy its own figures, and those of all and of a model once."""
    figures = {
        f"{w}_{of}{f}": i + j / 10
        for i, w in enumerate(("step", "exposed"))
        for j, (of, f) in enumerate(product(("", "model_"), ("spearman", "median_error")))
    }
    times = {f"{w}_{t}": 1.0 for w in ("step", "exposed")
             for t in ("predicted_ms", "measured_ms", "error")}  # fmt: skip
    records = [
        {"model": model, "strategy": s, **times, **figures}
        for model, s in (("mlp", "data"), ("mlp", "zero"), ("bert", "data"))
    ]
    strategies, all = bench.load("simulator").tables(records).values()
    assert [(r["model"], r["strategy"]) for r in strategies] == [
        ("mlp", "data"), ("mlp", "zero"), ("bert", "data"),
    ]  # fmt: skip
    assert [r["model"] for r in all] == ["all", "mlp", "bert"]
    assert [r["step Spearman"] for r in all] == [0.0, 0.2, 0.2]
    assert [r["exposed median error"] for r in all] == [1.1, 1.3, 1.3]


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
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(arguments)
    assert message in capsys.readouterr().err
