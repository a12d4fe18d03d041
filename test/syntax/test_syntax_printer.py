"""Random modules: printed, read again by both parsers, and equal; names and places kept."""

import math
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.extent import extent
from xdsl.dialects.builtin import (
    AnyFloat,
    ArrayAttr,
    ComplexType,
    DenseArrayBase,
    DenseIntOrFPElementsAttr,
    DictionaryAttr,
    FloatAttr,
    FunctionType,
    IndexType,
    IntegerAttr,
    IntegerType,
    ModuleOp,
    Signedness,
    StringAttr,
    SymbolRefAttr,
    TensorType,
    UnitAttr,
    bf16,
    f16,
    f32,
    f64,
    i1,
    i32,
    i64,
)
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.parser import Parser

from shardir.algebra.notation import parse_axes, parse_layout, parse_strategy
from shardir.diagnostics import ShardirError
from shardir.dialects.dist import AxesAttr, LayoutAttr, MeshOp, RedistributeOp, StrategyAttr
from shardir.dialects.nn.activation import ReluOp
from shardir.dialects.nn.arithmetic import AddOp
from shardir.dialects.nn.contraction import MatmulOp
from shardir.dialects.nn.creation import dense_attr
from shardir.syntax.parser import default_parser, parse
from shardir.syntax.printer import print_module

ascii_text = st.text(st.characters(max_codepoint=0x7F), max_size=12)
any_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
names = st.from_regex(r"[a-zA-Z_$.-][a-zA-Z0-9_$.-]{0,5}(_[0-9])?", fullmatch=True)
sizes = st.integers(1, 64)
elements = st.sampled_from([f32, f64, bf16, f16, i32, i64, i1])
LAYOUTS = [
    LayoutAttr(parse_layout(t))
    for t in (
        "@m, [{dp}, {tp}]", "@m, [{}, {}]", "@m, [{dp, tp}, {}]", "@m, [{}, {tp:(2)2}]",
        "@m, [{dp}, {}], partial sum {tp}",
    )
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> TensorType:
    shape = draw(st.lists(sizes, min_size=2, max_size=2))
    encoding = draw(st.sampled_from([None, *LAYOUTS]))
    element = draw(elements)
    return TensorType(element, shape) if encoding is None else TensorType(element, shape, encoding)


def floats(type_: AnyFloat, width: Literal[16, 32, 64]) -> st.SearchStrategy[Attribute]:
    values = st.floats(width=width, allow_nan=False)
    return values.map(lambda v: FloatAttr(v, type_))


def attributes(text: st.SearchStrategy[str]) -> st.SearchStrategy[Attribute]:
    signed = st.sampled_from([Signedness.SIGNLESS, Signedness.SIGNED, Signedness.UNSIGNED])
    leaves = st.one_of(
        st.integers(-(2**31), 2**31 - 1).map(lambda v: IntegerAttr(v, i32)),
        st.integers(-(2**62), 2**62).map(lambda v: IntegerAttr(v, i64)),
        st.integers(0, 2**20).map(lambda v: IntegerAttr(v, IndexType())),
        st.booleans().map(IntegerAttr.from_bool),
        st.builds(IntegerType, st.integers(1, 128), signed),
        floats(f32, 32),
        floats(f64, 64),
        floats(f16, 16),
        text.map(StringAttr),
        st.just(UnitAttr()),
        st.builds(SymbolRefAttr, text, st.lists(text, max_size=2)),
        tensors(),
        st.lists(st.integers(-9, 9), max_size=3).map(lambda v: DenseArrayBase.from_list(i64, v)),
        st.sampled_from(LAYOUTS),
        st.just(AxesAttr(parse_axes("dp, tp:(1)2"))),
        st.just(StrategyAttr(parse_strategy("((2, 1), (1, 4))"))),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3).map(lambda v: ArrayAttr(tuple(v))),
            st.dictionaries(keys(text), inner, max_size=3).map(DictionaryAttr),
            st.builds(
                FunctionType.from_lists,
                st.lists(tensors(), max_size=2),
                st.lists(tensors(), max_size=2),
            ),
        ),
        max_leaves=6,
    )


def keys(text: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.from_regex(r"[a-z][a-z0-9_.]{0,6}", fullmatch=True), text.map(lambda t: t or "k")
    )


@st.composite
def modules(draw: st.DrawFn, text: st.SearchStrategy[str]) -> ModuleOp:
    values = attributes(text)
    extra = st.dictionaries(keys(text), values, max_size=2)
    ops: list[Operation] = [
        MeshOp.create(properties={"sym_name": StringAttr("m"), "axes": mesh_axes()})
    ]
    for i in range(draw(st.integers(1, 3))):
        args = draw(st.lists(tensors(), min_size=1, max_size=3))
        block = Block(arg_types=args)
        known: list[SSAValue] = list(block.args)
        for a in block.args:
            a.name_hint = draw(st.none() | names)
        for _ in range(draw(st.integers(0, 8))):
            op = draw_op(draw, known)
            op.attributes |= draw(extra)
            for r in op.results:
                r.name_hint = draw(st.none() | names)
            known += op.results
            block.add_op(op)
        out = draw(st.lists(st.sampled_from(known), max_size=2))
        block.add_op(ReturnOp(*out))
        types = [v.type for v in out]
        entries = [DictionaryAttr(draw(extra)) for _ in args]
        results = [DictionaryAttr(draw(extra)) for _ in types]
        func = FuncOp(
            f"f{i}" if draw(st.booleans()) else f"f {i}",
            FunctionType.from_lists(args, types),
            Region(block),
            draw(st.sampled_from([None, "private", "public"])),
            arg_attrs=ArrayAttr(entries) if any(e.data for e in entries) else None,
            res_attrs=ArrayAttr(results) if any(r.data for r in results) else None,
        )
        func.attributes |= draw(extra)
        ops.append(func)
    return ModuleOp(ops, draw(extra))


def mesh_axes() -> Attribute:
    (op,) = parse("dist.mesh @m <dp = 2, tp = 4>").ops
    return op.properties["axes"]


def draw_op(draw: st.DrawFn, known: list[SSAValue]) -> Operation:
    pick = st.sampled_from(known)
    strategy = {}
    if draw(st.booleans()):
        strategy = {"strategy": StrategyAttr(parse_strategy("((2, 1), (1, 4))"))}
    kind = draw(st.sampled_from([AddOp, ReluOp, MatmulOp, RedistributeOp]))
    count = 1 if kind in (ReluOp, RedistributeOp) else 2
    return kind.create(
        operands=[draw(pick) for _ in range(count)],
        result_types=[draw(tensors())],
        properties={} if kind is RedistributeOp else strategy,
    )


def hints(module: ModuleOp) -> list[str | None]:
    return [r.name_hint for op in module.walk() for r in op.results]


slow = settings(
    max_examples=extent(8, 40),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize=True,
)


@slow
@given(modules(ascii_text), st.booleans(), st.booleans())
def test_both_parsers_read_what_is_printed(module: ModuleOp, generic: bool, aliases: bool) -> None:
    text = print_module(module, generic=generic, aliases=aliases)
    ours = parse(text)
    assert ours.is_structurally_equivalent(module)
    theirs = Parser(default_parser().ctx, text).parse_module()
    assert theirs.is_structurally_equivalent(module)
    assert print_module(ours, generic=generic, aliases=aliases) == text


@slow
@given(modules(any_text))
def test_any_text_survives(module: ModuleOp) -> None:
    """xDSL's parser reads strings beyond ASCII as bytes; ours keeps them."""
    text = print_module(module, locations=True)
    ours = parse(text)
    assert ours.is_structurally_equivalent(module)
    assert print_module(ours, locations=True) == text


@given(attributes(any_text))
@settings(max_examples=extent(30, 300), deadline=None, derandomize=True)
def test_attributes_survive(attribute: Attribute) -> None:
    module = ModuleOp([], {"a": attribute})
    assert parse(print_module(module)).attributes == {"a": attribute}


def test_special_floats() -> None:
    for type_ in (f16, bf16, f32, f64):
        for v in (math.inf, -math.inf, math.nan, -0.0, 0.1, 1e-40, 65504.0, 3.0e38):
            if type_ == f16 and v == 3.0e38:  # no such number: an error, or an infinite one
                continue
            attribute = FloatAttr(v, type_)
            text = print_module(ModuleOp([], {"a": attribute}))
            again = parse(text).attributes["a"]
            assert isinstance(again, FloatAttr)
            assert type_.pack((again.value.data,)) == type_.pack((attribute.value.data,)), text
            for values in ([v], [v, 1.5]):
                dense = dense_attr(TensorType(type_, [2]), values)
                text = print_module(ModuleOp([], {"a": dense}))
                assert parse(text).attributes["a"] == dense, text
            pairs = TensorType(ComplexType(type_), [2])
            dense = DenseIntOrFPElementsAttr.from_list(pairs, [(v, 1.5), (1.5, v)])
            text = print_module(ModuleOp([], {"a": dense}))
            assert parse(text).attributes["a"] == dense, text


@pytest.mark.parametrize("spelled", [
    "3.0e38 : f16", "1" + "0" * 60 + " : f32", "dense<3.0e38> : tensor<2xf16>",
    "dense<[1.0e39, 1.0]> : tensor<2xf32>",
    "dense<(1.0, 3.0e39)> : tensor<2xcomplex<bf16>>",
])  # fmt: skip
def test_numbers_beyond_their_type_are_refused(spelled: str) -> None:
    """xDSL takes some as infinite ones, some as an error of Python's struct. 1.0e400, beyond all
    types, is how infinity is spelled."""
    with pytest.raises(ShardirError, match=r":1:32: error: expected (a )?numbers? in the range of"):
        parse(f"builtin.module attributes {{a = {spelled}}} {{}}")


def test_aliases() -> None:
    layout, other = LAYOUTS[0], LAYOUTS[1]
    t, u = TensorType(f32, [4, 4], layout), TensorType(f32, [4, 4], other)
    block = Block(arg_types=[t, TensorType(f32, [8, 8], layout), u])
    block.add_op(ReturnOp())
    module = ModuleOp([FuncOp("f", FunctionType.from_lists(block.arg_types, []), Region(block))])
    assert print_module(module) == (
        "#layout0 = #dist.layout<@m, [{dp}, {tp}]>\n"
        "builtin.module {\n"
        "  func.func @f(%0: tensor<4x4xf32, #layout0>, %1: tensor<8x8xf32, #layout0>, "
        "%2: tensor<4x4xf32, #dist.layout<@m, [{}, {}]>>) {\n"
        "    func.return\n  }\n}\n"
    )
    assert "#layout" not in print_module(module, aliases=False)


def test_ops_of_other_dialects_are_read_again() -> None:
    text = """
    func.func @f(%c: i1) -> i32 {
      %0 = arith.constant 3 : i32
      %1 = scf.if %c -> (i32) {
        scf.yield %0 : i32
      } else {
        %2 = arith.addi %0, %0 : i32
        %3 = func.call @f(%c) : (i1) -> i32
        scf.yield %2 : i32
      }
      func.return %1 : i32
    }"""
    module = Parser(default_parser().ctx, text).parse_module()
    printed = print_module(module)
    assert parse(printed).is_structurally_equivalent(module)
    assert "func.func @f(%c: i1)" in printed
