"""The partial values of ranks: each rank is right about some elements, and none about all."""

import numpy as np
import pytest

from shardir.dialects.nn.base import Array
from shardir.interpret.values import partial_value, reduce_parts

FLOATS = np.random.default_rng(0).normal(size=(6, 7))
INTEGERS = (FLOATS * 10).astype(np.int32)
FLOATS[0, 0], FLOATS[1, 2], FLOATS[5, 5] = np.inf, -np.inf, np.nan
GIVEN = {
    "sum": [FLOATS, INTEGERS, FLOATS > 0], "mean": [FLOATS],
    "max": [FLOATS, INTEGERS, FLOATS > 0], "min": [FLOATS, INTEGERS, FLOATS > 0],
}  # fmt: skip


def held(reduction: str, x: Array, n: int, holder: int) -> list[Array]:
    """Return the partial values of all ranks, after a check of their reduction."""
    parts = [partial_value(x, reduction, n, k, holder) for k in range(n)]
    np.testing.assert_allclose(reduce_parts(parts, reduction), x, rtol=1e-15)
    return parts


@pytest.mark.parametrize("n", [2, 3, 4, 6])
@pytest.mark.parametrize("reduction", GIVEN)
def test_they_are_mixed_by_element(reduction: str, n: int) -> None:
    for x in GIVEN[reduction]:
        boolean = x.dtype == bool
        told = x != (reduction == "min") if boolean else np.isfinite(x) & (x != 0)
        parts = held(reduction, x, n, holder=1)
        assert not all(np.array_equal(part[told], parts[0][told]) for part in parts)
        for part in parts:
            assert (part != x)[told].any()
            if reduction in ("max", "min") or boolean:
                assert (part == x)[told].any()
                continue
            shares = (part / np.where(told, x, 1))[told]
            assert len({*shares}) > 1, "equal shares of all elements"


def test_operands_have_their_maxima_on_different_ranks() -> None:
    first, second = (np.stack(held("max", np.ones((4, 4)), 2, holder=i)) for i in range(2))
    assert not np.array_equal(first == 1, second == 1)
