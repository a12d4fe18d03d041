"""Attributes of dialects that are not registered, and ops of installed ones in their own form."""

from pathlib import Path

import pytest
from support.runlines import run_tool
from xdsl.dialects.builtin import Builtin
from xdsl.dialects.func import Func
from xdsl.dialects.smt import SMT
from xdsl.parser import Parser

from shardir.diagnostics import ParseErrors
from shardir.dialects.dist import LayoutAttr
from shardir.grammar import tables
from shardir.syntax import op_rules
from shardir.syntax.parser import IRParser, context_of, default_parser
from shardir.syntax.printer import print_module

OPAQUE = (
    "#a<precision DEFAULT>", '#a<"x > y" -> [1, 2]>', "#a<[1]>", "#a<word>", "#a<  spaced  out >",
    '#a.b<c<d>, "q>">', "#a.b", "!a<token>", "!a.token", "!a<vec 8 x f32>"
)  # fmt: skip


@pytest.mark.parametrize("text", OPAQUE)
def test_an_attribute_of_an_unknown_dialect_keeps_its_text(text: str) -> None:
    source = f'"test.op"() {{a = {text}, b = [{text}]}} : () -> ()\n'
    printed = print_module(default_parser(allow_unregistered=True).parse(source))
    assert text.replace("#a<  ", "#a<") in printed
    assert print_module(default_parser(allow_unregistered=True).parse(printed)) == printed
    with pytest.raises(ParseErrors, match=r"1:18: error: expected a registered (attribute|type)"):
        default_parser().parse(source)


def test_an_opaque_attribute_of_a_registered_dialect() -> None:
    """It is the same attribute as in the other form, and its errors have their columns."""
    read = default_parser().parse_attribute
    layout = read("#dist.layout<@m, [{dp}, {}]>")
    assert isinstance(layout, LayoutAttr)
    assert read("#dist<layout<@m, [{dp}, {}]>>") == layout
    assert read("#dist< layout<@m, [{dp}, {}]>>") == layout
    wrong = '"func.call"() {a = #dist<layout<@m, [{dp}, {}>>} : () -> ()'
    with pytest.raises(ParseErrors, match="1:46: error: expected a layout"):
        default_parser().parse(wrong)


REGIONS = """
%t = smt.constant true
%f = smt.forall {
^bb0(%x: !smt.bool):
  %y = smt.not %x
  smt.yield %y : !smt.bool
}
"""


def smt_parser() -> IRParser:
    """Return a parser of few dialects, whose tables are computed fast."""
    return IRParser([Builtin, Func, SMT], context_of([Builtin, Func, SMT]))


def test_regions_and_short_types_of_an_installed_dialect() -> None:
    """As xDSL's own parser reads them; each op has its place."""
    module = smt_parser().parse(REGIONS, "x.ir")
    expected = Parser(context_of([Builtin, Func, SMT]), REGIONS).parse_module()
    assert module.is_structurally_equivalent(expected)
    places = [str(op.location).split('"')[1:] for op in module.walk()][1:]
    assert [p[0] for p in places] == ["x.ir"] * 4


def test_the_grammar_of_an_installed_dialect_is_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process reads its tables from a file."""

    def compute(*_: object) -> None:
        raise AssertionError("computed again")

    smt_parser()
    monkeypatch.setattr(tables, "compute_tables", compute)
    monkeypatch.setattr(op_rules, "_make_rules", compute)
    assert len([*smt_parser().parse(REGIONS).walk()]) == 5


BY_METHOD = """builtin.module {
  func.func @f(%x: tensor<4xf32>) -> tensor<4xf32> {
    %e = tensor.empty() : tensor<4xf32>
    %y:1 = "test.op"(%x) : (tensor<4xf32>) -> tensor<4xf32> loc("a.py":7:1)
    func.return %y : tensor<4xf32>
  }
}
"""


def test_xdsls_parser_keeps_places(tmp_path: Path) -> None:
    """That of `tensor.empty`, whose syntax is a method of its class, too."""
    path = tmp_path / "x.ir"
    path.write_text(BY_METHOD)
    code, out, _ = run_tool(["shard-opt", str(path), "-f", "xdsl", "--print-debuginfo"], b"")
    assert code == 0
    places = {"tensor.empty": f'"{path}":3:10', "test.op": '"a.py":7:1', "return": f'"{path}":5:5'}
    for op, place in places.items():
        lines = [line for line in out.splitlines() if op in line and "func @f" not in line]
        assert [line.endswith(f" loc({place})") for line in lines] == [True]
