"""The parser, against xDSL's own parser and against modules built by hand."""

# ruff: noqa: E501 (texts of programs)

import re
from pathlib import Path
from typing import ClassVar

import pytest
from xdsl.dialects import test as xtest
from xdsl.dialects.builtin import (
    Builtin,
    DenseArrayBase,
    FileLineColLoc,
    FloatAttr,
    FunctionType,
    IntegerAttr,
    IntegerType,
    ModuleOp,
    StringAttr,
    UnitAttr,
    f32,
    i32,
    i64,
)
from xdsl.dialects.func import Func, FuncOp
from xdsl.dialects.utils.enum_attribute import EnumAttribute
from xdsl.ir import Dialect, SpacedOpaqueSyntaxAttribute
from xdsl.irdl import (
    AnyAttr,
    AttrSizedOperandSegments,
    IRDLOperation,
    ParsePropInAttrDict,
    VarConstraint,
    attr_def,
    irdl_attr_definition,
    irdl_op_definition,
    operand_def,
    opt_attr_def,
    opt_operand_def,
    opt_prop_def,
    opt_region_def,
    prop_def,
    region_def,
    result_def,
    successor_def,
    traits_def,
    var_operand_def,
    var_region_def,
    var_result_def,
)
from xdsl.parser import Parser
from xdsl.traits import IsTerminator, NoTerminator
from xdsl.utils.str_enum import StrEnum

from shardir.diagnostics import ParseErrors
from shardir.dialects.dist import AxesAttr
from shardir.syntax.parser import IRParser, default_parser, parse
from shardir.syntax.printer import print_module


def agree(text: str, parser: IRParser | None = None) -> ModuleOp:
    """Our module, after a check that xDSL's parser makes an equal one of the same text."""
    parser = parser or default_parser()
    ours = parser.parse(text, "t.ir")
    theirs = Parser(parser.ctx, text).parse_module()
    if "%later" in text:  # xDSL finds no module with a forward reference equal to any other
        assert str(ours) == str(theirs)
    else:
        assert ours.is_structurally_equivalent(theirs), f"{ours}\n{theirs}"
    return ours


def messages(text: str, parser: IRParser | None = None) -> list[str]:
    """`line:column message` of every error."""
    with pytest.raises(ParseErrors) as e:
        (parser or default_parser()).parse(text, "t.ir", verify=True)
    return [f"{d.line}:{d.column} {d.message}" for d in e.value.errors]


# ---- statements ----

AGREED = {
    "declaration": "func.func private @f(i32, tensor<2xf32>) -> (i32, f32)",
    "no results": "func.func @f() {\n  func.return\n}",
    "arguments": (
        "func.func public @f(%x: i32 {a.b = 1, c}, %y: f32) -> (i32 {d = unit}) "
        'attributes {e = "x"} {\n  func.return %x : i32\n}'
    ),
    "named module": "builtin.module @m attributes {a = 1} {\n  builtin.module {\n  }\n}",
    "generic": (
        '%x, %y:2 = "test.op"() <{p = 1 : i32}> {a = 2 : i8} : () -> (i32, i64, f32)\n'
        '"test.op"(%x, %y#1, %y#0) : (i32, f32, i64) -> ()'
    ),
    "regions": (
        '"test.op"() ({\n  %a = "test.op"() : () -> i32\n}, {\n^bb0(%b: i32):\n'
        '  "test.op"(%b) : (i32) -> ()\n}, {}) : () -> ()'
    ),
    "blocks": (
        '"test.op"() ({\n^entry(%b: i32):\n  "test.termop"(%b)[^next, ^entry] : (i32) -> ()\n'
        '^next:\n  "test.termop"()[^entry] : () -> ()\n}) : () -> ()'
    ),
    "forward reference": (
        '"test.op"() ({\n  "test.op"(%later) : (i32) -> ()\n  %later = "test.op"() : () -> i32\n'
        "}) : () -> ()"
    ),
    "calls": (
        "func.func @f(%x: i32) -> i32 {\n  %y = func.call @f(%x) : (i32) -> i32\n"
        "  func.return %y : i32\n}"
    ),
    "comments": "// one\nfunc.func @f() { // two\n  // three\n  func.return // four\n} // five",
    "quoted symbols": 'func.func @"a b"() {\n  func.call @"a b"() : () -> ()\n  func.return\n}',
    "strategies": (
        "dist.mesh @m <dp = 2, tp = 4>\n"
        "func.func @f(%x: tensor<8x8xf32, #dist.layout<@m, [{dp}, {tp:(2)2}], partial sum {x}>>) {\n"
        "  %y = nn.matmul %x, %x strategy <((2, 1), (1, 4))> {a = 1} : "
        "(tensor<8x8xf32, #dist.layout<@m, [{dp}, {tp:(2)2}], partial sum {x}>>, "
        "tensor<8x8xf32, #dist.layout<@m, [{dp}, {tp:(2)2}], partial sum {x}>>) -> tensor<8x8xf32>\n"
        "  %s = nn.softmax %y axis 1 : (tensor<8x8xf32>) -> tensor<8x8xf32>\n"
        "  %r = nn.reduce <sum> %s dims <0, 1> keep : (tensor<8x8xf32>) -> tensor<1x1xf32>\n"
        "  func.return\n}"
    ),
    "aliases": (
        "#l = #dist.layout<@m, [{dp}, {}]>\n!t = tensor<8x8xf32, #l>\n#i = 7 : i32\n"
        "func.func @f(%x: !t, %y: tensor<8x8xf32, #l>) -> !t attributes {a = [#i, #l]} {\n"
        "  func.return %x : !t\n}"
    ),
}


@pytest.mark.parametrize("text", AGREED.values(), ids=AGREED)
def test_agrees_with_xdsl(text: str) -> None:
    module = agree(text, with_test())
    for generic in (False, True):
        again = print_module(module, generic=generic)
        assert print_module(agree(again, with_test()), generic=generic) == again


ATTRIBUTES = """
1 | -1 | 0x1F | 7 : i8 | -7 : si16 | 7 : ui4 | 3 : index | true | false | 1.0 | -2.5e-3 : f32 | 0x7FC00000 : f32
0xFF800000 : f32 | 1 : f32 | 1.5 : bf16 | "a" | "a\\\\b\\"c\\nd\\41" | "" | unit | @a | @a::@b::@"c d"
[] | [1, "a", [2.0 : f16]] | {} | {a = 1, "b c" = [unit], d} | i32 | tensor<4x?xf32> | tensor<f32> | tensor<*xf32>
() -> () | (i32) -> i32 | (i32, f32) -> (i32, f32) | () -> (() -> i32) | tuple<i32, tuple<>> | none | index
vector<4xf32> | memref<4x4xf32> | complex<f32> | f8E4M3FN | tf32 | i1 | si8 | ui64
dense<1.0> : tensor<2xf32> | dense<[[1, 2], [3, 4]]> : tensor<2x2xi32> | dense<[]> : tensor<0xi32>
dense<"0x0000803F"> : tensor<1xf32> | array<i64: 1, 2> | array<f32: 1.5> | array<i32> | affine_map<(d0) -> (d0)>
loc(unknown) | loc("a.py":1:2) | loc("name"("a.py":1:2)) | loc(callsite("f" at "g.py":1:2))
loc(fused["a", "b.py":3:4]) | #dist.axes<dp, tp:(1)2> | #dist.strategy<((2, 4), (4, 1))>
tensor<2x2xf32, #dist.local<@m, [{dp}, {}], of [3, 2]>> | #train.init<normal, mean = 0.0, std = 1.0>
"""


@pytest.mark.parametrize("text", [t.strip() for t in re.split(r" \| |\n", ATTRIBUTES) if t.strip()])
def test_attribute(text: str) -> None:
    module = agree(f"builtin.module attributes {{a = {text}}} {{\n}}")
    again = agree(print_module(module))
    assert again.attributes == module.attributes


def test_unicode_strings() -> None:
    """xDSL reads bytes beyond ASCII as another attribute; we keep text text."""
    module = parse(
        'builtin.module attributes {a = "h\u00e9\u4e2d", b = "\\C3\\A9", c = "\\FF"} {\n}'
    )
    assert module.attributes["a"] == StringAttr("h\u00e9\u4e2d")
    assert module.attributes["b"] == StringAttr("\u00e9")
    assert module.attributes["c"].name == "bytes"
    assert parse(print_module(module)).attributes == module.attributes


def test_names_are_kept() -> None:
    text = (
        "func.func @f(%x: i32, %x_1: i32, %x_7: i32, %0: i32) {\n"
        '  %a.b$c = "test.op"(%x_1, %x_7, %0) : (i32, i32, i32) -> i32\n  func.return\n}\n'
    )
    printed = print_module(with_test().parse(text))
    assert "%x: i32, %x_1: i32, %x_7: i32, %0: i32" in printed
    assert "%a.b$c = " in printed


def test_equal_names_are_told_apart() -> None:
    module = with_test().parse('%x = "test.op"() : () -> i32\n%x_1 = "test.op"() : () -> i32\n')
    first, second = module.body.block.ops
    clone = first.clone()
    module.body.block.add_op(clone)
    printed = print_module(module)
    assert re.findall(r"%\S+", printed) == ["%x", "%x_1", "%x_2"]
    assert second.results[0].name_hint == "x_1"


# ---- places ----


def test_locations() -> None:
    text = (
        "func.func @f(%x: i32,\n             %y: i32) {\n"
        '  %a, %b = "test.op"() : () -> (i32, i32)\n  %c = "test.op"() : () -> i32 loc("z.py":9:8)\n'
        "  func.return\n}\n"
    )
    module = with_test().parse(text, "places.ir")
    func = module.body.block.first_op
    assert isinstance(func, FuncOp)
    at = [place(op.location) for op in list(module.walk())[1:]]
    assert at == [
        ("places.ir", 1, 1), ("places.ir", 3, 12), ("z.py", 9, 8), ("places.ir", 5, 3),
    ]  # fmt: skip
    assert [place(a.location) for a in func.args] == [("places.ir", 1, 14), ("places.ir", 2, 14)]
    printed = print_module(module, locations=True)
    again = with_test().parse(printed)
    assert [place(op.location) for op in list(again.walk())[1:]] == at


def place(loc: object) -> tuple[str, int, int]:
    assert isinstance(loc, FileLineColLoc)
    return loc.filename.data, loc.line.data, loc.column.data


# ---- formats: a dialect that has one op for each kind of directive ----


class Color(StrEnum):
    red = "red"
    green = "green"


@irdl_attr_definition
class ColorAttr(EnumAttribute[Color], SpacedOpaqueSyntaxAttribute):
    name = "fmt.color"


@irdl_op_definition
class Operands(IRDLOperation):
    name = "fmt.operands"
    a = operand_def()
    rest = var_operand_def()
    r = result_def()
    assembly_format = "$a (`with` $rest^)? attr-dict `:` functional-type(operands, results)"


@irdl_op_definition
class Segments(IRDLOperation):
    name = "fmt.segments"
    a = var_operand_def()
    b = opt_operand_def()
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    assembly_format = "`(` $a `:` type($a) `)` (`b` $b^ `:` type($b))? attr-dict"


@irdl_op_definition
class Same(IRDLOperation):
    T: ClassVar = VarConstraint("T", AnyAttr())
    name = "fmt.same"
    a = operand_def(T)
    b = operand_def(T)
    r = result_def(T)
    assembly_format = "$a `,` $b attr-dict `:` type($r)"


@irdl_op_definition
class Attributes(IRDLOperation):
    name = "fmt.attributes"
    color = prop_def(ColorAttr)
    dim = prop_def(IntegerAttr[IntegerType].constr(i64))
    rate = prop_def(FloatAttr.constr(f32))
    text = prop_def(StringAttr)
    sizes = prop_def(DenseArrayBase.constr(i32))
    axes = prop_def(AxesAttr)
    any = attr_def(AnyAttr())
    maybe = opt_attr_def(StringAttr)
    flag = opt_prop_def(UnitAttr)
    assembly_format = (
        "$color `dim` $dim `rate` $rate $text `sizes` $sizes `over` $axes `any` $any "
        "(`maybe` $maybe^)? (`flag` $flag^)? attr-dict"
    )


@irdl_op_definition
class Either(IRDLOperation):
    name = "fmt.either"
    a = opt_prop_def(StringAttr)
    b = opt_prop_def(StringAttr)
    assembly_format = "(`a` $a^) : (`b` $b)? attr-dict"


@irdl_op_definition
class Regions(IRDLOperation):
    name = "fmt.regions"
    body = region_def()
    more = opt_region_def()
    traits = traits_def(NoTerminator())
    assembly_format = "attr-dict-with-keyword $body (`else` $more^)?"


@irdl_op_definition
class ManyRegions(IRDLOperation):
    name = "fmt.many"
    bodies = var_region_def()
    traits = traits_def(NoTerminator())
    assembly_format = "`{` attr-dict-with-keyword `}` $bodies"


@irdl_op_definition
class Jump(IRDLOperation):
    name = "fmt.jump"
    to = successor_def()
    traits = traits_def(IsTerminator())
    assembly_format = "$to attr-dict"


@irdl_op_definition
class InDict(IRDLOperation):
    name = "fmt.in_dict"
    hidden = prop_def(StringAttr)
    r = var_result_def()
    irdl_options = (ParsePropInAttrDict(),)
    assembly_format = "attr-dict `->` `(` type($r) `)`"


FMT = Dialect(
    "fmt",
    [Operands, Segments, Same, Attributes, Either, Regions, ManyRegions, Jump, InDict],
    [ColorAttr],
)
_parsers: list[IRParser] = []


def with_test() -> IRParser:
    """Everything, with xDSL's test dialect and the one above."""
    if not _parsers:
        from shardir.dialects import DIALECTS

        ours = [make() for make in DIALECTS.values()]
        _parsers.append(IRParser([Builtin, Func, *ours, xtest.Test, FMT]))
    return _parsers[0]


FORMATS = {
    "operands": (
        '%x = "test.op"() : () -> i32\n%y = fmt.operands %x : (i32) -> i32\n'
        "%z = fmt.operands %x with %y, %x {a} : (i32, i32, i32) -> f32"
    ),
    "segments": (
        '%x = "test.op"() : () -> i32\nfmt.segments(%x, %x : i32, i32) b %x : i32\n'
        "fmt.segments(%x : i32) {a = 1}"
    ),
    "inferred": '%x = "test.op"() : () -> i32\n%y = fmt.same %x, %x : i32\n%z = fmt.same %y, %x : i32',
    "attributes": (
        'fmt.attributes green dim -3 rate 0.5 "t" sizes [1, -2] over <dp> any [1, @a] maybe "m" flag\n'
        'fmt.attributes red dim 3 rate 1.5e3 "" sizes [] over <dp, tp> any tensor<4xf32> {x = 1}'
    ),
    "either": 'fmt.either a "x"\nfmt.either b "y" {z}',
    "regions": (
        "fmt.regions {\n}\nfmt.regions attributes {a = 1} {\n  fmt.regions {\n  }\n} else {\n"
        '  "test.op"() : () -> ()\n}'
    ),
    "many": "fmt.many {attributes {a = 1}} {\n} {\n}\nfmt.many {}",
    "successors": '"test.op"() ({\n  fmt.jump ^a\n^a:\n  fmt.jump ^b {x}\n^b:\n  fmt.jump ^a\n}) : () -> ()',
    "properties in the dictionary": 'fmt.in_dict {hidden = "h", a = 1} -> (i32, f32)',
}


@pytest.mark.parametrize("text", FORMATS.values(), ids=FORMATS)
def test_formats(text: str) -> None:
    module = agree(text, with_test())
    again = print_module(module)
    assert agree(again, with_test()).is_structurally_equivalent(module)


def test_attributes_by_hand() -> None:
    op = with_test().parse(FORMATS["attributes"]).body.block.first_op
    assert isinstance(op, Attributes)
    assert op.color == ColorAttr(Color.green)
    assert op.dim == IntegerAttr(-3, i64)
    assert op.rate == FloatAttr(0.5, f32)
    assert op.sizes == DenseArrayBase.from_list(i32, [1, -2])
    assert op.maybe == StringAttr("m") and op.flag == UnitAttr()


def test_segments_by_hand() -> None:
    op = with_test().parse(FORMATS["segments"]).body.block.last_op
    assert isinstance(op, Segments)
    assert len(op.a) == 1 and op.b is None


def test_function_attributes_by_hand() -> None:
    func = parse(
        'func.func private @f(%x: i32 {p = 1 : i32}, %y: i32) -> (i32, i32 {q = "r"}) '
        "attributes {s} {\n  func.return %x, %y : i32, i32\n}"
    ).body.block.first_op
    assert isinstance(func, FuncOp)
    assert func.sym_visibility == StringAttr("private")
    assert func.function_type == FunctionType.from_lists([i32, i32], [i32, i32])
    assert [dict(d.data) for d in func.arg_attrs or ()] == [{"p": IntegerAttr(1, i32)}, {}]
    assert [dict(d.data) for d in func.res_attrs or ()] == [{}, {"q": StringAttr("r")}]
    assert func.attributes == {"s": UnitAttr()}


# ---- errors: what is said, and where ----

WRONG = {
    "%x = nn.relu %y : (i32) -> i32": ["1:14 %y is used, but not defined"],
    "nn.rellu": ["1:1 operation nn.rellu is not registered; did you mean nn.relu?"],
    "zz.frob": ["1:1 operation zz.frob is not registered: there is no dialect zz"],
    '"nn.rellu"() : () -> ()': ["1:1 operation nn.rellu is not registered; did you mean nn.relu?"],
    "arith.addi": [
        '1:1 arith.addi is not an op of shardir; use the generic form "arith.addi"(...)'
    ],
    "func.func @f(%x: tensor<4xf32) {\n  func.return\n}": [
        "1:24 this '<' is never closed, or nests too deeply"
    ],
    "func.func @f() attributes {a = 1 {\n  func.return\n}": [
        "1:27 this '{' is never closed, or nests too deeply"
    ],
    'func.func @f() attributes {a = "x} {\n  func.return\n}': [
        "1:27 a string after this '{' is never closed"
    ],
    "func.func @f(%x: i32, %x: i32) {\n  func.return\n}": ["1:23 %x is already defined"],
    "func.func @f() {\n  func.return\n}\nfunc.func @f() {\n  func.return\n}": [
        "4:1 @f is already defined"
    ],
    "func.func @f() {\n  func.return\n": [
        "2:13 expected a block name, an operation or '}', got the end of the file"
    ],
    "func.func @f() {": [
        "1:16 expected a block name, an operation or '}', got the end of the file"
    ],
    "func.func @f(%x: #a) {\n  func.return\n}": ["1:18 expected a type, got '#a'"],
    "dist.mesh @m <dp = 2, dp = 4>": ["1:23 expected axis dp once in the mesh, got it twice"],
    "dist.mesh @m <dp 2>": ["1:18 "],
    "dist.mesh m <dp = 2>": ["1:11 expected a symbol, got 'm'"],
    "#a = #dist.layot<@m, []>": [
        "1:6 attribute #dist.layot is not registered; did you mean dist.layout?"
    ],
    "#a = 1\n#a = 2": ["2:1 #a is already defined"],
    "func.func @f(%x: tensor<4xf32, #lay>) {\n  func.return\n}\n#lay1 = unit": [
        "1:32 #lay is not defined; did you mean #lay1?"
    ],
    "builtin.module attributes {a = 1, a = 2} {\n}": [
        "1:35 a occurs twice in this dictionary; drop one of them"
    ],
    "builtin.module attributes {a = 300 : i8} {\n}": ["1:32 "],
    "builtin.module attributes {a = 1.5 : i8} {\n}": ["1:32 a float cannot have type i8"],
    "builtin.module attributes {a = tensor<4xf33>} {\n}": [
        "1:41 unknown type f33; did you mean f32?"
    ],
    "builtin.module attributes {a = vector<4xq>} {\n}": ["1:41 "],
    'builtin.module attributes {a = "\\z"} {\n}': ["1:33 unknown escape '\\\\z' in a string"],
    "}": ["1:1 expected an operation or the end of the file, got '}'"],
    "func.func @f() {\n}": ["1:1 the body of func.func is empty; it must end with a terminator"],
    'func.func @f() {\n  "test.termop"()[^a] : () -> ()\n}': [
        "2:19 ^a is not a block of this region"
    ],
    'fmt.either a "x" b': ["1:18 "],
    "fmt.attributes gren": ["1:16 expected 'green' or 'red', got 'gren'; did you mean green?"],
    "fmt.in_dict -> (i32)": ["1:1 "],
    '%a = "test.op"() : () -> i32\n"test.op"(%a#1) : (i32) -> ()': [
        "2:11 %a has 1 results, so there is no %a#1"
    ],
    '%a:2 = "test.op"() : () -> i32': ["1:1 test.op has 1 results, but 2 are named"],
    '"test.op"(%a) : () -> ()': ["1:1 1 operands, but 0 operand types"],
}


@pytest.mark.parametrize("text", WRONG)
def test_errors(text: str) -> None:
    found = messages(text, with_test())
    assert len(found) == len(WRONG[text]), found
    for have, want in zip(found, WRONG[text], strict=True):
        assert have.startswith(want), found


def test_dominance() -> None:
    """xDSL accepts both: a use before the definition, and one beside it."""
    before = (
        "func.func @f() {\n"
        '  "test.op"(%a) : (i32) -> ()\n  %a = "test.op"() : () -> i32\n  func.return\n}'
    )
    assert messages(before, with_test()) == ["2:3 %a is used before it is defined"]
    beside = (
        '"test.op"() ({\n  "test.termop"()[^l, ^r] : () -> ()\n^l:\n'
        '  %a = "test.op"() : () -> i32\n  "test.termop"()[^j] : () -> ()\n^r:\n'
        '  "test.termop"()[^j] : () -> ()\n^j:\n  "test.termop"(%a) : (i32) -> ()\n}) : () -> ()'
    )
    assert messages(beside, with_test()) == [
        "9:3 %a is used where its definition does not dominate it"
    ]
    through = beside.replace("^l, ^r", "^l").replace("^r:\n", "^r(%z: i32):\n")
    with_test().parse(through, verify=True)
    isolated = (
        '%a = "test.op"() : () -> i32\nfunc.func @f() {\n  "test.op"(%a) : (i32) -> ()\n'
        "  func.return\n}"
    )
    assert messages(isolated, with_test()) == ["3:13 %a is used, but not defined"]


def test_every_op_is_verified() -> None:
    text = (
        "func.func @f(%x: tensor<2x3xf32>) {\n"
        + "".join(
            "  %a = nn.matmul %x, %x : (tensor<2x3xf32>, tensor<2x3xf32>) -> tensor<2x3xf32>\n".replace(
                "%a", f"%a{i}"
            )
            for i in range(3)
        )
        + "  func.return\n}"
    )
    found = messages(text)
    assert [f.split()[0] for f in found] == ["2:9", "3:9", "4:9"]


def test_caret() -> None:
    with pytest.raises(ParseErrors) as e:
        parse("func.func @f(%x: i32) {\n\t%y = nn.relu %x :: (i32) -> i32\n}", "a.ir")
    assert str(e.value) == (
        "a.ir:2:19: error: expected a function type, got ':'\n"
        "  \t%y = nn.relu %x :: (i32) -> i32\n  \t                 ^"
    )


def test_examples_agree_with_xdsl() -> None:
    for path in sorted((Path(__file__).parents[2] / "docs" / "examples").glob("*.ir")):
        agree(path.read_text())
