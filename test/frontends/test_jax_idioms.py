"""What users of JAX write, beyond layers and steps: writes by a function, solutions of systems,
searches, special functions, and bits; against JAX, on two ranks of the interpreter."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardir
from shardir import ShardirError
from shardir.interpret.evaluator import run


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def writes(x: Any, i: Any, u: Any) -> Any:
    """Indices that occur twice, and one outside of the array."""
    small = jnp.asarray(x * 50, jnp.int8)
    return (
        x.at[i].subtract(u), x.at[i].apply(lambda v: v * 3 + 1), small.at[i].apply(jnp.square),
        x.at[jnp.array([1, 1, 3])].apply(jnp.sin), x.at[2:, 1].apply(jax.nn.relu),
        x.at[i + 9].apply(jnp.exp, unique_indices=True),
        jax.vmap(lambda row, j: row.at[j].subtract(1.5))(x, i[:, None] % 4),
        x.at[i].divide(u + 9), x.at[i].power(2), small.at[i].subtract(jnp.int8(100)),
    )  # fmt: skip


def systems(a: Any, b: Any) -> Any:
    """LU of a batch, with swapped rows, of a singular and of a wide matrix; and QR."""
    singular_and_swapped = jnp.stack([a[0] * 0 + 1, jnp.eye(3)[::-1]])
    wide = b[0].T
    return (
        jnp.linalg.solve(a, b), jnp.linalg.det(singular_and_swapped), jax.scipy.linalg.lu(wide),
        jnp.linalg.qr(b[1]),
    )  # fmt: skip


def searches(x: Any, q: Any) -> Any:
    ordered = jnp.sort(x[:, 0])
    found = jnp.searchsorted(ordered, q, method="compare_all", side="right")
    return found, jnp.interp(q, ordered, x[:, 1]), lax.approx_max_k(x, 2), lax.approx_min_k(x, 2)


def functions(x: Any, n: Any) -> Any:
    """Special functions, at their ends, at poles and in half precision."""
    half = x.astype(jnp.float16)
    return (
        lax.erf_inv(x), lax.erf_inv(half), lax.lgamma(x * 9), lax.digamma(x * 9), lax.digamma(half),
        lax.zeta(n, x), lax.polygamma(n, x + 2), lax.lgamma(half),
    )  # fmt: skip


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "writes": (writes, (draw(6, 4), np.array([1, 1, -1, 0, 1, 7]), draw(6, 4))),
    "systems": (systems, (draw(2, 3, 3), draw(2, 3, 2))),
    "searches": (searches, (draw(8, 4), draw(2, 3).ravel())),
    "functions": (
        functions,
        (
            np.array([-1, 1, 0, 0.5, -0.3, 0.9999, -7 / 9, 2, np.inf, -0.0], np.float32),
            np.array([2, 3, 2, 1, 0, 5, 4, 2.5, 2, 0.5], np.float32),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_jax(name: str) -> None:
    f, args = CASES[name]
    layouts = tuple(P("d") if x.shape[0] % 2 == 0 else P() for x in args)
    compiled = shardir.from_jax(f, *args, in_shardings=layouts, mesh="d = 2")
    expected = jax.tree.leaves(jax.jit(f)(*args))
    with np.errstate(all="ignore"):
        got = compiled.results(run(compiled.module, compiled.name, list(args)))
    for i, (x, y) in enumerate(zip(jax.tree.leaves(got), expected, strict=True)):
        x, y = (np.asarray(v, np.float64) for v in (x, y))
        np.testing.assert_allclose(x, y, 3e-5, 3e-5, err_msg=str(i))


@pytest.fixture(autouse=True)
def unoptimized() -> Any:
    """What XLA compiles runs once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def test_inverse_error_function_of_f64() -> None:
    """More exact than XLA's, which is up to 15 units in the last place off."""
    y = np.array([-3.2, -0.7, 1e-9, 0.4, 0.65, 2.1, 5.5])
    x = np.array([math.erf(v) for v in y])
    with jax.enable_x64(True):
        compiled = shardir.from_jax(lax.erf_inv, x, mesh="d = 2")
    (got,) = run(compiled.module, compiled.name, [x])
    derivative = 2 / math.sqrt(math.pi) * np.exp(-(y**2))
    error = 2**-53 * (4 * np.abs(y) + np.abs(x) / derivative)  # x is rounded too
    assert (np.abs(got - y) <= error).all()


NUMBERS = [
    0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1.0, -1.5, 6e-5, -1e-7, 65519.0, 65520.0, 3.4e38,
    1e-38, 448.0, 464.0,
]  # fmt: skip


def bits(x: Any, y: Any) -> Any:
    """Precisions, the next numbers, and the total order, in which the bits of NaN and -0 count."""
    kinds = (5, 10), (4, 3), (8, 7), (8, 10), (3, 2)
    reduced = [lax.reduce_precision(v, *kind) for v in (x, y) for kind in kinds]
    ordered = [
        p.bind(*jnp.broadcast_arrays(v[:, None], v))
        for v in (x, y) for p in (lax.lt_to_p, lax.le_to_p)
    ]  # fmt: skip
    return reduced, ordered, [lax.nextafter(v, v[::-1]) for v in (x, y)]


def test_bits_are_those_of_jax() -> None:
    args = np.array(NUMBERS, np.float32), jnp.array(NUMBERS, jnp.bfloat16)
    compiled = shardir.from_jax(bits, *args, mesh="d = 2")
    inputs = [np.asarray(x, np.float32) for x in args]
    with np.errstate(all="ignore"):
        got = compiled.results(run(compiled.module, compiled.name, inputs))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(bits)(*args)), strict=True):
        x, y = (np.asarray(v, np.float32) for v in (x, y))
        np.testing.assert_array_equal(x, y)
        is_number = ~np.isnan(y)
        np.testing.assert_array_equal(np.signbit(x)[is_number], np.signbit(y)[is_number])


def test_writes_that_are_refused() -> None:
    def f(x: Any, i: Any) -> Any:
        return x.at[i].apply(jnp.exp)

    with pytest.raises(ShardirError, match=r"up to 17 writes of an element; give unique_indices"):
        shardir.from_jax(f, draw(6, 4), np.zeros(17, np.int32), mesh="d = 2")


def test_results_are_named_by_their_paths() -> None:
    """A result that is an argument has its name."""

    def f(w: Any, x: Any) -> Any:
        return {"loss": (x @ w).sum(), "x": x * 3, "aux": (x, [w, x + 1])}

    compiled = shardir.from_jax(f, draw(4, 4), draw(8, 4), mesh="d = 2")
    assert "return x, w, aux_1_1, loss, x_1" in compiled.program
    first = shardir.from_jax(lambda x: (x * 2, x), draw(8, 4), mesh="d = 2")
    assert "return result_0, x" in first.program


def test_a_loss_in_stages_and_replicas() -> None:
    """The options are those of the step; without a mesh, each stage or replica is one device."""

    def loss(w: Any, x: Any) -> Any:
        return (jnp.tanh(x @ w[0]) @ w[1]).mean()

    args = [draw(4, 4), draw(4, 4)], draw(8, 4)
    for name, text in (
        ("stages", "1f1b, ranks = 2"),
        ("sync", "nesterov, replicas = 2, every = 8, lr = 0.7, momentum = 0.9"),
    ):
        options: dict[str, Any] = {name: text, "accumulate": "mean, microbatches = 2"}
        compiled = shardir.from_jax(loss, *args, optimizer="sgd, lr = 0.5", **options)
        (step,) = [op for op in compiled.input_module.ops if op.name == "train.step"]
        request = step.properties["pipeline" if name == "stages" else name]
        assert text in str(request)
        assert compiled.module is not None
