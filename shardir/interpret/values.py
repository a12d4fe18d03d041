"""Numbers of the interpreters: element types in numpy, parts of a value on each rank.

numpy has no bf16, and few machines calculate in f16: values of both are held as float32, rounded
to what the type can hold after each op.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
from xdsl.dialects.builtin import (
    AnyFloat,
    BFloat16Type,
    Float16Type,
    Float32Type,
    Float64Type,
    IntegerType,
    TensorType,
)
from xdsl.ir import Attribute

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Mesh
from shardir.diagnostics import ShardirError

Array = np.ndarray[Any, Any]


_exact: ContextVar[bool] = ContextVar("exact", default=False)


held: ContextVar[dict[Any, Array] | None] = ContextVar("held", default=None)
"""What each nn.stop_gradient of a function gave first, by their order, where it is to stay so."""


@contextmanager
def for_differences() -> Iterator[None]:
    """Within it programs can be run for difference quotients: all floats are double precision,
    whatever their type says, and what stops gradients keeps the value of the first run."""
    tokens = _exact.set(True), held.set({})
    try:
        yield
    finally:
        _exact.reset(tokens[0])
        held.reset(tokens[1])


def storage(element: Attribute) -> type:
    """The numpy type that holds an element type."""
    if isinstance(element, Float64Type):
        return np.float64
    if isinstance(element, Float32Type | BFloat16Type | Float16Type):
        return np.float32
    if isinstance(element, IntegerType):
        kinds: dict[int, type] = {1: np.bool_, 32: np.int32, 64: np.int64}
        if element.width.data in kinds:
            return kinds[element.width.data]
    raise ShardirError(f"no tensor of {element}; there are f64, f32, bf16, f16, i64, i32 and i1")


def rounded(array: Any, element: Attribute) -> Array:
    """The array in the storage type, with no more precision than the element type has."""
    kind = storage(element)
    out = np.asarray(array)
    if _exact.get() and isinstance(element, AnyFloat):
        return out.astype(np.float64, copy=False)
    if isinstance(element, IntegerType) and kind is not np.bool_ and out.dtype.kind == "f":
        out = np.trunc(out)
    out = out.astype(kind, copy=False)
    if isinstance(element, Float16Type):
        with np.errstate(over="ignore"):
            return out.astype(np.float16).astype(np.float32)
    if isinstance(element, BFloat16Type):
        bits = np.ascontiguousarray(out).view(np.uint32)
        nearest = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        short = (nearest & np.uint32(0xFFFF0000)).view(np.float32)
        return np.where(np.isnan(out), out, short).reshape(out.shape)
    return out


def split(array: Array, layout: Layout, mesh: Mesh) -> list[Array]:
    """What each rank holds of a value: its part, or over partial axes a contribution to it."""
    n = mesh.extent(layout.partial)
    return [
        contribution(
            array[layout.slices(mesh, array.shape, rank)],
            layout.reduction, n, mesh.index(rank, layout.partial),
        )
        for rank in range(mesh.size)
    ]  # fmt: skip


def contribution(x: Array, reduction: str, n: int, k: int) -> Array:
    """Number `k` of `n` contributions whose reduction is `x`, without rounding.

    They differ from each other and from `x`, so that an op that takes one for the value, or
    applies to each what holds for their sum only, does not go unnoticed.
    """
    if n == 1:
        return x
    boolean = x.dtype == bool
    match reduction:
        case "sum" if not boolean:
            first = 2 * x if n % 2 == 0 else x
            return first if k == 0 else -x if k % 2 else x
        case "mean":
            return x if n % 2 and k == n - 1 else np.zeros_like(x) if k % 2 else 2 * x
        case "max" | "min" if k > 0:
            worse = -1 if reduction == "max" else 1
            if boolean:
                return np.full_like(x, worse > 0)
            return np.where(np.isfinite(x), x + worse * (np.abs(x) + 1), x)
        case _:
            return x if k == 0 or reduction in ("max", "min") else np.zeros_like(x)


def assemble(parts: list[Array], layout: Layout, mesh: Mesh, shape: Shape) -> Array:
    """The value of which each rank holds a part: contributions reduced, shards put together.

    Raises:
        ShardirError: ranks that should hold the same part hold different ones.
    """
    out = np.zeros(shape, parts[0].dtype)
    seen: dict[tuple[tuple[int, int], ...], Array] = {}
    for group in mesh.groups(layout.partial):
        total = reduce_parts([parts[r] for r in group], layout.reduction)
        where = layout.slices(mesh, shape, group[0])
        key = tuple((s.start, s.stop) for s in where)
        if key in seen:
            if not np.array_equal(seen[key], total, equal_nan=total.dtype.kind == "f"):
                far = np.max(np.abs(seen[key].astype(float) - total.astype(float)))
                raise ShardirError(
                    f"ranks {group} hold a replica that differs from the others' by {far:.3g}"
                )
        else:
            seen[key] = total
            if out[where].shape != total.shape:
                raise ShardirError(
                    f"rank {group[0]} holds shape {list(total.shape)}, "
                    f"its part is {list(out[where].shape)}"
                )
            out[where] = total
    return out


def reduce_parts(parts: list[Array], reduction: str) -> Array:
    """Contributions -> value."""
    match reduction:
        case "sum" if parts[0].dtype == bool:
            return np.logical_or.reduce(parts)
        case "sum":
            return np.asarray(sum(parts[1:], parts[0]))
        case "mean":
            return np.asarray(sum(parts[1:], parts[0]) / len(parts), dtype=parts[0].dtype)
        case "max":
            return np.maximum.reduce(parts)
        case "min":
            return np.minimum.reduce(parts)
        case _:
            return parts[0]


def tensor_type(t: Attribute) -> TensorType:
    assert isinstance(t, TensorType)
    return t
