"""Attributes of dialects that are not registered, and ops of installed ones in their own form."""

# ruff: noqa: E501 (texts of programs)

import re
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
    """Return a parser with few dialects, whose tables are computed fast."""
    return IRParser([Builtin, Func])


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


BODY = "%y = nn.add %acc, %x : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>"
METHODS = f"""#m = affine_map<(d0) -> (d0)>
#set = affine_set<(d0) : (d0 - 1 >= 0)>
func.func @f(%x: tensor<4xf32>, %n: index, %p: memref<4xf32>) -> tensor<4xf32> {{
  %from = arith.constant 0 : index
  %to = arith.constant 1 : index
  %r = scf.for %i = %from to %n step %to iter_args(%acc = %x) -> (tensor<4xf32>) {{
    {BODY}
    %z = linalg.generic {{indexing_maps = [#m, #m], iterator_types = ["parallel"]}} ins(%y : tensor<4xf32>) outs(%x : tensor<4xf32>) {{
    ^bb0(%a: f32, %b: f32):
      %s = arith.addf %a, %b fastmath<fast> : f32
      linalg.yield %s : f32
    }} -> tensor<4xf32>
    scf.yield %z : tensor<4xf32>
  }}
  %later = func.call @f(%x, %n, %p) : (tensor<4xf32>, index, memref<4xf32>) -> tensor<4xf32>
  %v = memref.load %p[%from] : memref<4xf32>
  "test.op"() {{a = affine_set<(d0) : (d0 - 1 >= 0)>, b = #set}} : () -> ()
  %c = arith.cmpi slt, %n, %from : index
  cf.cond_br %c, ^next(%r : tensor<4xf32>), ^next(%later : tensor<4xf32>) loc("a.py":3:4)
^next(%q: tensor<4xf32>):
  func.return %q : tensor<4xf32>
}}
func.func @g(i32) -> i32 {{
^entry(%a: i32):
  func.return %a : i32
}}
pdl.pattern @p : benefit(1) {{
  %type = pdl.type : i32
  %op = operation "a.b" -> (%type : !pdl.type)
  rewrite %op {{
    erase %op
  }}
}}
"""


def test_ops_whose_syntax_is_a_method() -> None:
    """As xDSL's own parser reads them. Ops of shardir in their regions may have short types."""
    short = METHODS.replace(BODY, "%y = nn.add %acc, %x")
    expected = Parser(default_parser().ctx, METHODS).parse_module()
    for text in (METHODS, short):
        module = default_parser().parse(text, "x.ir")
        assert module.is_structurally_equivalent(expected)
    lines = short.splitlines()
    for op in module.walk():
        name, at = op.name, str(op.location)
        if name == "cf.cond_br":
            assert at == 'loc("a.py":3:4)'
        elif name not in ("builtin.module", "affine.yield"):
            line, column = map(int, at.rstrip(")").split(":")[-2:])
            word = lines[line - 1][column - 1 :].split()[0].partition("(")[0]
            assert name.endswith(word.strip('"')), at


IN_A_LOOP = """func.func @f(%x: tensor<4xf32>, %n: index) -> tensor<4xf32> {
  %c = arith.constant 1 : index
  %r = scf.for %i = %c to %n step %c iter_args(%acc = %x) -> (tensor<4xf32>) {
    %y = nn.relu %acc
    scf.yield %y : tensor<4xf32>
  }
  %s = nn.relu %r
  func.return %s
}
"""


@pytest.mark.parametrize(
    ("right", "wrong", "errors"),
    [
        ("nn.relu %acc", "nn.rellu %acc", ["4:10 expected a registered operation, got nn.rellu"]),
        ("to %n", "two %n", ["3:24 "]),
        ("step %c", "step %k", ["3:35 "]),
        ("1 : index", '"a', ["2:23 expected the closing"]),
        ("-> (tensor<4xf32>) {", "-> (tensor<4x!nn.q>) {", ["3:77 'nn.q' is not registered"]),
    ],
)
def test_errors_around_and_within_a_method(right: str, wrong: str, errors: list[str]) -> None:
    """What follows is still read: another error there is reported too."""
    text = IN_A_LOOP.replace(right, wrong).replace("func.return %s", "func.return %t")
    with pytest.raises(ParseErrors) as e:
        default_parser().parse(text)
    found = [f"{d.line}:{d.column} {d.message}" for d in e.value.errors if "[T12]" not in d.message]
    for have, want in zip(found, [*errors, "8:15 expected a value that is"], strict=True):
        assert have.startswith(want), found


MISSPELT = {
    '"test.op"() {a = #dist.layot<@m, []>} : () -> ()': "#dist.layot; did you mean dist.layout?",
    '"test.op"() {a = #dist<layot<@m, []>>} : () -> ()': "#dist.layot; did you mean dist.layout?",
    '"test.op"() {a = #dist<@m>} : () -> ()': "#dist<@m> without a name; dist has dist.axes,",
    '"test.op"() {a = #train.zzzz} : () -> ()': "#train.zzzz; train has train.accumulate,",
    '"test.op"() {a = !llvm.poiner} : () -> ()': "!llvm.poiner; did you mean llvm.ptr?",
    '"nn.rellu"() : () -> ()': "nn.rellu; did you mean nn.relu?",
}


@pytest.mark.parametrize("text", MISSPELT)
def test_what_a_registered_dialect_lacks_is_refused(text: str) -> None:
    for allow_unregistered in (False, True):
        with pytest.raises(ParseErrors, match=re.escape(f"got {MISSPELT[text]}")):
            default_parser(allow_unregistered=allow_unregistered).parse(text)


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
