"""raise-compositions: attention with its gradient, masks and 16-bit elements equals JAX's; near
misses stay as they are."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.raised import (
    check_all,
    draw,
    gradients,
    in_double_precision,
    with_gradient,
)

import shardir
from shardir.api.stablehlo import import_text
from shardir.dialects import nn
from shardir.dialects.blocks import ops_of
from shardir.interpret.evaluator import function, run

Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def in_f64() -> Any:
    with in_double_precision():
        yield


def scores_of(q: Any, k: Any) -> Any:
    return jnp.einsum("bthd,bshd->bhts", q, k)


def attention(
    change: Function = lambda s: s, weigh: Function = lambda p: p, scale: float = 0.3
) -> Function:
    """Attention whose scores change, and so do their weights."""

    def f(q: Any, k: Any, v: Any, *others: Any) -> Any:
        p = weigh(jax.nn.softmax(change(scores_of(q, k) * scale, *others)))
        return jnp.einsum("bhts,bshd->bthd", p, v)

    return f


def causal(like: Any) -> Any:
    t, s = (jnp.arange(n) for n in like.shape[-2:])
    return t[:, None] >= s


def window(s: Any, segments: Any) -> Any:
    """Documents in one row, and a window: each query attends to its own key at least."""
    distance = jnp.arange(6)[:, None] - jnp.arange(6)
    own = segments[:, None, :, None] == segments[:, None, None]
    return jnp.where(own & causal(s) & (distance < 3), s, jnp.finfo(s.dtype).min)


def late(q: Any, k: Any, v: Any) -> Any:
    """The dimensions in another order, more keys than queries, and factors everywhere."""
    scores = jnp.einsum("bshd,bthd->bhts", k / 2, q[:, :4] * 0.3)
    p = jax.nn.softmax(jnp.where(causal(scores), scores, -1e10) * 0.7)
    return jnp.einsum("bshd,bhts->bhtd", v, p)


def repeated(q: Any, k: Any, v: Any) -> Any:
    k, v = (jnp.repeat(u, 2, 2) for u in (k[:, :, :2], v[:, :, :2]))
    return attention(lambda s: s + jnp.where(causal(s), 0.0, -jnp.inf))(q, k, v)


def recomputed(q: Any, k: Any, v: Any) -> Any:
    f = jax.checkpoint(attention(lambda s: jnp.where(causal(s), s, -1e9)))
    return jnp.sin(f(q, k, v))


def factored(q: Any, k: Any, v: Any) -> Any:
    """The factor of q is that of another value, too, and k is known."""
    q = q * 0.3
    return attention(scale=1.0)(q, lax.stop_gradient(k), v) + jnp.sum(q)


def alibi(s: Any) -> Any:
    distance = jnp.arange(6) - jnp.arange(6)[:, None]
    return jnp.where(distance <= 0, s + 0.5 * distance, -jnp.inf)


def by_hand(s: Any, log: Function = jnp.log) -> tuple[Any, Any]:
    """Weights, and the log-sum-exp."""
    top = s.max(-1, keepdims=True)
    e = jnp.exp(s - top)
    total = e.sum(-1, keepdims=True)
    return e / total, top + log(total)


def by_logsumexp(s: Any) -> tuple[Any, Any]:
    lse = jax.nn.logsumexp(s, -1, keepdims=True)
    return jnp.exp(s - lse), lse


def per_row(x: Any, y: Any) -> Any:
    """Sums of products for each query, [b, h, t, 1]."""
    return (x * y).sum(-1).swapaxes(1, 2)[..., None]


def flash(
    weigh: Function = by_hand, rows: Function = per_row, mask: Function = causal,
    again: Function | None = causal, scale: float = 0.3, is_late: bool = False,
) -> Function:  # fmt: skip
    """Attention that saves its log-sum-exp, with a gradient of its own: the sums of its rows, and
    the mask and the scale by which scores are computed again. Without a mask the weights are
    saved. The result is divided by the sums of exponentials if this `is_late`."""

    @jax.custom_vjp
    def f(q: Any, k: Any, v: Any) -> Any:
        return forward(q, k, v)[0]

    def forward(q: Any, k: Any, v: Any) -> Any:
        s = scores_of(q, k) * 0.3
        s = jnp.where(mask(s), s, -1e30)
        p, lse = weigh(s)
        out = jnp.einsum("bhts,bshd->bthd", p, v)
        if is_late:
            e = jnp.exp(s - s.max(-1, keepdims=True))
            out = jnp.einsum("bhts,bshd->bthd", e, v) / e.sum(-1).swapaxes(1, 2)[..., None]
        return out, (q, k, v, out, lse[..., 0], p)

    def backward(saved: Any, dy: Any) -> Any:
        q, k, v, out, lse, p = saved
        if again is not None:
            s = scores_of(q, k) * scale
            p = jnp.exp(jnp.where(again(s), s, -1e30) - lse[..., None])
        dp = jnp.einsum("bthd,bshd->bhts", dy, v)
        ds = p * (dp - rows(dy, out)) * 0.3
        dk, dv = (jnp.einsum("bhts,bthd->bshd", u, w) for u, w in ((ds, q), (p, dy)))
        return jnp.einsum("bhts,bshd->bthd", ds, k), dk, dv

    f.defvjp(forward, backward)
    return f


def by_jax(**options: Any) -> Function:
    def f(q: Any, k: Any, v: Any, *mask: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, *(None for _ in mask), *mask, **options)

    return f


q, k, v = (draw(2, 6, 4, 5, seed=i) for i in range(3))
mask = draw(2, 6, 6) > 0
mask[0, 2], mask[:, :, 5] = False, False  # a query without keys, a key without queries
lengths, segments = np.array([3, 0]), np.array([[0, 0, 1, 1, 2, 2], [7] * 6])
bias = draw(4, 6, 6)
narrow = [u.astype(np.float32) for u in (q, k[:, :, :2], v[:, :, :2])]

STEPS = [
    ("late", late, (q, k, v)),
    ("mask", attention(lambda s, m: jnp.where(m[:, None], s, -1e9)), (q, k, v, mask)),
    ("lengths", attention(
        lambda s, n: jnp.where(jnp.arange(6) >= n[:, None, None, None], -1e30, s)
    ), (q, k, v, lengths)),
    ("later keys", attention(lambda s: jnp.where(causal(s).T, s, -1e9)), (q, k, v)),
    ("window", attention(window), (q, k, v, segments)),
    ("repeated", repeated, (q, k, v)),
    ("recomputed", recomputed, (q, k, v)),
    ("factored", factored, (q, k, v)),
    ("alibi", attention(alibi), (q, k, v)),
    ("flash", flash(), (q, k, v)),
    ("flash, late", flash(is_late=True), (q, k, v)),
    ("flash, weights", flash(again=None), (q, k, v)),
    ("flash, logsumexp", flash(
        by_logsumexp, lambda dy, out: jnp.einsum("bthd,bthd->bht", dy, out)[..., None]
    ), (q, k, v)),
    ("jax.nn", by_jax(is_causal=True, scale=0.3), (*narrow,)),
    ("jax.nn, mask", by_jax(is_causal=True, local_window_size=4), (*narrow, mask[:, None])),
]  # fmt: skip


def masked_bias(s: Any, bias: Any, mask: Any) -> Any:
    return jnp.where(mask[:, None], s + lax.stop_gradient(bias), -jnp.inf)


def own(near: int = 0) -> Function:
    """Attention with a gradient of its own: with other operands, another mask or filling."""

    def forward(q: Any, k: Any, v: Any) -> Any:
        return attention(lambda s: jnp.where(causal(s), s, -1e9))(q, k, v), (q, k, v)

    def backward(saved: Any, dy: Any) -> Any:
        q, k, v = saved
        s = jnp.where(causal(jnp.zeros((6, 6))), scores_of(q, k) * 0.3, -1e9)
        p, pull = jax.vjp(jax.nn.softmax, s)
        (ds,) = pull(jnp.einsum("bthd,bshd->bhts", dy, v))
        later = causal(s) if near != 1 else causal(s).T
        ds = jnp.where(later, ds, 1.0 if near == 2 else 0.0) * 0.3
        dq = jnp.einsum("bhts,bshd->bthd", ds, k[::-1] if near == 3 else k)
        dk = jnp.einsum("bhts,bthd->bshd", ds, q[::-1] if near == 4 else q)
        return dq, dk, jnp.einsum("bhts,bthd->bshd", p, dy)

    f = jax.custom_vjp(lambda *operands: forward(*operands)[0])
    f.defvjp(forward, backward)
    return f


def with_penalty(of: Function) -> Function:
    def f(q: Any, k: Any, v: Any) -> Any:
        s = scores_of(q, k)
        p = jax.nn.softmax(s)
        return jnp.einsum("bhts,bshd->bthd", p, v) + jnp.sum(of(s, p))

    return f


kept = draw(2, 4, 6, 6) > -1
MISSES = [
    ("dropout", attention(weigh=lambda p: jnp.where(kept, p / 0.9, 0)), (q, k, v)),
    ("weights", with_penalty(lambda s, p: lax.stop_gradient(p) ** 2), (q, k, v)),
    ("scores", with_penalty(lambda s, p: s**2), (q, k, v)),
    ("soft cap", attention(jnp.tanh), (q, k, v)),
    ("a high filling", attention(lambda s, m: jnp.where(m[:, None], s, -30.0)), (q, k, v, mask)),
    ("two fillings", attention(
        lambda s, m: jnp.where(m[:, None], jnp.where(causal(s), s, -1e9), -jnp.inf)
    ), (q, k, v, mask | np.eye(6, dtype=bool))),
    ("a mask, and a bias", attention(
        lambda s, b, m: jnp.where(m[:, None], s + lax.stop_gradient(b), -1e38)
    ), (q, k, v, bias, mask)),
    ("a bias of a mask", attention(
        lambda s, b, m: jnp.where(m[:, None], s, -1e9) + lax.stop_gradient(b)
    ), (q, k, v, bias, mask)),
    ("a learned bias", attention(lambda s, b: s + b), (q, k, v, bias)),
    ("a given bias", attention(lambda s, b: s + lax.stop_gradient(b)), (q, k, v, bias)),
    ("a low bias", attention(
        lambda s, m: s + jnp.where(m[:, None], 0.0, -1e9)
    ), (q, k, v, mask)),
    ("another scale", flash(scale=1.0), (q, k, v)),
    ("another mask", flash(again=lambda s: causal(s) | True), (q, k, v)),
    ("other rows", flash(again=None, rows=lambda dy, out: per_row(out, out)), (q, k, v)),
    ("sums of heads", flash(rows=lambda dy, out: per_row(dy, out).sum(1, keepdims=True)),
     (q, k, v)),
    ("another sum", flash(partial(by_hand, log=jnp.log1p)), (q, k, v)),
    *((f"own gradient {n}", own(n), (q, k, v)) for n in (1, 2, 3, 4)),
]  # fmt: skip


def test_gradients_of_jax_are_raised() -> None:
    """Nothing of the scores is left, and queries without keys have the values of JAX."""
    kinds = {"nn.attention", "nn.attention_grad"}
    cases = [with_gradient(*case, kinds) for case in STEPS]
    cases.append(with_gradient("own gradient", own(), (q, k, v), kinds))
    cases.append(
        ("bias", attention(masked_bias), (q, k, v, bias, mask | np.eye(6, dtype=bool)), set())
    )

    def check(name: str, names: set[str]) -> None:
        assert kinds & names >= ({"nn.attention"} if name == "bias" else kinds), name
        assert not names & {"nn.softmax", "nn.softmax_grad", "nn.einsum"}, name

    check_all(check, cases)


def test_a_low_bias_in_a_loss() -> None:
    """The log-sum-exp of a query whose keys all have -1e9 has no digits of its scores. A bias that
    is given may be as low."""

    def loss(params: Any, mask: Any, bias: Any) -> Any:
        low = attention(lambda s, m: s + (1 - m[:, None].astype(s.dtype)) * -1e9)
        divided = attention(lambda s, m: s + (m[:, None].astype(s.dtype) - 1) / 1e-9)
        power = attention(lambda s, m: s - jnp.exp(20 * (1 - m[:, None].astype(s.dtype))))
        given = attention(lambda s, b: s + b[:, None])
        masked = low(*params, mask) + divided(*params, mask) + power(*params, mask)
        return jnp.sum(jnp.sin(masked) + given(*params, bias))

    given = np.where(mask, 0, np.finfo(np.float32).min).astype(np.float32)
    args = tuple(u.astype(np.float32) for u in (q, k, v)), mask, given
    compiled = shardir.from_jax(loss, *args, optimizer="sgd, lr = 1.0", mesh="d = 1")
    _, *new = run(compiled.module, "step", [*args[0], mask, given])
    for old, after, want in zip(args[0], new, jax.grad(loss)(*args), strict=True):
        np.testing.assert_allclose(old - after, want, rtol=1e-4, atol=1e-5)


def test_near_misses_have_no_gradient() -> None:
    def check(name: str, names: set[str]) -> None:
        assert "nn.attention_grad" not in names and "nn.einsum" in names, name

    check_all(check, [with_gradient(*case, set()) for case in MISSES])


def half(q: Any, k: Any, v: Any, *_: Any) -> Any:
    """Scores in 16 bits, weights in f32."""
    s = scores_of(q, k) * q.dtype.type(0.25)
    s = jnp.where(causal(s), s, jnp.finfo(s.dtype).min)
    p = jax.nn.softmax(s.astype(jnp.promote_types(s.dtype, "float32")))
    return jnp.einsum("bhts,bshd->bthd", p.astype(v.dtype), v)


def short(q: Any, k: Any, v: Any, *_: Any) -> Any:
    """Scores and weights in 16 bits."""
    s = scores_of(q, k) * q.dtype.type(0.25)
    p = jax.nn.softmax(jnp.where(causal(s), s, jnp.finfo(s.dtype).min))
    return jnp.einsum("bhts,bshd->bthd", p, v)


def wide(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Scores in f32, by `preferred_element_type`."""
    kind = jnp.promote_types(q.dtype, "float32")
    s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=kind) * 0.3
    p = jax.nn.softmax(jnp.where(mask[:, None], s, -1e9))
    return jnp.einsum("bhts,bshd->bthd", p.astype(v.dtype), v)


@pytest.mark.parametrize(
    ("dtype", "f"),
    [
        (jnp.bfloat16, wide), (jnp.bfloat16, by_jax()), (jnp.float16, half), (jnp.bfloat16, short),
    ],
)  # fmt: skip
def test_half_precision(dtype: Any, f: Function) -> None:
    """Values and gradients in 16 bits are as near as those of JAX to the values in f64."""
    masks = (mask[:, None],) if f not in (half, wide, short) else (mask,)
    exact = [np.asarray(u.astype(dtype), np.float64) for u in (draw(2, 6, 4, 5), q, k, v)]
    args = [*(u.astype(dtype) for u in exact), *masks]
    step = jax.jit(gradients(f, *args[1:]), keep_unused=True)
    module = import_text(step.lower(*args).as_text(), "main")
    names = {op.name for op in ops_of(function(module, "main").body.block)}
    assert {"nn.attention", "nn.attention_grad"} <= names and "nn.softmax" not in names
    got, theirs = run(module, "main", args), jax.tree.leaves(step(*args))
    for ours, value, true in zip(got, theirs, jax.tree.leaves(step(*exact, *masks)), strict=True):
        errors = [np.abs(np.asarray(u, np.float64) - true).max() for u in (ours, value)]
        assert errors[0] <= max(errors[1], float(jnp.finfo(dtype).eps) * np.abs(true).max())


def test_a_scale_near_the_default() -> None:
    """A scale is compared in the precision of its product, not of the attention."""

    def f(q: Any, k: Any, v: Any) -> Any:
        s = jnp.einsum("td,sd->ts", q, k, preferred_element_type=jnp.float32)
        p = jax.nn.softmax(s * np.float32(0.501))
        return p.astype(jnp.bfloat16) @ v

    args = [jnp.zeros((6, 4), jnp.bfloat16)] * 3
    module = import_text(jax.jit(f).lower(*args).as_text(), "main")
    ops = ops_of(function(module, "main").body.block)
    (found,) = (op for op in ops if isinstance(op, nn.AttentionOp))
    assert found.factor() == 0.501


def test_layouts_stay() -> None:
    """A value with a layout is not raised over: the exponentials of a product over their sum, and
    the products that are summed for a gradient."""
    rows = NamedSharding(AbstractMesh((2,), ("d",)), P("d"))

    def product_over_sum(q: Any, k: Any) -> Any:
        s = q @ k.T
        p = lax.with_sharding_constraint(jnp.exp(s - s.max(-1, keepdims=True)), rows)
        return (p @ k) / p.sum(-1, keepdims=True)

    def gradient(q: Any, k: Any) -> Any:
        p = jax.nn.softmax(q @ k.T)
        products = lax.with_sharding_constraint(q * (p @ k), rows)
        return p * (q @ k.T - products.sum(-1, keepdims=True))

    x = np.eye(4)
    for f in (product_over_sum, gradient):
        text = str(import_text(jax.jit(f).lower(x, x).as_text(), f.__name__))
        assert "[{d}, {}]" in text, f.__name__
