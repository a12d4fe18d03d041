"""shard-bench: the options of a benchmark, and what the exit code says."""

from argparse import ArgumentParser
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
