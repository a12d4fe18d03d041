"""Values of the interpreters: element types in numpy, and the shards and partial values of ranks.

numpy has no bf16, and few machines compute in f16. Values of both types are stored as float32, and
rounded to the type's precision after each op.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
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
from shardir.dialects.nn.base import Array

_exact: ContextVar[bool] = ContextVar("exact", default=False)


first_values: ContextVar[dict[Any, Any] | None] = ContextVar("first_values", default=None)
"""The values of the first run that later runs use again, such as the result of each
nn.stop_gradient by its order; None outside `for_differences`."""


@contextmanager
def for_differences() -> Iterator[None]:
    """Run programs for difference quotients within the block: all floats in f64, and each
    nn.stop_gradient with its value of the first run."""
    tokens = _exact.set(True), first_values.set({})
    try:
        yield
    finally:
        _exact.reset(tokens[0])
        first_values.reset(tokens[1])


def value_of_first_run(key: Any, value: Array) -> Array:
    """Return a value; within `for_differences` the value of the first run."""
    first = first_values.get()
    return value if first is None else first.setdefault(key, value)


@contextmanager
def numbered_run(k: int) -> Iterator[None]:
    """Run microbatch `k` of a program within the block. Each microbatch has its own first values
    for difference quotients."""
    first = first_values.get()
    token = first_values.set(None if first is None else first.setdefault(k, {}))
    try:
        yield
    finally:
        first_values.reset(token)


@lru_cache(maxsize=64)
def storage(element: Attribute) -> type:
    """Return the numpy type that stores an element type."""
    if isinstance(element, Float64Type):
        return np.float64
    if isinstance(element, Float32Type | BFloat16Type | Float16Type):
        return np.float32
    if isinstance(element, IntegerType):
        kinds: dict[int, type] = {1: np.bool_, 32: np.int32, 64: np.int64}
        if element.width.data in kinds:
            return kinds[element.width.data]
    raise ShardirError(
        f"expected an element type of f64, f32, bf16, f16, i64, i32 or i1, got {element}; use "
        "nn.convert"
    )


def round_to_element(array: Any, element: Attribute) -> Array:
    """Convert an array to the storage type, and round it to the precision of the element type."""
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


def split(array: Array, layout: Layout, mesh: Mesh, holder: int = 0) -> list[Array]:
    """Return the shard of each rank, or its partial value where the layout is partial.

    Args:
        holder: the rank among those with partial values, modulo their number, that has the maximum
            or minimum of the first element. Operands with different holders expose an op that
            passes on partial maxima where it must not.
    """
    n = mesh.extent(layout.partial)
    return [
        partial_value(
            array[layout.slices(mesh, array.shape, rank)],
            layout.reduction, n, mesh.index(rank, layout.partial), holder,
        )
        for rank in range(mesh.size)
    ]  # fmt: skip


def partial_value(x: Array, reduction: str, n: int, k: int, holder: int) -> Array:
    """Return partial value `k` of `n`, whose reduction is `x`, without rounding.

    The ranks take turns with the elements, as on a checkerboard: a rank has the maximum (minimum)
    of some elements and less (more) of the others, and its shares of a sum differ in sign. This
    exposes an op that takes one partial value for the value, that is not linear in them, or that
    expects one rank to have all maxima. An infinity or NaN of a sum is in one share.
    """
    if n == 1:
        return x
    boolean, zeros = x.dtype == bool, np.zeros_like(x)
    turn = (k + sum(np.indices(x.shape, sparse=True), np.zeros(x.shape, np.int64))) % n
    match reduction:
        case "sum" if boolean:
            return np.where(turn == 0, x, zeros)
        case "sum":
            share = np.where(turn % 2, -x, np.where((turn == 0) & (n % 2 == 0), 2 * x, x))
            return np.where(np.isfinite(x), share, np.where(turn == 0, x, zeros))
        case "mean":
            return np.where(turn % 2, zeros, np.where((turn == n - 1) & (n % 2 == 1), x, 2 * x))
        case "max" | "min":
            sign = -1 if reduction == "max" else 1
            if boolean:
                other = np.full_like(x, sign > 0)
            else:
                other = x + sign * (np.abs(np.where(np.isfinite(x), x, 0)) + 1)
            return np.where(turn == holder % n, x, other)
        case _:
            return x if k == 0 else zeros


def assemble(parts: list[Array], layout: Layout, mesh: Mesh, shape: Shape) -> Array:
    """Assemble a value from the shards or partial values of all ranks.

    Raises:
        ShardirError: replicas differ, or a shard has a wrong shape.
    """
    out = np.zeros(shape, parts[0].dtype)
    seen: dict[tuple[tuple[int, int], ...], Array] = {}
    for group in mesh.groups(layout.partial):
        total = reduce_parts([parts[r] for r in group], layout.reduction)
        region = layout.slices(mesh, shape, group[0])
        key = tuple((s.start, s.stop) for s in region)
        if key in seen:
            if not np.array_equal(seen[key], total, equal_nan=total.dtype.kind == "f"):
                gap = np.max(np.abs(seen[key].astype(float) - total.astype(float)))
                raise ShardirError(
                    f"expected equal replicas, got one on ranks {group} that differs by {gap:.3g}"
                )
        else:
            seen[key] = total
            if out[region].shape != total.shape:
                raise ShardirError(
                    f"expected a shard of shape {list(out[region].shape)} on rank {group[0]}, got "
                    f"{list(total.shape)}"
                )
            out[region] = total
    return out


def reduce_parts(parts: list[Array], reduction: str) -> Array:
    """Return the reduction of partial values."""
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
