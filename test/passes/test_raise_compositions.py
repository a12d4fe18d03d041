"""raise-compositions: programs of JAX and their gradients keep their values, with fewer ops; near
misses of a composition stay as they are."""

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
from jax.sharding import PartitionSpec as P
from support.raised import Case, check_all, draw, in_double_precision, with_gradient

import shardir
from shardir.api.stablehlo import import_text
from shardir.dialects.blocks import ops_of
from shardir.interpret.evaluator import function, run


@pytest.fixture(autouse=True)
def in_f64() -> Any:
    with in_double_precision():
        yield


def layer_norm(x: Any, w: Any, b: Any) -> Any:
    c = x - x.mean(-1, keepdims=True)
    return c * lax.rsqrt((c * c).mean(-1, keepdims=True) + 1e-5) * w + b


def layer_norm_by_var(x: Any, w: Any, b: Any) -> Any:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(var + 1e-5) * w + b


def layer_norm_by_square(x: Any, w: Any, b: Any) -> Any:
    c = x - x.mean(-1, keepdims=True)
    var = jnp.mean(jnp.square(c), -1, keepdims=True)
    return c * (lax.rsqrt(var + 1e-5) * w) + b


def rms_norm(x: Any, w: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w


def flax_layer_norm(x: Any, w: Any, b: Any) -> Any:
    """As flax.linen.LayerNorm computes it."""
    mean, power = x.mean(-1), lax.square(x).mean(-1)
    var = jnp.maximum(0.0, power - lax.square(mean))
    scale = lax.rsqrt(jnp.expand_dims(var, -1) + 1e-6) * w.reshape(1, -1)
    return (x - jnp.expand_dims(mean, -1)) * scale + b.reshape(1, -1)


def fast_layer_norm(x: Any, w: Any, b: Any) -> Any:
    """As jax.nn.standardize computes it."""
    mean = x.mean(-1, keepdims=True)
    var = jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean)
    return (x - mean) * lax.rsqrt(var + 1e-5) * w + b


def fast_layer_norm_by_products(x: Any, w: Any, b: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    var = jnp.maximum((x * x).mean(-1, keepdims=True) - mean * mean, 0.0)
    return w * ((x - mean) / jnp.sqrt(var + 1e-5)) + b


def flax_rms_norm(x: Any, w: Any) -> Any:
    """As flax.linen.RMSNorm computes it, which subtracts zeros."""
    power = lax.square(x).mean(-1)
    scale = lax.rsqrt(jnp.expand_dims(power, -1) + 1e-6) * w.reshape(1, -1)
    return (x - jnp.expand_dims(jnp.zeros_like(power), -1)) * scale


def rms_norm_by_sqrt(x: Any, w: Any) -> Any:
    return w * (x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6))


def residual(norm: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *ws: x + norm(jnp.sin(x), *ws) + x * norm(x, *ws)


def cross_entropy(x: Any, labels: Any) -> Any:
    log_p = jax.nn.log_softmax(x)
    return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], 1))


def adam_step(p: Any, g: Any, m: Any, v: Any, t: Any) -> Any:
    m, v, t = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2, t + 1
    step = (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.95**t)) + 1e-8)
    return p - 1e-2 * step, m, v, t


def adamw_step(p: Any, g: Any, m: Any, v: Any, t: Any, lr: Any) -> Any:
    """As optax writes it: a negative rate, an integer count, a rate that is an argument."""
    m, v, t = (1 - 0.9) * g + 0.9 * m, (1 - 0.999) * g**2 + 0.999 * v, t + 1
    step = (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8) + 0.1 * p
    return p - lr * step, m, v, t


def optax_sgd(
    p: Any, m: Any, g: Any, rate: Any = 0.1, momentum: float | None = None, nesterov: bool = False,
    decay: float = 0.0, clip: float | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """As optax.chain(clip_by_global_norm, add_decayed_weights, sgd) writes it."""
    if clip is not None:
        norm = jnp.sqrt(jnp.sum(jnp.square(g)))
        g = lax.select(jnp.full_like(g, norm < clip, dtype=bool), g, g / norm * clip)
    if decay:
        g = g + decay * p
    if momentum is None:
        return p + -rate * g, m
    m = g + momentum * m
    return p + -rate * (g + momentum * m if nesterov else m), m


def one_hot_loss(x: Any, labels: Any) -> Any:
    return -jnp.sum(jax.nn.one_hot(labels, 8) * jax.nn.log_softmax(x)) / 3


def one_hot_losses(x: Any, labels: Any) -> Any:
    return jnp.sum(-jax.nn.log_softmax(x) * (jnp.arange(8) == labels[:, None]), -1)


def late_causal_attention(q: Any, k: Any, v: Any) -> Any:
    """More keys than queries; the mask, which is finite, is that of what is left out."""
    scores = jnp.einsum("bhsd,bhtd->bhts", k, q[:, :, :5])
    left_out = jnp.arange(5)[:, None] < jnp.arange(6)
    p = jax.nn.softmax(jnp.where(left_out, -1e10, scores) * 0.3, 3)
    return jnp.einsum("bhse,bhts->bthe", v, p)


def biased_attention(q: Any, k: Any, v: Any, bias: Any) -> Any:
    scores = bias + jnp.einsum("bthd,bshd->bhts", 0.3 * q, k)
    i = jnp.arange(6)
    p = jax.nn.softmax(jnp.where(i <= i[:, None], scores, -jnp.inf))
    return jnp.einsum("bhts,bshd->bthd", p, v)


def repeated_attention(q: Any, k: Any, v: Any) -> Any:
    k, v = (jnp.repeat(u, 2, 2) for u in (k, v))
    p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / 2)
    return jnp.einsum("bhts,bshd->bthd", p, v)


def grouped_attention(q: Any, k: Any, v: Any, bias: Any) -> Any:
    b, t, h, d = q.shape
    q = q.reshape(b, t, k.shape[2], -1, d)
    scores = jnp.einsum("bthgd,bshd->bhgts", q, k) + bias.reshape(2, 2, t, -1)
    out = jnp.einsum("bhgts,bshd->bthgd", jax.nn.softmax(scores), v)
    return out.reshape(b, t, h, d)


def split_attention(q: Any, k: Any, v: Any) -> Any:
    """Groups of heads in an order of their own, and one head of keys."""
    p = jax.nn.softmax(jnp.einsum("btgd,bsd->gbts", q, k[:, :, 0]))
    return jnp.einsum("gbts,bsd->gbtd", p, v[:, :, 1])


x, w, b, dy = draw(4, 8), draw(8, seed=1), draw(8, seed=2), draw(4, 8, seed=3)
labels = np.array([0, 7, 3, 3])
moments = x, dy, draw(4, 8, seed=4), draw(4, 8, seed=5) ** 2

heads = draw(2, 3, 6, 4), draw(2, 3, 6, 4, seed=1), draw(2, 3, 6, 5, seed=2)
q, k, v = draw(2, 6, 4, 4), draw(2, 6, 2, 4, seed=1), draw(2, 6, 2, 4, seed=2)
bias, narrow = draw(4, 6, 6), [u.astype(np.float32) for u in (q, k, v)]

NORM, NORM_GRAD, RMS = "nn.layer_norm", "nn.layer_norm_grad", "nn.rms_norm"
FORWARD: list[Case] = [
    ("softmax", lambda x: jax.nn.softmax(x, 0), (x,), {"nn.softmax"}),
    ("log_softmax", jax.nn.log_softmax, (x,), {"nn.log_softmax"}),
    ("gelu", jax.nn.gelu, (x,), {"nn.gelu"}),
    ("exact gelu", lambda x: jax.nn.gelu(x, approximate=False), (x,), {"nn.gelu"}),
    ("silu", jax.nn.silu, (x,), {"nn.silu"}),
    ("sigmoid", jax.nn.sigmoid, (x,), {"nn.sigmoid"}),
    ("layer norm by var", layer_norm_by_var, (x, w, b), {NORM}),
    ("rms norm", rms_norm, (x, w), {RMS}),
    ("cross entropy", cross_entropy, (x, labels), {"nn.cross_entropy"}),
    ("one-hot", one_hot_losses, (x, labels.astype(np.int32)), {"nn.cross_entropy"}),
    ("late causal", late_causal_attention, heads, {"nn.attention"}),
    ("split", split_attention, (q, k, v), {"nn.attention"}),
    ("jax.nn", jax.nn.dot_product_attention, (*narrow,), {"nn.attention"}),
    (
        "jax.nn, causal",
        lambda *u: jax.nn.dot_product_attention(*u, is_causal=True),
        (*narrow,),
        {"nn.attention"},
    ),
    ("adam", adam_step, (*moments, 2.0), {"train.adam"}),
    ("adamw", adamw_step, (*moments, 3, 0.1), {"train.adamw"}),
]  # fmt: skip


BACKWARD: list[Case] = [
    with_gradient(name, f, args, {kind, f"{kind}_grad"})
    for name, f, args, (kind,) in FORWARD[:5]
] + [
    with_gradient(name, f, (x, w, b), {NORM, NORM_GRAD})
    for name, f in (
        ("layer norm", layer_norm), ("by var", layer_norm_by_var),
        ("by square", layer_norm_by_square), ("residual", residual(layer_norm)),
        ("residual by var", residual(layer_norm_by_var)), ("flax", flax_layer_norm),
        ("residual, flax", residual(flax_layer_norm)), ("fast", fast_layer_norm),
        ("residual, fast", residual(fast_layer_norm_by_products)),
    )
] + [
    with_gradient(name, f, (x, w), {RMS, f"{RMS}_grad"})
    for name, f in (
        ("rms norm gradient", rms_norm), ("residual rms norm", residual(rms_norm)),
        ("flax rms norm", flax_rms_norm), ("rms norm by sqrt", rms_norm_by_sqrt),
    )
] + [
    with_gradient("cross entropy gradient", cross_entropy, (x, labels), {"nn.cross_entropy_grad"}),
]  # fmt: skip


def softmax_without_maximum(x: Any) -> Any:
    e = jnp.exp(x)
    return e / e.sum(-1, keepdims=True)


def softmax_of_axes(x: Any) -> Any:
    e = jnp.exp(x - x.max(0, keepdims=True))
    return e / e.sum(1, keepdims=True)


def softmax_of_two(x: Any) -> Any:
    e = jnp.exp(x - x.max(1, keepdims=True))
    return e / jnp.exp(2 * (x - x.max(1, keepdims=True))).sum(1, keepdims=True)


def square_softmax(x: Any) -> Any:
    """The sum of columns broadcasts over rows: no rows are normalised."""
    e = jnp.exp(x - x.max(1))
    return e / e.sum(1)


def norm_with_late_eps(x: Any, w: Any, b: Any) -> Any:
    c = x - x.mean(-1, keepdims=True)
    return c / (jnp.sqrt((c * c).mean(-1, keepdims=True)) + 1e-5) * w + b


def norm_with_ddof(x: Any, w: Any, b: Any) -> Any:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True, ddof=1)
    return (x - mean) / jnp.sqrt(var + 1e-5) * w + b


def norm_of_columns(x: Any, w: Any, b: Any) -> Any:
    c = x - x.mean(0, keepdims=True)
    return c * lax.rsqrt((c * c).mean(0, keepdims=True) + 1e-5) * w + b


def norm_of_others(x: Any, w: Any, b: Any) -> Any:
    c = x - x.mean(-1, keepdims=True)
    return c * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w + b


def norm_with_least_variance(x: Any, w: Any, b: Any) -> Any:
    mean, power = x.mean(-1, keepdims=True), (x * x).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.maximum(power - mean * mean, 1e-3) + 1e-5) * w + b


def norm_of_difference(x: Any, w: Any, b: Any) -> Any:
    mean, power = x.mean(-1), (x * x).mean(-1)
    var = jnp.maximum(power - mean, 0.0)[:, None]
    return (x - mean[:, None]) * lax.rsqrt(var + 1e-5) * w + b


def rms_of_sum(x: Any, w: Any) -> Any:
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6) * w


def gelu_of_others(x: Any) -> Any:
    return 0.5 * x * (1 + jnp.tanh(0.8 * (x + 0.044715 * x**3)))


def silu_of_others(x: Any) -> Any:
    return x * jax.nn.sigmoid(1.702 * x)


def adam_of_others(p: Any, g: Any, m: Any, v: Any, t: Any) -> Any:
    m, v, t = 0.9 * m + 0.2 * g, 0.95 * v + 0.05 * g**2, t + 1
    return p - 1e-2 * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.95**t)) + 1e-8), m, v


def adam_without_correction(p: Any, g: Any, m: Any, v: Any, t: Any) -> Any:
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
    return p - 1e-2 * (m / (1 - 0.9**t)) / (jnp.sqrt(v) + 1e-8), m, v


def wrong_softmax_gradient(dy: Any, x: Any) -> Any:
    e = jnp.exp(x - x.max(-1, keepdims=True))
    s = e.sum(-1, keepdims=True)
    return e * (dy / s - (dy * e / s).sum(-1, keepdims=True))


def attention_by(
    change: Callable[[Any], Any] = lambda s: s, axis: int = -1, filling: float | None = None,
    mask: Callable[[Any, Any], Any] = jnp.greater_equal,
) -> Callable[..., Any]:  # fmt: skip
    """Attention whose scores change, are masked, and are normalised along an axis."""

    def attention(q: Any, k: Any, v: Any, *others: Any) -> Any:
        scores, i = change(q @ k.swapaxes(-1, -2)), jnp.arange(6)
        if filling is not None:
            scores = jnp.where(mask(i[:, None], i), scores, filling)
        for u in others:
            scores = jnp.where(u, scores, -1e30) if u.dtype == bool else scores + u
        return jax.nn.softmax(scores, axis) @ v

    return attention


def attention_with_weights(q: Any, k: Any, v: Any) -> Any:
    p = jax.nn.softmax(q @ k.swapaxes(-1, -2))
    return p @ v, p


def one_hot_of_rows(x: Any, labels: Any) -> Any:
    rows = jnp.tile(labels, 2) == jnp.arange(4)[:, None]
    return jnp.sum(rows * jax.nn.log_softmax(x), -1)


def all_but_one_hot(x: Any, labels: Any) -> Any:
    return jnp.sum((labels[:, None] != jnp.arange(8)) * jax.nn.log_softmax(x), -1)


factors, mask = draw(6), draw(6, 6) > 0
others_low = np.where(np.tri(6), -1e30, 0)
PARTS_STAY: list[Case] = [
    (name, f, args, {"nn.softmax"})
    for name, f, args in (
        ("other axis", attention_by(axis=-2), heads),
        ("other factors", attention_by(lambda s: s * factors), heads),
        ("a high filling", attention_by(filling=-30.0), heads),
        ("a low bias", attention_by(filling=-1e9), (*heads, -1e9 * mask)),
        ("a masked bias", attention_by(lambda s: s + -1e9 * mask, filling=-1e9), heads),
        ("weights", attention_with_weights, heads),
        ("a bias as low as the mask", attention_by(filling=-1e30), (*heads, others_low)),
    )
] + [
    (f.__name__, f, (x, labels), {"nn.log_softmax"})
    for f in (one_hot_of_rows, all_but_one_hot)
]  # fmt: skip

square = draw(6, 6)
MISSES: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (softmax_without_maximum, (x,)), (softmax_of_axes, (x,)), (softmax_of_two, (x,)),
    (square_softmax, (square,)), (norm_with_late_eps, (x, w, b)), (norm_with_ddof, (x, w, b)),
    (norm_of_columns, (x, w, b)), (norm_of_others, (x, w, b)), (rms_of_sum, (x, w)),
    (gelu_of_others, (x,)), (adam_of_others, (*moments, 2.0)),
    (adam_without_correction, (*moments, 2.0)), (wrong_softmax_gradient, (dy, x)),
    (silu_of_others, (x,)), (norm_with_least_variance, (x, w, b)), (norm_of_difference, (x, w, b)),
]  # fmt: skip


def by_velocity(new: Callable[[Any, Any, Any], Any]) -> Callable[..., tuple[Any, Any]]:
    def update(p: Any, m: Any, g: Any) -> tuple[Any, Any]:
        m = 0.9 * m + g
        return new(p, m, g), m

    return update


SGD, MOMENTUM, NESTEROV = {"train.sgd"}, {"train.momentum"}, {"train.nesterov"}
UPDATES: list[tuple[str, Callable[..., tuple[Any, Any]], set[str]]] = [
    ("sgd", lambda p, m, g: (p - 0.1 * g, 0.5 * m), SGD),
    ("a rate", lambda p, m, g: (p - jnp.sum(m) * g, 0.5 * m), SGD),
    ("optax", optax_sgd, SGD),
    ("decay", partial(optax_sgd, decay=0.01), SGD),
    ("momentum", by_velocity(lambda p, v, g: p - 0.1 * v), MOMENTUM),
    ("all", partial(optax_sgd, momentum=0.9, decay=0.01, clip=0.5), MOMENTUM),
    ("nesterov", partial(optax_sgd, momentum=0.9, nesterov=True), NESTEROV),
    ("with all", partial(optax_sgd, momentum=0.9, nesterov=True, decay=0.01, clip=9.0), NESTEROV),
    ("other momenta", by_velocity(lambda p, v, g: p - 0.1 * (g + 0.8 * v)), SGD),
    ("decay after", by_velocity(lambda p, v, g: p - 0.1 * (v + 0.1 * p)), SGD),
    ("the old state", lambda p, m, g: (p - 0.1 * m, 0.9 * m + g), SGD),
    ("another state", lambda p, m, g: (p - 0.1 * (0.9 * m + g), 0.5 * m + g), SGD),
    ("ascent", lambda p, m, g: (p + 0.1 * g, 0.5 * m), set()),
    ("rate within", lambda p, m, g: (p + (0.9 * m - 0.1 * g), 0.9 * m - 0.1 * g), set()),
    ("folded decay", lambda p, m, g: (p * 0.99 - 0.1 * g, 0.5 * m), set()),
    ("mean of parameters", lambda p, m, g: (2.0 * p, m - 0.1 * (m - p)), set()),
]  # fmt: skip


def step_of(update: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
    return lambda p, m, g: (jnp.sum(p * g), *update(p, m, g))


RAISED = {
    "nn.softmax", "nn.softmax_grad", "nn.log_softmax", NORM, NORM_GRAD, "nn.rms_norm", "nn.gelu",
    "nn.silu", "train.adam",
}  # fmt: skip
INNER = {"nn.exp", "nn.tanh", "nn.erf", "nn.erfc", "nn.sqrt", "nn.scatter_add"}


def test_raises_what_jax_makes() -> None:
    """Nothing of a composition is left, in both parts."""
    cases = [*FORWARD[5:], *BACKWARD]
    wanted = {name: kinds for name, _, _, kinds in cases}

    def check(name: str, names: set[str]) -> None:
        assert wanted[name] <= names and not names & INNER, name

    check_all(check, cases)


def test_near_misses_stay() -> None:
    def check(name: str, names: set[str]) -> None:
        assert not names & RAISED, name

    check_all(check, [(f.__name__, f, args, set()) for f, args in MISSES])


def test_updates() -> None:
    """Steps of gradient descent of donated parameters, and others, which no op computes. An update
    of an argument that is not donated is none."""
    wanted = {name: kinds for name, _, kinds in UPDATES}
    cases = [(name, step_of(update), (x, dy, draw(4, 8, seed=4)), kinds)
             for name, update, kinds in UPDATES]  # fmt: skip

    def check(kinds: set[str], names: set[str]) -> None:
        assert {n for n in names if n.startswith("train.")} == kinds | (
            {"train.update"} if kinds else set()
        )

    check_all(lambda name, names: check(wanted[name], names), cases, (0, 1))
    check_all(lambda _, names: check(set(), names), cases[:1])


@pytest.mark.parametrize(("dtype", "scale"), [(jnp.bfloat16, 1 + 2**-7), (jnp.float16, 1 - 2**-10)])
def test_numbers_of_half_precision_that_differ(dtype: Any, scale: float) -> None:
    """Neighbours in the element type are different numbers; rounded constants are the same."""

    def names(f: Callable[[Any], Any]) -> set[str]:
        module = import_text(jax.jit(f).lower(jnp.zeros((4, 8), dtype)).as_text(), "main")
        return {op.name for op in ops_of(function(module, "main").body.block)}

    assert "nn.silu" not in names(lambda x: jnp.asarray(scale, dtype) * x * jax.nn.sigmoid(x))
    assert "nn.gelu" in names(jax.nn.gelu)


def test_parts_stay() -> None:
    """A softmax of what is no attention, and the logarithms of what is no cross entropy."""
    wanted = {name: kinds for name, _, _, kinds in PARTS_STAY}

    def check(name: str, names: set[str]) -> None:
        assert wanted[name] <= names and not names & {"nn.attention", "nn.cross_entropy"}, name

    check_all(check, PARTS_STAY)


def test_raised_losses_are_differentiated() -> None:
    """Gradients of attention, with grouped and masked heads, and queries without keys, and of a
    cross entropy, on ranks of both dimensions of a mesh."""

    def loss(params: Any, x: Any, labels: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dhe->bthe", x, params[n]) for n in "qkv")
        h = grouped_attention(q, k, v, params["bias"])
        k, v = (jnp.repeat(u, 2, 2) for u in (k, v))
        h = biased_attention(h, k, v, params["bias"])
        of_heads = (u.swapaxes(1, 2) for u in (h, k, v))
        h += attention_by()(*of_heads, (labels > 4)[:, None, None]).swapaxes(1, 2)
        return one_hot_loss(h.reshape(-1, 16) @ params["out"], labels.reshape(-1))

    params = {"q": draw(8, 4, 4), "k": draw(8, 2, 4, seed=1), "v": draw(8, 2, 4, seed=2),
              "bias": bias, "out": draw(16, 8, seed=3)}  # fmt: skip
    args = params, draw(2, 6, 8, seed=4), np.arange(12).reshape(2, 6) - 2
    by_head = P(None, "tp")
    layouts = {n: by_head for n in "qkv"} | {"bias": P("tp"), "out": P("tp")}, P("dp"), P("dp")
    compiled = shardir.from_jax(
        loss, *args, in_shardings=layouts, mesh="dp = 2, tp = 2", optimizer="sgd, lr = 1.0"
    )
    names = {op.name for op in ops_of(function(compiled.original, "loss").body.block)}
    assert {"nn.attention", "nn.cross_entropy"} <= names and not names & INNER
    value, grads = jax.jit(jax.value_and_grad(loss))(*args)
    expected = value, jax.tree.map(lambda p, g: p - g, params, grads)
    got = run(compiled.module, "step", [np.asarray(a) for a in jax.tree.leaves(args)])
    for ours, theirs in zip(got, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)
