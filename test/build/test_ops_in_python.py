"""Every op written in Python: the op of the text, from Python values."""

import pytest
from op_cases import CASES
from support.each import check_each
from xdsl.dialects.builtin import ArrayAttr, DenseIntOrFPElementsAttr, DictionaryAttr, UnitAttr
from xdsl.ir import Attribute

from shardir.build import Module, Value
from shardir.build.ops import KINDS
from shardir.dialects.nn import TensorOp
from shardir.dialects.nn.custom import python_value
from shardir.dialects.text import IntsAttr, TextAttr


def plain(attribute: Attribute) -> object:
    """The Python value of a property."""
    match attribute:
        case DenseIntOrFPElementsAttr():
            return attribute
        case UnitAttr():
            return True
        case DictionaryAttr():
            return {name: plain(a) for name, a in attribute.data.items()}
        case ArrayAttr():
            return tuple(plain(a) for a in attribute)
        case IntsAttr():
            return attribute.data
        case TextAttr():
            return attribute.to_text(attribute.data)
    return python_value(attribute)


def test_an_op_has_the_types_and_properties_that_are_given() -> None:
    check_each(check_cases_of, KINDS.values())


def check_cases_of(kind: type[TensorOp]) -> None:
    for case in (c for c in CASES if c.op is kind):
        element = case.elements[0]
        f = Module().function("f")
        operands = [f.input(f"x{i}", a.shape, a.element) for i, a in enumerate(case.args(element))]
        given = {name: plain(a) for name, a in case.props.items()}
        if not kind.INFERRED:
            result = case.result, case.result_element or element
            by_name = dict(zip(("shape", "dtype"), result, strict=True))
            given |= {"results": [result]} if kind is KINDS["custom"] else by_name
        made = getattr(f.nn, kind.name.removeprefix("nn."))(*operands, **given)
        values = (made,) if isinstance(made, Value) else made
        f.returns(*values)
        f.func.verify()
        op = values[0].ssa.owner
        assert isinstance(op, kind), case
        assert dict(op.properties) == dict(case.props), case
