"""Arguments of shard-run that are refused before a run."""

from pathlib import Path
from typing import Any

import pytest

import shardir
from shardir.tools import bench, calibrate
from shardir.tools import run as shard_run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--dump", "/nowhere/there.npz"],
            "expected a file in a writable folder, got /nowhere/there.npz",
        ),
        (["--dump", "/"], "expected a file, not a directory, got /"),
        (["--timeout", "0"], "more than 0"),
        (["--timeout", "nan"], "more than 0"),
        (["--timeout", "inf"], "at most 1000000, got inf"),
        (["--timeout", "1e10"], "at most 1000000, got 1e10"),
        (["--dump", "program.py"], "expected a name that ends in .npz, got program.py"),
        (["--threads", "-1"], "expected 0 or more"),
    ],
)
def test_impossible_options_are_refused_before_the_run(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        shard_run.main(["f.ir", *words])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("main", [shard_run.main, bench.main, calibrate.main])
def test_each_tool_prints_its_version(main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert f" of shardir {shardir.__version__}\n" in capsys.readouterr().out


def test_file_of_another_kind_is_named_as_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f.txt"
    path.write_text("")
    assert shard_run.main([str(path)]) == 2
    assert "f.txt: is a file, not a compiled directory" in capsys.readouterr().err
