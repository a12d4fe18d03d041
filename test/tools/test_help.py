"""The help of the commands: groups, suggestions, and completion in a shell."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardir.tools import bench, calibrate, lsp, opt_arguments, report, run
from shardir.tools.arguments import OTHER, ToolParser

PARSERS = {m.__name__: m.parser for m in (bench, calibrate, lsp, opt_arguments, report, run)}


@pytest.mark.parametrize("parser", PARSERS.values(), ids=PARSERS)
def test_each_argument_is_in_one_group(parser: Callable[[], ToolParser]) -> None:
    parsed = parser()
    groups = {group.title: group._group_actions for group in parsed._action_groups}
    assert [*groups][-1] == OTHER
    assert {action.dest for action in groups[OTHER]} == {"help", "version", "color"}
    grouped = [action for group in groups.values() for action in group]
    assert len(grouped) == len(parsed._actions) == len(set(map(id, grouped)))
    assert all(groups.values()) and all(action.help for action in grouped)
    text = parsed.format_help()
    assert max(map(len, text.splitlines())) <= 130
    assert text.index("what ") < text.index(OTHER) < text.index("examples:")


@pytest.mark.parametrize(
    ("parser", "words", "message"),
    [
        (run.parser, ["x.ir", "--stpes", "5"], "no option --stpes; did you mean --steps?"),
        (run.parser, ["x.ir", "--backend", "glo"], "expected gloo, nccl or shm, got glo; did you"),
        (bench.parser, ["zro"], "got zro; did you mean zero?"),
        (calibrate.parser, ["--rank=4"], "no option --rank=4; did you mean --ranks?"),
        (opt_arguments.parser, ["--format", "jsn"], "got jsn; did you mean json?"),
        (opt_arguments.parser, ["--colour=never"], "--colour=never; did you mean --color?"),
    ],
)
def test_suggestions(
    parser: Callable[[], ToolParser], words: list[str], message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and line.startswith("shard-")


def test_completion(tmp_path: Path) -> None:
    """As argcomplete's function in a shell calls the command."""
    line, out = "shard-run net.ir --backend=gl", tmp_path / "found"
    variables = {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(out), "COMP_LINE": line,
        "COMP_POINT": str(len(line)), "COMP_TYPE": "9", "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n",
    }  # fmt: skip
    words = [sys.executable, "-m", "shardir.tools.run"]
    subprocess.run(words, env=os.environ | variables, cwd=tmp_path, check=True)
    assert out.read_text().split() == ["--backend=gloo"]
