"""The tutorials: their pages show their scripts, which the long form runs on real ranks."""

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.extent import LONG

DOCS = Path(__file__).parents[2] / "docs"
BIN = Path(sys.executable).parent


def _trained(_: Path) -> None:
    script = DOCS / "examples" / "train_gpt2.py"
    run = subprocess.run(
        [sys.executable, str(script), "--steps", "60"],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    plan, rest = run.stdout.split("\n\n", 1)
    assert f"```\n{plan}\n```" in _page("tutorial")
    first, last = map(float, re.findall(r"loss (\S+) -> (\S+) in 60 steps on 4 ranks", rest)[0])
    assert last < 0.65 * first


def _interrupted(tmp_path: Path) -> None:
    """The commands of the page, for fewer steps; the text is that of the interrupted run."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", _page("long-runs"), re.M | re.S)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    write, train, resume, evaluate, generate = map(_here, commands[1:])
    (tmp_path / "docs").symlink_to(DOCS)
    subprocess.run(write, cwd=tmp_path, timeout=300, check=True)
    with subprocess.Popen(
        [*train, "--log-every", "1"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "step 20/" in line:
                process.send_signal(signal.SIGINT)
            if line.startswith("stopped"):
                assert re.fullmatch(r"stopped after step \d+, with a checkpoint\n", line)
    assert process.returncode == 130
    ended = subprocess.run(
        resume, cwd=tmp_path, timeout=300, check=True, capture_output=True, text=True
    )  # fmt: skip
    assert "step: step 60/60 " in ended.stdout
    loss = subprocess.run(
        evaluate, cwd=tmp_path, timeout=300, check=True, capture_output=True, text=True
    )  # fmt: skip
    assert float(loss.stdout.split()[1]) < 3
    made = subprocess.run(
        generate, cwd=tmp_path, timeout=300, check=True, capture_output=True, text=True
    )  # fmt: skip
    assert [len(line) for line in made.stdout.splitlines()] == [32] * 4


def _page(name: str) -> str:
    return next(DOCS.glob(f"*/{name}.md")).read_text()


def _here(words: list[str]) -> list[str]:
    """A command, with the programs of this environment, for fewer steps."""
    command, *rest = words
    found = {"python": sys.executable}.get(command, str(BIN / command))
    return [found, *("60" if word == "600" else word for word in rest)]


@pytest.mark.parametrize(
    ("page", "script", "run"),
    [("tutorial", "train_gpt2", _trained), ("long-runs", "long_run", _interrupted)],
)
def test_the_page_is_that_of_the_script(
    page: str, script: str, run: Callable[[Path], None], tmp_path: Path
) -> None:
    excerpts = re.findall(r"^```python\n(    .*?)^```$", _page(page), re.M | re.S)
    text = (DOCS / "examples" / f"{script}.py").read_text()
    assert excerpts and all(excerpt in text for excerpt in excerpts)
    if LONG:
        run(tmp_path)
