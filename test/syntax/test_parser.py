"""The parser, against xDSL's own parser and against modules built by hand."""

# ruff: noqa: E501 (texts of programs)

import re
from pathlib import Path

import pytest
from support.parsers import agree, with_test
from xdsl.dialects.builtin import (
    FileLineColLoc,
    FunctionType,
    IntegerAttr,
    StringAttr,
    UnitAttr,
    i32,
)
from xdsl.dialects.func import FuncOp

from shardir.syntax.parser import parse
from shardir.syntax.printer import print_module

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
    """They stay strings; xDSL parses bytes beyond ASCII as another attribute."""
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


def test_equal_names_get_suffixes() -> None:
    module = with_test().parse('%x = "test.op"() : () -> i32\n%x_1 = "test.op"() : () -> i32\n')
    first, second = module.body.block.ops
    clone = first.clone()
    module.body.block.add_op(clone)
    printed = print_module(module)
    assert re.findall(r"%\S+", printed) == ["%x", "%x_1", "%x_2"]
    assert second.results[0].name_hint == "x_1"


# ---- locations ----


def test_locations() -> None:
    text = (
        "func.func @f(%x: i32,\n             %y: i32) {\n"
        '  %a, %b = "test.op"() : () -> (i32, i32)\n  %c = "test.op"() : () -> i32 loc("z.py":9:8)\n'
        "  func.return\n}\n"
    )
    module = with_test().parse(text, "located.ir")
    func = module.body.block.first_op
    assert isinstance(func, FuncOp)
    at = [location(op.location) for op in list(module.walk())[1:]]
    assert at == [
        ("located.ir", 1, 1), ("located.ir", 3, 12), ("z.py", 9, 8), ("located.ir", 5, 3),
    ]  # fmt: skip
    assert [location(a.location) for a in func.args] == [
        ("located.ir", 1, 14),
        ("located.ir", 2, 14),
    ]
    printed = print_module(module, locations=True)
    again = with_test().parse(printed)
    assert [location(op.location) for op in list(again.walk())[1:]] == at


def location(loc: object) -> tuple[str, int, int]:
    assert isinstance(loc, FileLineColLoc)
    return loc.filename.data, loc.line.data, loc.column.data


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


def test_examples_agree_with_xdsl() -> None:
    for path in sorted((Path(__file__).parents[2] / "docs" / "examples").glob("*.ir")):
        agree(path.read_text())
