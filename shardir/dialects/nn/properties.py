"""Constructors and readers of op properties: integers, floats and lists of dimensions."""

from collections.abc import Mapping
from functools import lru_cache
from math import copysign

from xdsl.dialects.builtin import FloatAttr, IntegerAttr, StringAttr, f64, i64
from xdsl.ir import Attribute, Operation
from xdsl.irdl import irdl_attr_definition

from shardir.diagnostics import ShardirError, coded
from shardir.dialects.text import IntsAttr

Props = Mapping[str, Attribute]


@irdl_attr_definition
class DimsAttr(IntsAttr):
    """A list of dimensions: `<1, 0>`."""

    name = "nn.dims"


@lru_cache(maxsize=4096)
def int_attr(n: int) -> IntegerAttr:
    return IntegerAttr(n, i64)


def float_attr(x: float) -> FloatAttr:
    return _float_attr(x, copysign(1.0, x))


@lru_cache(maxsize=4096)
def _float_attr(x: float, sign: float) -> FloatAttr:
    """Return the attribute; `sign` is in the cache's key, since -0.0 equals 0.0."""
    return FloatAttr(x, f64)


@lru_cache(maxsize=4096)
def dims_attr(*dims: int) -> DimsAttr:
    return DimsAttr(dims)


@lru_cache(maxsize=4096)
def string_attr(text: str) -> StringAttr:
    return StringAttr(text)


def dims_of(props: Props, name: str, rank: int) -> tuple[int, ...]:
    """The dimensions of a DimsAttr property, negative ones counted from the end.

    Raises:
        ShardirError: a dimension does not exist, or occurs twice.
    """
    attr = props[name]
    assert isinstance(attr, DimsAttr)
    dims = tuple(_dimension(d, name, rank) for d in attr.data)
    if len(set(dims)) != len(dims):
        raise ShardirError(coded("T4", f"expected distinct {name}, got {list(attr.data)}"))
    return dims


def axis_of(props: Props, name: str, rank: int) -> int:
    """The dimension of an integer property, counted from the end when negative.

    Raises:
        ShardirError: the dimension does not exist.
    """
    return _dimension(int_of(props, name), name, rank)


def _dimension(d: int, name: str, rank: int) -> int:
    if not -rank <= d < rank:
        bounds = f"from {-rank} to {rank - 1}" if rank else "of a tensor that has dimensions"
        message = f"expected {name} {bounds}, got {d}"
        raise ShardirError(coded("T4", message, use="use a dimension of the tensor"))
    return d % rank


def int_of(props: Props, name: str) -> int:
    attr = props[name]
    assert isinstance(attr, IntegerAttr)
    return attr.value.data


def float_of(op: Operation, name: str) -> float:
    attr = op.properties[name]
    assert isinstance(attr, FloatAttr)
    return attr.value.data
