"""The parsers' tables are those that Lark computes, and are read without Lark."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardir.algebra import notation
from shardir.grammar import tables
from shardir.syntax import leaves

LEAVES = (leaves.HERE / "leaves.lark").read_text() + leaves.TERMINALS
SDY = notation.grammar("sdy.lark")


@pytest.mark.parametrize(
    ("grammar", "starts"),
    [
        (notation.grammar("notation.lark"), notation.STARTS),
        (SDY, ["sharding", "mesh"]),
        (LEAVES, [*leaves.START.values()]),
    ],
    ids=["notation", "sdy", "leaves"],
)
def test_a_file_has_what_lark_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grammar: str, starts: Sequence[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = tables.tables_of(grammar, starts)
    assert tables.tables_of(grammar, starts) == found
    assert len([*tables.cache_folder().iterdir()]) == 1


def test_a_parser_with_retained_tables_does_without_lark() -> None:
    code = "from shardir.syntax.parser import parse; import sys; parse('module {}')"
    text = f"{code}; assert not sys.argv[1:] or 'lark' not in sys.modules"
    for rest in ([], ["retained"]):
        subprocess.run([sys.executable, "-c", text, *rest], check=True)
