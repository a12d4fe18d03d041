"""Programs of JAX, in the precision of their arguments: `PROGRAMS[name]()` is a function, its
arguments, and their layouts on the mesh of 2 x 4 (in_shardings)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

Program = tuple[Callable[..., Any], tuple[Any, ...], Any]
PROGRAMS: dict[str, Callable[[], Program]] = {}

B, T, D, H, V, F = 4, 8, 16, 4, 32, 32


def program(make: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[make.__name__] = make
    return make


class Draw:
    """Draws arrays in the default float type."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(7)

    def __call__(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.random.normal(size=shape) * 0.3, jnp.zeros(()).dtype)

    def below(self, high: int, *shape: int) -> jax.Array:
        return jnp.asarray(self.random.integers(0, high, shape), jnp.int32)


def adam(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
    m, v, t = state
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, grads)
    t = t + 1

    def update(p: Any, m: Any, v: Any) -> Any:
        return p - 1e-2 * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)

    return jax.tree.map(update, params, m, v), (m, v, t)


def adam_state(params: Any) -> Any:
    zeros = jax.tree.map(jnp.zeros_like, params)
    return zeros, zeros, jnp.zeros(())


def adam_layouts(layouts: Any) -> Any:
    return layouts, layouts, P()


@program
def mlp() -> Program:
    """Two layers, cross entropy and a step of Adam."""
    n = Draw()
    params = {"w1": n(16, 32), "b1": n(32), "w2": n(32, 8)}
    layouts = {"w1": P(None, "tp"), "b1": P("tp"), "w2": P("tp", None)}

    def loss(p: Any, x: Any, y: Any) -> Any:
        h = jax.nn.relu(x @ p["w1"] + p["b1"])
        log_p = jax.nn.log_softmax(h @ p["w2"])
        return -jnp.mean(jnp.take_along_axis(log_p, y[:, None], 1))

    def step(p: Any, state: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p, x, y)
        return value, *adam(p, grads, state)

    args = params, adam_state(params), n(8, 16), n.below(8, 8)
    return step, args, (layouts, adam_layouts(layouts), P("dp"), P("dp"))


def rms(x: Any, g: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * g


def attend(x: Any, layer: Any) -> Any:
    q, k, v = jnp.einsum("btd,dchn->cbthn", x, layer["qkv"])
    scores = jnp.einsum("bthn,bshn->bhts", q, k) / jnp.sqrt(D / H)
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9)
    return jnp.einsum("bhts,bshn,hnd->btd", jax.nn.softmax(scores, -1), v, layer["o"])


def block(x: Any, layer: Any) -> Any:
    x = x + attend(rms(x, layer["g1"]), layer)
    return x + jax.nn.gelu(rms(x, layer["g2"]) @ layer["w1"]) @ layer["w2"]


def gpt_params(n: Draw) -> Any:
    def layer() -> Any:
        return {
            "qkv": n(D, 3, H, D // H), "o": n(H, D // H, D), "w1": n(D, F), "w2": n(F, D),
            "g1": jnp.ones(D), "g2": jnp.ones(D),
        }  # fmt: skip

    return {"emb": n(V, D), "layers": [layer() for _ in range(2)], "g": jnp.ones(D)}


GPT_LAYOUTS = {
    "emb": P("tp", None), "g": P(),
    "layers": [{
        "qkv": P(None, None, "tp"), "o": P("tp"), "w1": P(None, "tp"), "w2": P("tp"),
        "g1": P(), "g2": P(),
    }] * 2,
}  # fmt: skip


def gpt_loss(p: Any, ids: Any, labels: Any) -> Any:
    x = p["emb"][ids]
    for layer in p["layers"]:
        x = block(x, layer)
    log_p = jax.nn.log_softmax(rms(x, p["g"]) @ p["emb"].T, -1)
    return -jnp.mean(jnp.take_along_axis(log_p, labels[..., None], -1))


@program
def gpt() -> Program:
    """A transformer with a tied embedding, and a step of Adam."""
    n = Draw()
    params = gpt_params(n)

    def step(p: Any, state: Any, ids: Any, labels: Any) -> Any:
        value, grads = jax.value_and_grad(gpt_loss)(p, ids, labels)
        return value, *adam(p, grads, state)

    args = params, adam_state(params), n.below(V, B, T), n.below(V, B, T)
    return step, args, (GPT_LAYOUTS, adam_layouts(GPT_LAYOUTS), P("dp"), P("dp"))


@program
def scan() -> Program:
    """Layers of a transformer by scan, each with jax.checkpoint."""
    n = Draw()
    p = gpt_params(n)
    p["layers"] = jax.tree.map(lambda *a: jnp.stack(a), *p["layers"])
    layouts = {
        **GPT_LAYOUTS,
        "layers": {k: P(None, *s) for k, s in GPT_LAYOUTS["layers"][0].items()},
    }

    def loss(p: Any, ids: Any, labels: Any) -> Any:
        layer = jax.checkpoint(lambda x, layer: (block(x, layer), None))
        x, _ = lax.scan(layer, p["emb"][ids], p["layers"])
        log_p = jax.nn.log_softmax(rms(x, p["g"]) @ p["emb"].T, -1)
        return -jnp.mean(jnp.take_along_axis(log_p, labels[..., None], -1))

    args = p, n.below(V, B, T), n.below(V, B, T)
    return jax.value_and_grad(loss), args, (layouts, P("dp"), P("dp"))


@program
def rnn() -> Program:
    """A recurrent network by scan, with its gradients."""
    n = Draw()

    def loss(p: Any, xs: Any) -> Any:
        def cell(h: Any, x: Any) -> Any:
            h = jnp.tanh(x @ p["wx"] + h @ p["wh"])
            return h, h

        h, ys = lax.scan(cell, jnp.zeros((4, 8)), xs)
        return jnp.sum(ys**2) + jnp.sum(h)

    args = {"wx": n(6, 8), "wh": n(8, 8)}, n(5, 4, 6)
    layouts = {"wx": P(None, "tp"), "wh": P(None, "tp")}, P(None, "dp")
    return jax.value_and_grad(loss), args, layouts


def layer_norm(x: Any, g: Any, b: Any) -> Any:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(var + 1e-5) * g + b


@program
def vit() -> Program:
    """The forward part of a vision transformer: patches, a class token, layer norms."""
    n = Draw()
    p = {
        "patch": n(48, D), "pos": n(1, 17, D), "cls": n(1, 1, D), "head": n(D, 10),
        "g1": n(D), "b1": n(D), "g2": n(D), "b2": n(D), "qkv": n(D, 3 * D), "o": n(D, D),
        "w1": n(D, F), "c1": n(F), "w2": n(F, D), "c2": n(D),
    }  # fmt: skip

    def forward(p: Any, images: Any) -> Any:
        b = images.shape[0]
        x = images.reshape(b, 4, 4, 4, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(b, 16, 48)
        x = jnp.concatenate([jnp.broadcast_to(p["cls"], (b, 1, D)), x @ p["patch"]], 1) + p["pos"]
        q, k, v = (
            u.reshape(b, 17, H, D // H).transpose(0, 2, 1, 3)
            for u in jnp.split(layer_norm(x, p["g1"], p["b1"]) @ p["qkv"], 3, -1)
        )
        a = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 2, -1) @ v
        x = x + a.transpose(0, 2, 1, 3).reshape(b, 17, D) @ p["o"]
        h = jax.nn.gelu(layer_norm(x, p["g2"], p["b2"]) @ p["w1"] + p["c1"], approximate=False)
        return (x + h @ p["w2"] + p["c2"])[:, 0] @ p["head"]

    split = {"w1": P(None, "tp"), "c1": P("tp"), "w2": P("tp")}
    return forward, (p, n(4, 16, 16, 3)), ({k: split.get(k, P()) for k in p}, P("dp"))


@program
def resnet() -> Program:
    """A residual block with batch norm in inference, pools, and the gradients of its weights."""
    n = Draw()
    p = {
        "w0": n(3, 3, 3, 8), "w1": n(3, 3, 8, 8), "w2": n(3, 3, 8, 16), "w3": n(1, 1, 8, 16),
        "g": n(8), "b": n(8), "m": n(8), "v": jnp.ones(8) * 0.5, "head": n(16, 5),
    }  # fmt: skip

    def conv(x: Any, w: Any, s: int = 1) -> Any:
        order = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (s, s), "SAME", dimension_numbers=order)

    def loss(p: Any, x: Any) -> Any:
        x = jax.nn.relu(conv(x, p["w0"]))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        y = (conv(x, p["w1"]) - p["m"]) * lax.rsqrt(p["v"] + 1e-5) * p["g"] + p["b"]
        y = conv(jax.nn.relu(y), p["w2"], 2) + conv(x, p["w3"], 2)
        y = lax.reduce_window(y, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
        return jnp.sum((y.mean((1, 2)) @ p["head"]) ** 2)

    split = {"w2": P(None, None, None, "tp"), "w3": P(None, None, None, "tp"), "head": P("tp")}
    layouts = {k: split.get(k, P()) for k in p}, P("dp")
    return jax.value_and_grad(loss), (p, n(2, 16, 16, 3)), layouts


@program
def moe() -> Program:
    """Experts, two of four for each token, by products with one-hot tensors."""
    n = Draw()

    def forward(p: Any, x: Any) -> Any:
        gates = jax.nn.softmax(x @ p["gate"], -1)
        top, chosen = lax.top_k(gates, 2)
        mask = jax.nn.one_hot(chosen, 4, dtype=x.dtype)
        position = jnp.cumsum(mask.reshape(-1, 4), 0).reshape(mask.shape) - 1
        keep = (position < 6) * mask
        slots = jax.nn.one_hot(jnp.where(keep > 0, position, -1).astype(int), 6, dtype=x.dtype)
        dispatch = jnp.einsum("nke,nkec->nec", keep, slots)
        combine = dispatch * jnp.einsum("nke,nk->ne", keep, top)[..., None]
        h = jax.nn.silu(jnp.einsum("ecd,edf->ecf", jnp.einsum("nec,nd->ecd", dispatch, x), p["w1"]))
        return jnp.einsum("nec,ecd->nd", combine, jnp.einsum("ecf,efd->ecd", h, p["w2"]))

    p = {"gate": n(D, 4), "w1": n(4, D, F), "w2": n(4, F, D)}
    return forward, (p, n(16, D)), ({"gate": P(), "w1": P("tp"), "w2": P("tp")}, P("dp"))


@program
def embedding() -> Program:
    """A table split over its rows, and a cross entropy over split classes, with gradients."""
    n = Draw()

    def loss(p: Any, ids: Any, labels: Any) -> Any:
        logits = p["table"][ids] @ p["w"]
        one_hot = jax.nn.one_hot(labels, V, dtype=logits.dtype)
        return -jnp.mean(jnp.sum(one_hot * jax.nn.log_softmax(logits), -1))

    args = {"table": n(V, D), "w": n(D, V)}, n.below(V, 8), n.below(V, 8)
    layouts = {"table": P("tp"), "w": P(None, "tp")}, P("dp"), P("dp")
    return jax.value_and_grad(loss), args, layouts


@program
def flash() -> Program:
    """Attention with a backward part of its own (custom_vjp)."""

    @jax.custom_vjp
    def attention(q: Any, k: Any, v: Any) -> Any:
        return forward(q, k, v)[0]

    def forward(q: Any, k: Any, v: Any) -> Any:
        s = jnp.einsum("bqd,bkd->bqk", q, k)
        m = s.max(-1, keepdims=True)
        e = jnp.exp(s - m)
        total = e.sum(-1, keepdims=True)
        out = (e / total) @ v
        return out, (q, k, v, out, m + jnp.log(total))

    def backward(saved: Any, g: Any) -> Any:
        q, k, v, out, lse = saved
        p = jnp.exp(jnp.einsum("bqd,bkd->bqk", q, k) - lse)
        ds = p * (g @ v.swapaxes(1, 2) - (g * out).sum(-1, keepdims=True))
        return ds @ k, ds.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ g

    attention.defvjp(forward, backward)
    n = Draw()

    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(attention(q, k, v) ** 2)

    args = n(4, 8, 8), n(4, 8, 8), n(4, 8, 8)
    return jax.value_and_grad(loss, (0, 1, 2)), args, (P("dp", "tp"),) * 3


@program
def lora() -> Program:
    n = Draw()

    def loss(p: Any, w: Any, x: Any) -> Any:
        return jnp.sum((x @ (w + 0.5 * p["a"] @ p["b"])) ** 2)

    args = {"a": n(D, 2), "b": n(2, D)}, n(D, D), n(4, D)
    return jax.value_and_grad(loss), args, (P(), P(None, "tp"), P("dp"))


@program
def segments() -> Program:
    """Sums of segments, sorts, and reads in the order of another sort."""

    def f(x: Any, ids: Any) -> Any:
        order = jnp.argsort(-x[:, 0])
        return jax.ops.segment_sum(x, ids, num_segments=5), jnp.sort(x, 0), order, x[order], ids % 3

    n = Draw()
    return f, (n(12, 3), n.below(5, 12)), (P("dp"), P("dp"))


@program
def dropout() -> Program:
    """Random numbers by threefry, computed in the program: the same as JAX's."""

    def f(key: Any, x: Any) -> Any:
        keep = jax.random.uniform(key, x.shape, jnp.float32) < 0.8
        return jnp.where(keep, x / 0.8, 0.0)

    return f, (jax.random.PRNGKey(3), Draw()(4, 8)), (None, P("dp"))


@program
def vmapped() -> Program:
    def f(w: Any, x: Any, i: Any) -> Any:
        return jnp.tanh(w @ x)[i], x[i], x.at[i].set(0.0)

    n = Draw()
    return (
        jax.vmap(f, (0, None, 0)),
        (n(4, 4, 4), n(4), jnp.array([0, 2, 1, 3])),
        (P("dp"), None, P("dp")),
    )


@program
def grouped_conv() -> Program:
    """Groups, dilation, and the gradients of both operands."""
    n = Draw()

    def loss(x: Any, w: Any) -> Any:
        y = lax.conv_general_dilated(
            x, w, (1, 1), ((2, 2), (2, 2)), rhs_dilation=(2, 2), feature_group_count=4
        )
        return jnp.sum(y**2)

    return jax.value_and_grad(loss, (0, 1)), (n(2, 8, 9, 9), n(8, 2, 3, 3)), (P("dp"), P("tp"))


@program
def indices() -> Program:
    """Reads and writes by index, in and out of range, and slices at computed positions."""

    def f(x: Any, i: Any) -> Any:
        return (
            x.at[i].set(0.0), x.at[:, 1].add(2.0), x[i], x[:, i % 3], x.at[i + 3].add(1.0),
            lax.dynamic_slice(x, (i[0], 0), (2, 2)), x[jnp.arange(6), i % 4],
            lax.dynamic_update_slice(x, x[:2, :2], (i[0], i[1])), jnp.argmax(x, 1),
            jnp.argmin(x, 0), jnp.take(x, i, 1, mode="clip"), jnp.cumsum(x, 1), jnp.roll(x, 1, 0),
            jnp.take_along_axis(x, jnp.argsort(x, 0), 0), x[::2, ::-1], jnp.median(x, 0),
            jnp.searchsorted(jnp.arange(5.0), x[0]), lax.cond(i[0] > 2, jnp.sin, jnp.cos, x),
        )  # fmt: skip

    return f, (Draw()(6, 4), jnp.array([0, 3, 2, 5, 4, 3])), (P("dp"), None)


@program
def integers() -> Program:
    """Unsigned and small integers wrap, and shifts."""

    def f(i: Any) -> Any:
        u = i.astype(jnp.uint32) * jnp.uint32(2654435761)
        return (
            u, u >> 7, u << 5, u ^ (u >> 16), ~u, i << 2, (i - 3) >> 1, i // 2, (i - 3) // 2,
            i.astype(jnp.uint8) * jnp.uint8(100), (i.astype(jnp.int8) + jnp.int8(125)), -i % 3,
            u.astype(jnp.int32), u > jnp.uint32(2**31), u // jnp.uint32(1000),
            lax.rem(i - 3, jnp.full_like(i, 2)), jnp.arange(6, dtype=jnp.int32) * 2**30 < 0,
        )  # fmt: skip

    return f, (jnp.arange(6, dtype=jnp.int32),), (P("dp"),)
