"""Attributes from plain Python values: element types, layouts, and the properties of ops.

    element_type("bf16")                                  # an xDSL type
    properties(nn.GeluOp, {"exact": True})                # {"exact": UnitAttr()}
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from xdsl.dialects.builtin import (
    ArrayAttr,
    DictionaryAttr,
    FloatAttr,
    IntegerAttr,
    StringAttr,
    UnitAttr,
    bf16,
    f16,
    f32,
    f64,
    i1,
    i32,
    i64,
)
from xdsl.ir import Attribute
from xdsl.irdl import AttrConstraint, BaseAttr, OptPropertyDef, ParamAttrConstraint

from shardir.diagnostics import ShardirError, did_you_mean
from shardir.dialects.dist import LayoutAttr, ShardingAttr
from shardir.dialects.nn.base import Props, TensorOp
from shardir.dialects.nn.properties import float_attr, int_attr
from shardir.dialects.text import IntsAttr, TextAttr, word, WordAttr

ELEMENTS: Mapping[str, Attribute] = {
    "f64": f64, "f32": f32, "bf16": bf16, "f16": f16, "i64": i64, "i32": i32, "i1": i1,
}  # fmt: skip
"""The element types by name."""


def element_type(dtype: str | Attribute) -> Attribute:
    """Return the element type with a name such as `bf16`.

    Raises:
        ShardirError: there is no such element type.
    """
    if isinstance(dtype, Attribute):
        return dtype
    if dtype not in ELEMENTS:
        raise ShardirError(f"expected a dtype of {', '.join(ELEMENTS)}, got {dtype!r}")
    return ELEMENTS[dtype]


def layout_attr(layout: str, mesh: str) -> LayoutAttr | ShardingAttr:
    """Parse a layout such as `[{dp}, {}]` on a mesh. A text with open dimensions, such as
    `[{dp, ?}, {?}p1]`, is a sharding.

    Raises:
        NotationError: the text is no layout.
    """
    kind = ShardingAttr if "?" in layout else LayoutAttr
    return kind.read(f"@{mesh}, {layout}")


@cache
def _definitions(kind: type[TensorOp]) -> dict[str, tuple[type[Attribute], bool]]:
    """Return the attribute class of each property of an op, and whether it is optional."""
    return {
        name: (_base(definition.constr), isinstance(definition, OptPropertyDef))
        for name, definition in kind.get_irdl_definition().properties.items()
    }


def _base(constraint: AttrConstraint) -> type[Attribute]:
    match constraint:
        case BaseAttr(attr=kind):
            return kind
        case ParamAttrConstraint(base_attr=kind):
            return kind
    raise AssertionError(constraint)


def properties(kind: type[TensorOp], options: Mapping[str, Any]) -> Props:
    """Convert Python values to the properties of an op: numbers, tuples of integers, words or
    attributes. None, and False for a flag, omit a property.

    Raises:
        ShardirError: a property is unknown or missing, or a value has a wrong type.
    """
    definitions = _definitions(kind)
    attributes: dict[str, Attribute] = {}
    for name, value in options.items():
        if name not in definitions:
            names = ", ".join(n for n in definitions)
            raise ShardirError(
                f"expected a property of {kind.name}: {names or 'it has none'}; got "
                f"{name!r}{did_you_mean(name, definitions)}"
            )
        attribute = _attribute(kind, name, definitions[name][0], value)
        if attribute is not None:
            attributes[name] = attribute
    missing = [n for n, (_, optional) in definitions.items() if not (optional or n in attributes)]
    if missing:
        raise ShardirError(f"expected {', '.join(missing)} of {kind.name}, got none")
    return attributes


def _attribute(
    kind: type[TensorOp], name: str, base: type[Attribute], value: Any
) -> Attribute | None:
    """Convert a Python value to an attribute of the class `base`; None omits it. Raises
    ShardirError."""
    if value is None or isinstance(value, base):
        return value
    match value:
        case bool() if issubclass(base, UnitAttr):
            return UnitAttr() if value else None
        case int() if issubclass(base, IntegerAttr) and not isinstance(value, bool):
            return int_attr(value)
        case int() | float() if issubclass(base, FloatAttr) and not isinstance(value, bool):
            return float_attr(float(value))
        case int() if issubclass(base, IntsAttr):
            return base((value,))
        case tuple() | list() if issubclass(base, IntsAttr) and all(type(n) is int for n in value):
            return base(tuple(value))
        case str() if issubclass(base, WordAttr):
            return word(base, value)
        case str() if issubclass(base, StringAttr):
            return StringAttr(value)
        case str() if issubclass(base, TextAttr):
            return base.read(value)
        case dict() if issubclass(base, DictionaryAttr):
            return DictionaryAttr({k: option_attribute(v) for k, v in value.items()})
    raise ShardirError(
        f"expected {name} of {kind.name} to be {_describe_values(base)}, got {value!r:.60}"
    )


def option_attribute(value: Any) -> Attribute:
    """Return an option of a custom op as an attribute. Raises ShardirError."""
    match value:
        case bool():
            return IntegerAttr(int(value), i1)
        case int():
            return int_attr(value)
        case float():
            return float_attr(value)
        case str():
            return StringAttr(value)
        case tuple() | list():
            return ArrayAttr([option_attribute(v) for v in value])
    raise ShardirError(f"expected an option of numbers, text or tuples of them, got {value!r:.60}")


def _describe_values(base: type[Attribute]) -> str:
    """Describe the values of properties with this attribute class."""
    for kind, text in (
        (UnitAttr, "True or False"), (IntegerAttr, "an integer"), (FloatAttr, "a number"),
        (IntsAttr, "integers"), (DictionaryAttr, "a dict"),
    ):  # fmt: skip
        if issubclass(base, kind):
            return text
    if issubclass(base, WordAttr):
        return f"one of {', '.join(base.words())}"
    return "text" if issubclass(base, StringAttr | TextAttr) else f"a {base.__name__}"
