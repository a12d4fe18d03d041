"""Programs of JAX: imported in the global view, on 8 ranks of the interpreter, and on 4 real ranks,
against JAX itself."""

import os
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest
from support.extent import sampled
from support.jax_programs import PROGRAMS

import shardir
from shardir.interpret.evaluator import run

MESH = "dp = 2, tp = 4"

ALWAYS = ("mlp", "vit", "embedding", "indices", "integers", "segments")


@pytest.fixture(autouse=True)
def in_f64() -> Any:
    with jax.enable_x64(True):
        yield


def arrays(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def assert_equal(got: Sequence[Any], expected: Any, tolerance: float = 1e-9) -> None:
    """Compare results, relative to the greatest element of each."""
    for x, y in zip(got, arrays(expected), strict=True):
        y = y.astype(np.float64)
        finite = y[np.isfinite(y)]
        largest = max(1.0, np.abs(finite).max()) if finite.size else 1.0
        np.testing.assert_allclose(
            np.asarray(x, np.float64), y, rtol=tolerance, atol=tolerance * largest
        )


@pytest.mark.parametrize("name", sampled(PROGRAMS, 6, also=ALWAYS))
def test_equals_jax(name: str) -> None:
    f, args, layouts = PROGRAMS[name]()
    compiled = shardir.from_jax(f, *args, in_shardings=layouts, mesh=MESH)
    expected = f(*args)
    assert_equal(run(compiled.original, compiled.name, arrays(args)), expected)
    assert_equal(run(compiled.module, compiled.name, arrays(args)), expected)
