"""Every coded error of the verifier and the passes has a case that announces it on its line."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"\[([A-Z]\d+)\] ")
UNREACHABLE = {"M1"}
"""What no text can say, but a module that is built in Python can: a mesh without axes."""


def test_each_code_has_a_case() -> None:
    sources = [*(ROOT / "passes").glob("*.py"), *(ROOT / "shardir").rglob("*.py")]
    raised = {c for path in sources for c in CODE.findall(path.read_text())}
    cases = {
        c
        for path in (ROOT / "test" / "filecheck").rglob("*.ir")
        for line in path.read_text().splitlines()
        if "expected-error" in line
        for c in CODE.findall(line)
    }
    assert raised - UNREACHABLE <= cases, f"no case for {sorted(raised - UNREACHABLE - cases)}"
    assert cases <= raised, f"cases for what nothing raises: {sorted(cases - raised)}"
