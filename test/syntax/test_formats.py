"""The directives of assembly formats, against xDSL's own parser and by hand."""

# ruff: noqa: E501 (texts of programs)

import pytest
import xdsl.irdl.declarative_assembly_format as fmt
from support.parsers import Attributes, Color, ColorAttr, Segments, agree, with_formats
from xdsl.dialects.builtin import (
    DenseArrayBase,
    FloatAttr,
    IntegerAttr,
    StringAttr,
    UnitAttr,
    f32,
    i32,
    i64,
)

from shardir.syntax import printer
from shardir.syntax.printer import print_module

COMMA = "," if hasattr(fmt.Directive, "is_comma_separated_list") else ""
"""Between regions, as xDSL reads it: a comma from 0.75 on."""

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
    "many": f"fmt.many {{attributes {{a = 1}}}} {{\n}}{COMMA} {{\n}}\nfmt.many {{}}",
    "successors": '"test.op"() ({\n  fmt.jump ^a\n^a:\n  fmt.jump ^b {x}\n^b:\n  fmt.jump ^a\n}) : () -> ()',
    "properties in the dictionary": 'fmt.in_dict {hidden = "h", a = 1} -> (i32, f32)',
}


@pytest.mark.parametrize("text", FORMATS.values(), ids=FORMATS)
def test_formats(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printer, "READ", {*printer.READ, "fmt"})  # as with_formats() does
    module = agree(text, with_formats())
    again = print_module(module)
    assert agree(again, with_formats()).is_structurally_equivalent(module)


@pytest.mark.parametrize("comma", ["", ","])
def test_regions_have_commas_between_or_not(comma: str) -> None:
    """Text that either version of xDSL printed is read."""
    text = f"fmt.many {{}} {{\n}}{comma} {{\n}}{comma} {{\n}}"
    op = with_formats().parse(text).body.block.first_op
    assert op is not None and len(op.regions) == 3


def test_attributes_by_hand() -> None:
    op = with_formats().parse(FORMATS["attributes"]).body.block.first_op
    assert isinstance(op, Attributes)
    assert op.color == ColorAttr(Color.green)
    assert op.dim == IntegerAttr(-3, i64)
    assert op.rate == FloatAttr(0.5, f32)
    assert op.sizes == DenseArrayBase.from_list(i32, [1, -2])
    assert op.maybe == StringAttr("m") and op.flag == UnitAttr()


def test_segments_by_hand() -> None:
    op = with_formats().parse(FORMATS["segments"]).body.block.last_op
    assert isinstance(op, Segments)
    assert len(op.a) == 1 and op.b is None
