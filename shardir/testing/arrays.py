"""Random arrays, and the comparison of results."""

from typing import Any

import numpy as np

from shardir.algebra.layout import Shape
from shardir.dialects.nn.base import Array
from shardir.interpret.values import round_to_element
from shardir.testing.programs import ELEMENTS, FLOATS, INTEGERS

TOLERANCE = {"f64": 1e-12, "f32": 1e-5, "bf16": 2.0**-4, "f16": 2.0**-7}
"""The tolerance relative to the largest element, or to 1: some rounding errors of intermediate
values up to 8."""


def numbers(rng: np.random.Generator, element: str, shape: Shape, kind: str = "normal") -> Array:
    """Return a random array of a type: `normal`, `positive` (0.5 to 2), `share` (0.1 to 0.9),
    `small` (-0.5 to 0.5), `ties` (few different values), `halves` (-2.5 to 2.5), or indices:
    `below:n`, or `slices:d:m,n`, those of the fields along dimension d within slices of m and n."""
    if kind.startswith("below:"):
        values: Any = rng.integers(0, int(kind[6:]), shape)
    elif kind.startswith("slices:"):
        dim, sizes = int(kind.split(":")[1]), [int(n) for n in kind.split(":")[2].split(",")]
        starts = np.cumsum([0, *sizes])
        of_fields = np.arange(shape[dim]) * len(sizes) // shape[dim]
        low, high = (e[of_fields] for e in (starts[:-1], starts[1:]))
        values = np.moveaxis(
            rng.integers(low, high, np.moveaxis(np.empty(shape), dim, -1).shape), -1, dim
        )
    elif element == "i1":
        values = rng.integers(0, 2, shape)
    elif element in INTEGERS:
        values = rng.integers(1 if kind == "positive" else -4, 5, shape)
    elif kind == "positive":
        values = rng.uniform(0.5, 2.0, shape)
    elif kind == "halves":
        values = rng.integers(-5, 6, shape) / 2
    elif kind == "share":
        values = rng.uniform(0.1, 0.9, shape)
    elif kind == "small":
        values = rng.uniform(-0.5, 0.5, shape)
    elif kind == "ties":
        values = rng.integers(-1, 2, shape)
    else:
        values = rng.standard_normal(shape)
    return round_to_element(values, ELEMENTS[element])


def differs(
    found: Array, wanted: Array, element: str, factor: float = 1.0, least: float = 0.0
) -> str:
    """Return the difference of two arrays beyond the tolerance of the type, or "".

    Args:
        least: the tolerance of a `wanted` that is less precise than its type.
    """
    if found.shape != wanted.shape:
        return f"expected the shape {[*wanted.shape]}, got {[*found.shape]}"
    if element not in FLOATS:
        return "" if np.array_equal(found, wanted) else f"expected {wanted}, got {found}"
    finite = np.isfinite(wanted)
    scale = max(1.0, float(np.max(np.abs(wanted), initial=0.0, where=finite)))
    wrong = ~np.isclose(
        found, wanted, rtol=0, atol=max(factor * TOLERANCE[element], least) * scale, equal_nan=True
    )
    if not wrong.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return (
        f"at {list(at)}: expected {wanted[at]:.9g}, got {found[at]:.9g} ({wrong.sum()} of "
        f"{wrong.size} elements differ)"
    )
