"""Each warning that is switched off on a line has the reason there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SUPPRESSION = re.compile(r"#\s*(?:noqa|ruff: noqa|type: ignore|pyrefly:)[^\n]*")
REASON = re.compile(r"( - |\()\w")


@pytest.mark.parametrize("package", ["shardir", "passes", "tools", "test", "docs"])
def test_each_suppression_has_a_reason(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in sorted((ROOT / package).rglob("*.py")) if path == path.resolve()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := SUPPRESSION.search(line)) and not REASON.search(match[0])
    ]  # fmt: skip
    assert not found
