"""Element types, and types without layouts."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from xdsl.dialects.builtin import (
    AnyFloat,
    BFloat16Type,
    Float16Type,
    IntegerType,
    NoneAttr,
    TensorType,
    f32,
    i1,
)
from xdsl.ir import Attribute, SSAValue

from shardir.algebra.cluster import BYTES
from shardir.compat.xdsl import type_of
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.dist import layout_of, tensor, with_layout
from shardir.dialects.signatures import SignatureMemo

Types = Sequence[TensorType]


@lru_cache(maxsize=64)
def element_name(element: Attribute) -> str:
    """The text of an element type, cached: printing an attribute is slow."""
    return str(element)


def itemsize(t: TensorType) -> int:
    """The size of an element in bytes; an i1 has one byte."""
    return BYTES[element_name(t.element_type)]


_sizes, _unsharded, _elements = SignatureMemo(), SignatureMemo(), SignatureMemo()


def size_of(v: SSAValue) -> int:
    """Return the bytes of a value on one device, in the local view."""
    return _sizes.of(type_of(v), _bytes)


def _bytes(t: Attribute) -> int:
    assert isinstance(t, TensorType)
    return prod(t.get_shape()) * itemsize(t)


def elements_of(v: SSAValue) -> int:
    """Return the number of elements of a value; in the local view, of its shard."""
    return _elements.of(type_of(v), lambda t: prod(t.get_shape()))


def unsharded_type(value: SSAValue) -> TensorType:
    """The type of a value without its layout."""
    return without_layout(type_of(value))


def without_layout(t: Attribute) -> TensorType:
    """The type without its layout."""
    return _unsharded.of(t, _without_layout)


def _without_layout(t: Attribute) -> TensorType:
    assert isinstance(t, TensorType)
    if isinstance(t.encoding, NoneAttr):
        return t
    return tensor(t.element_type, t.get_shape())


def statistic_type(t: TensorType, dims: int) -> TensorType:
    """The type of a statistic over the last `dims` dimensions of a value of type t; f32 if the
    value is narrower."""
    element = t.element_type
    narrow = isinstance(element, BFloat16Type | Float16Type)
    return tensor(f32 if narrow else element, t.get_shape()[:-dims])


def statistic_of(value: SSAValue, dims: int) -> TensorType:
    """The type of a statistic over the last `dims` dimensions of a value, with the layout of the
    remaining dimensions if the value has one."""
    t, layout = statistic_type(unsharded_type(value), dims), layout_of(value)
    if layout is None:
        return t
    return with_layout(t, replace(layout, dims=layout.dims[:-dims]).complete)


def same_element(operands: Types) -> Attribute:
    """Return the common element type of all operands. Raises ShardirError if they differ."""
    first = operands[0].element_type
    for t in operands[1:]:
        if t.element_type is not first and t.element_type != first:
            raise ShardirError(
                coded("T5", f"expected equal element types, got {first} and {t.element_type}")
            )
    return first


def arithmetic_element(op: str, operands: Types) -> Attribute:
    """Return the element type of all operands. Raises ShardirError for i1."""
    element = same_element(operands)
    if element == i1:
        message = f"expected integers or floats in {op}, got i1"
        raise ShardirError(coded("T5", message, use="use nn.convert or nn.select"))
    return element


def float_element(op: str, operands: Types) -> AnyFloat:
    """Return the element type of all operands. Raises ShardirError unless it is a float type."""
    element = same_element(operands)
    if not isinstance(element, AnyFloat):
        raise ShardirError(coded("T5", f"expected floats in {op}, got {element}"))
    return element


def integer_element(op: str, operands: Types) -> IntegerType:
    """Return the element type of all operands. Raises ShardirError unless it is i32 or i64."""
    element = same_element(operands)
    if not isinstance(element, IntegerType) or element == i1:
        raise ShardirError(coded("T5", f"expected integers in {op}, got {element}"))
    return element


def keep_element(x: TensorType, result: TensorType) -> None:
    """Raise ShardirError if the element types of a result and its operand differ."""
    if x.element_type != result.element_type:
        message = f"expected a result of {x.element_type}, got {result.element_type}"
        raise ShardirError(coded("T1", message))


def check_not_empty(count: int, what: str) -> None:
    """Raise ShardirError if the reduction `what` has no elements."""
    if count == 0:
        raise ShardirError(coded("T8", f"expected at least one element for {what}, got none"))
