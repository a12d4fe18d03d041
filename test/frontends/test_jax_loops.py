"""Loops of JAX whose number of runs depends on values: imported in the global view, on two ranks of
the interpreter and on real ones, and as StableHLO again, against JAX."""

from collections.abc import Callable, Sequence
from typing import Any

from support import jax_devices  # isort: skip  (before jax)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.extent import extent

import shardir
from shardir import ShardirError
from shardir.diagnostics import ParseErrors
from shardir.dialects import nn
from shardir.interpret.evaluator import run

assert jax_devices.COUNT == 8

X = np.linspace(0.5, 2, 8, dtype=np.float32)
W = np.roll(np.eye(8), 1, axis=1) + 0.1 * np.random.default_rng(0).normal(size=(8, 8))
KEY = jax.random.PRNGKey(3)

pytestmark = pytest.mark.filterwarnings("ignore:.*every device gathers the operands of nn.while")


def newton(x: Any) -> Any:
    """Its condition has ops of its own, and reads what the body does not change."""
    return lax.while_loop(
        lambda s: jnp.max(jnp.abs(s * s - x)) > 1e-4, lambda s: 0.5 * (s + x / s), x + 1
    )


def bisection(a: Any, t: Any) -> Any:
    """Of a tuple with a boolean, whose values swap places."""

    def run(s: Any) -> Any:
        high, low, _ = s
        middle = (low + high) / 2
        left = middle**3 + a * middle < t
        return (
            jnp.where(left, high, middle), jnp.where(left, middle, low), jnp.all(high - low < 1e-3)
        )  # fmt: skip

    first = jnp.full_like(a, 4.0), jnp.zeros_like(a), jnp.bool_(False)
    return lax.while_loop(lambda s: ~s[2] & jnp.any(s[0] > s[1]), run, first)


def collatz(n: Any) -> Any:
    """Integers, several numbers in one loop, each as long as its own condition holds."""

    def one(n: Any) -> Any:
        def run(s: Any) -> Any:
            return jnp.where(s[0] % 2 == 0, s[0] // 2, 3 * s[0] + 1), s[1] + 1

        return lax.while_loop(lambda s: s[0] != 1, run, (n, jnp.int32(0)))[1]

    return jax.vmap(one)(n)


def nested(x: Any, n: Any) -> Any:
    """Loops in a loop, in a called function, and with a bound that is traced."""

    @jax.jit
    def shrunk(y: Any) -> Any:
        return lax.while_loop(lambda z: z.sum() > 2.0, lambda z: z * 0.7, y)

    def run(s: Any) -> Any:
        y = lax.fori_loop(0, n, lambda i, y: y * 1.25 + i, shrunk(s[0] + s[1]))
        return shrunk(y), s[1] + 1

    return lax.while_loop(lambda s: s[1] < x.sum(), run, (x, jnp.float32(0))), shrunk(x * 2)


def generated(w: Any, first: Any) -> Any:
    """Tokens up to the end token."""

    def run(s: Any) -> Any:
        tokens, k = s
        scores = jax.nn.one_hot(tokens[k], 8) @ w
        return tokens.at[k + 1].set(jnp.argmax(scores).astype(jnp.int32)), k + 1

    tokens = jnp.zeros(12, jnp.int32).at[0].set(first)
    return lax.while_loop(lambda s: (s[1] < 10) & (s[0][s[1]] != 3), run, (tokens, 0))


def edges(x: Any, on: Any) -> Any:
    """No run, a carried condition, constants that runs change, and values that swap."""
    return (
        lax.while_loop(lambda s: s.sum() > 1e6, lambda s: s * 2, x),
        lax.while_loop(lambda s: s[1], lambda s: (s[0] * 2, s[0].sum() < 100), (x, on)),
        lax.while_loop(lambda s: s[2] < x[7], lambda s: (s[1], s[0], s[2] + 1), (x, x * 3, 0.0)),
    )


def split(x: Any) -> Any:
    """In a shard_map each device has its own number of runs."""

    def body(x: Any) -> Any:
        grown = lax.while_loop(
            lambda s: s.sum() < 100.0, lambda s: s * 1.5 + lax.axis_index("d"), x
        )
        return grown + lax.psum(grown.sum(), "d")

    mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,))
    return jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)(x)


def scanned(x: Any) -> Any:
    """A scan around a loop, which stays a loop; a shorter one is unrolled."""

    def turn(total: Any, row: Any) -> Any:
        halved = lax.while_loop(lambda s: s.sum() > 1.0, lambda s: s / 2, row)
        return total + halved, halved * total

    return lax.scan(turn, x[0], x), lax.scan(turn, x[0], x[:2])


def gamma(key: Any, a: Any) -> Any:
    return jax.random.gamma(key, a)


def poisson(key: Any, a: Any) -> Any:
    return jax.random.poisson(key, a * 9)


PROGRAMS: list[tuple[Callable[..., Any], Sequence[Any], Sequence[P]]] = [
    (newton, (X.reshape(4, 2),), (P("d"),)),
    (bisection, (X, X + 1), (P("d"), P())),
    (collatz, (np.array([27, 1, 7, 6], np.int32),), (P("d"),)),
    (nested, (X, np.int32(2)), (P("d"), P())),
    (generated, (W.astype(np.float32), np.int32(5)), (P(None, "d"), P())),
    (edges, (X, np.bool_(True)), (P("d"), P())),
    (split, (X,), (P("d"),)),
    (scanned, (np.outer(np.arange(1, 7), X).astype(np.float32),), (P(None, "d"),)),
    *extent([], [(f, (KEY, X), (P(), P("d"))) for f in (gamma, poisson)]),
]


def assert_equal(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("f", "args", "specs"), PROGRAMS, ids=[f.__name__ for f, *_ in PROGRAMS])
def test_loops_are_jax(f: Callable[..., Any], args: Sequence[Any], specs: Sequence[P]) -> None:
    wanted = [np.asarray(y) for y in jax.tree.leaves(jax.jit(f)(*args))]
    compiled = shardir.from_jax(f, *args, in_shardings=tuple(specs), mesh="d = 2")
    given = [np.asarray(x) for x in args]
    loops = [op for op in compiled.input_module.walk() if isinstance(op, nn.WhileOp)]
    assert 0 < len(loops) < 10
    for module in (compiled.input_module, compiled.module):
        assert_equal(run(module, f.__name__, given), wanted)
    again = shardir.from_stablehlo(shardir.to_stablehlo(compiled.input_module))
    assert_equal(run(again.input_module, "main", given), wanted)


def test_a_loop_on_real_ranks_and_in_a_loss() -> None:
    """A loss may read a loop that does not depend on its parameters; each step runs it."""

    def loss(w: Any, x: Any) -> Any:
        n = lax.while_loop(lambda s: jnp.abs(s).max() > 1e-2, lambda s: s * 0.5, x)
        return jnp.sum((100 * n @ w) ** 2)

    w, x = jnp.asarray(W, jnp.float32), jnp.asarray(X[None])
    program = shardir.from_jax(
        loss, w, x, in_shardings=(P("d"), P(None, "d")), mesh="d = 2", optimizer="sgd, lr = 0.01"
    )
    assert "while True:" in program.program
    losses = program.run(steps=3).losses["step"]
    for found in losses:
        value, gradient = jax.value_and_grad(loss)(w, x)
        assert found == pytest.approx(float(value), rel=1e-5)
        w = w - 0.01 * gradient


def test_refusals() -> None:
    def gradient(x: Any) -> Any:
        return lax.while_loop(lambda s: s.sum() > 1.0, lambda s: s * 0.5, x).sum()

    with pytest.raises(ParseErrors, match=r"\[G8\] expected an op with a gradient, got nn.while"):
        shardir.from_jax(gradient, X, mesh="d = 2", optimizer="sgd, lr = 0.1")

    mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,))

    def collective(x: Any) -> Any:
        return lax.while_loop(lambda s: lax.psum(s.sum(), "d") < 9.0, lambda s: s * 1.5, x)

    f = jax.shard_map(collective, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    with pytest.raises(ShardirError, match="a collective in a loop whose number of runs depends"):
        shardir.from_jax(f, X)

    def constrained(x: Any) -> Any:
        rows = NamedSharding(mesh, P("d"))
        return lax.while_loop(
            lambda s: s.sum() < 9.0, lambda s: lax.with_sharding_constraint(s * 2, rows), x
        )

    with pytest.warns(UserWarning, match=r"the layout .* is left out: it is in a loop whose"):
        shardir.from_jax(constrained, X)
