"""The tables of a grammar are retained in a file, and computed again where it is of no use."""

import os
import pickle
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardir.grammar import retained, tables
from shardir.grammar.machine import Machine, UnexpectedError

SUMS = r"""
sum: sum "+" NUMBER -> add | NUMBER -> one
NUMBER: /\d+/
"""


class Sums:
    def one(self, children: list) -> int:
        return int(children[0].value)

    def add(self, children: list) -> int:
        return children[0] + int(children[1].value)


@pytest.fixture
def computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The grammars whose tables were computed, in a folder of their own."""
    grammars: list[str] = []
    compute = tables.compute_tables

    def counted(grammar: str, starts: list[str]) -> tables.Tables:
        grammars.append(grammar)
        return compute(grammar, starts)

    monkeypatch.setattr(tables, "compute_tables", counted)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield grammars


def value_of(text: str, grammar: str = SUMS) -> int:
    return Machine(grammar, ["sum"], Sums()).run(text, "sum")


def test_tables_are_computed_once(computed: list[str]) -> None:
    assert [value_of("1 + 2 + 3") for _ in range(3)] == [6, 6, 6]
    assert computed == [SUMS]


def test_a_file_has_what_was_computed(computed: list[str]) -> None:
    first = tables.tables_of(SUMS, ["sum"])
    assert tables.tables_of(SUMS, ["sum"]) == first
    assert computed == [SUMS]


def test_tables_of_another_grammar_are_not_used(computed: list[str]) -> None:
    other = SUMS.replace('"+"', '"-"')
    assert value_of("1 + 2") == 3
    assert value_of("1 - 2", other) == 3
    with pytest.raises(UnexpectedError):
        value_of("1 + 2", other)
    assert computed == [SUMS, other]


@pytest.mark.parametrize(
    "damage", ["", "[", "null", "[[], [], {}, [], [], [], {}, {}]", "0\n" + "[" * 100_000]
)
def test_a_damaged_file_is_replaced(computed: list[str], damage: str) -> None:
    value_of("1")
    (file,) = retained.cache_folder().iterdir()
    file.write_text(damage)
    assert value_of("1 + 2") == value_of("1 + 2") == 3
    assert computed == [SUMS, SUMS]


def test_a_file_that_is_cut_is_replaced(computed: list[str]) -> None:
    value_of("1")
    (file,) = retained.cache_folder().iterdir()
    content = file.read_bytes()
    for times, n in enumerate(range(0, len(content), len(content) // 7), 2):
        file.write_bytes(content[:n])
        assert value_of("1 + 2") == value_of("1 + 2") == 3
        assert computed == [SUMS] * times


def test_without_a_home_the_tables_are_computed(
    computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert value_of("1 + 2") == 3
    assert computed == [SUMS]


def test_a_file_is_no_program(computed: list[str], tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self):
            return Path.mkdir, (tmp_path / "sprung",)

    value_of("1")
    (file,) = retained.cache_folder().iterdir()
    file.write_bytes(pickle.dumps(Trap()))
    assert value_of("1 + 2") == 3
    assert not (tmp_path / "sprung").exists()


def test_the_folder_is_the_users_own(computed: list[str]) -> None:
    value_of("1")
    assert stat.S_IMODE(retained.cache_folder().stat().st_mode) == 0o700


def test_few_files_are_retained(computed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained, "MAX_FILES", 2)
    for sign in "-*/+":
        value_of("1", SUMS.replace('"+"', f'"{sign}"'))
    assert len([*retained.cache_folder().iterdir()]) == 2
    value_of("1 + 2")
    assert len(computed) == 4


def test_the_files_in_use_stay(computed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained, "MAX_FILES", 2)
    for sign in "+-":
        value_of("1", SUMS.replace('"+"', f'"{sign}"'))
    for file in retained.cache_folder().iterdir():
        os.utime(file, (1, 1))
    value_of("1 + 2")
    value_of("1", SUMS.replace('"+"', '"*"'))  # removes that of "-"
    value_of("1 + 2")
    assert len(computed) == 3


@pytest.mark.parametrize("in_the_way", ["file", "full"])
def test_a_folder_that_cannot_be_written_is_left_alone(
    computed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_the_way: str
) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    if in_the_way == "file":
        (tmp_path / "shardir").write_text("")
    else:
        monkeypatch.setattr(Path, "replace", full)
    assert value_of("1 + 2") == value_of("1 + 2") == 3
    assert computed == [SUMS, SUMS]
    assert [f.name for f in tmp_path.rglob("*")] == ["shardir"]
