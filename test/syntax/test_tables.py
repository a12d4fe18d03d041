"""The parsers' tables are those that Lark computes, and are read without Lark."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import new_class
from typing import Any

import pytest
from xdsl.dialects.utils.enum_attribute import EnumAttribute
from xdsl.irdl import (
    IRDLOperation,
    irdl_attr_definition,
    irdl_op_definition,
    operand_def,
    prop_def,
    var_operand_def,
)
from xdsl.utils.str_enum import StrEnum

from shardir.algebra import notation
from shardir.grammar import retained, tables
from shardir.syntax import leaves, op_rules

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
    assert len(found.rules) < 400, "a rule with n optional parts in a row has 2^n forms"
    assert tables.tables_of(grammar, starts) == found
    assert len([*retained.cache_folder().iterdir()]) == 1


def test_a_parser_with_retained_tables_does_without_lark() -> None:
    code = "from shardir.syntax.parser import parse; import sys; parse('module {}')"
    text = f"{code}; assert not sys.argv[1:] or 'lark' not in sys.modules"
    for rest in ([], ["retained"]):
        subprocess.run([sys.executable, "-c", text, *rest], check=True)


def op(operand: Any = None, words: Sequence[str] = ("a", "b")) -> type[IRDLOperation]:
    """An op whose rule depends on the kind of its operand, and on the words of its property."""
    of: Any = EnumAttribute
    enumeration = of[StrEnum("Words", [(w, w) for w in words])]
    attribute = new_class("Attr", (enumeration,), exec_body=lambda body: body.update(name="a.attr"))

    class Op(IRDLOperation):
        name = "a.op"
        x = operand or operand_def()
        word = prop_def(irdl_attr_definition(attribute))
        assembly_format = "$word $x attr-dict `:` type($x)"

    return irdl_op_definition(Op)


def test_rules_are_those_of_the_definitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ops of one name and format have rules of their own; those of a definition are made once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reader: Any = None
    ops = [op(), op(var_operand_def()), op(words=("a", "c"))]
    found = [op_rules.rules_of([o], reader) for o in ops]
    assert len({str(rules) for rules in found}) == len(ops)
    monkeypatch.setattr(op_rules, "OpFormat", None)
    assert [op_rules.rules_of([o], reader) for o in ops] == found
