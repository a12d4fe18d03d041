"""The RUN lines of docs/examples/*.ir."""

import re
from pathlib import Path

import pytest
from support.extent import sampled
from support.runlines import run, run_lines

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
EVERY = [(p, line, c) for p in sorted(EXAMPLES.glob("*.ir")) for line, c in run_lines(p)]
CASES = sampled(EVERY, 10)


@pytest.mark.parametrize(
    ("path", "command"), [(p, c) for p, _, c in CASES], ids=[f"{p.stem}:{n}" for p, n, _ in CASES]
)
def test_example(path: Path, command: str, tmp_path: Path) -> None:
    run(command, path, tmp_path)


def test_each_example_is_listed() -> None:
    listed = re.findall(r"\]\((\w+\.ir)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(p.name for p in EXAMPLES.glob("*.ir"))
