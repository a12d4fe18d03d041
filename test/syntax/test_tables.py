"""The tables of a grammar are retained in a file, and computed again where it is of no use."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from lark import Lark, Transformer

from shardir.syntax import lexer
from shardir.syntax.lexer import Machine, UnexpectedError

SUMS = r"""
sum: sum "+" NUMBER -> add | NUMBER -> one
NUMBER: /\d+/
"""


class Sums(Transformer):
    def one(self, children: list) -> int:
        return int(children[0].value)

    def add(self, children: list) -> int:
        return children[0] + int(children[1].value)


@pytest.fixture
def computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The grammars whose tables were computed, in a folder of their own."""
    grammars: list[str] = []
    build = Lark._build_parser

    def counted(self: Lark):
        grammars.append(self.source_grammar)
        return build(self)

    monkeypatch.setattr(Lark, "_build_parser", counted)
    monkeypatch.setattr(lexer, "cache_from_source", lambda _: str(tmp_path / "lexer.pyc"))
    monkeypatch.setattr(lexer.sys, "dont_write_bytecode", False)
    yield grammars


def value_of(text: str, grammar: str = SUMS) -> int:
    return Machine(grammar, ["sum"], Sums()).run(text, "sum")


def test_tables_are_computed_once(computed: list[str]) -> None:
    assert [value_of("1 + 2 + 3") for _ in range(3)] == [6, 6, 6]
    assert computed == [SUMS]


def test_tables_of_another_grammar_are_not_used(computed: list[str]) -> None:
    other = SUMS.replace('"+"', '"-"')
    assert value_of("1 + 2") == 3
    assert value_of("1 - 2", other) == 3
    with pytest.raises(UnexpectedError):
        value_of("1 + 2", other)
    assert computed == [SUMS, other]


@pytest.mark.parametrize("size", [0, 70, 300])
def test_a_damaged_file_is_replaced(computed: list[str], tmp_path: Path, size: int) -> None:
    value_of("1")
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:size])
    assert value_of("1 + 2") == value_of("1 + 2") == 3
    assert computed == [SUMS, SUMS]


def test_nothing_is_written_where_python_writes_no_byte_code(
    computed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lexer.sys, "dont_write_bytecode", True)
    assert value_of("1 + 2") == value_of("1 + 2") == 3
    assert computed == [SUMS, SUMS] and not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be_written_is_left_alone(
    computed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert value_of("1 + 2") == value_of("1 + 2") == 3
    assert computed == [SUMS, SUMS] and not [*tmp_path.iterdir()]
