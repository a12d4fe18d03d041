"""Programs of JAX, in the precision of their arguments: `PROGRAMS[name]()` is a function, its
arguments, and their layouts on the mesh of 2 x 4 (in_shardings)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
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


def dropped(key: Any, x: Any) -> Any:
    keep = jax.random.bernoulli(key, jnp.float32(0.9), x.shape)
    return jnp.where(keep, x / 0.9, 0.0)


def cross_entropy(logits: Any, labels: Any) -> Any:
    log_p = jax.nn.log_softmax(logits, -1)
    return -jnp.mean(jnp.take_along_axis(log_p, labels[..., None], -1))


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
    """Two layers with dropout, cross entropy and a step of Adam."""
    n = Draw()
    params = {"w1": n(16, 32), "b1": n(32), "w2": n(32, 8)}
    layouts = {"w1": P(None, "tp"), "b1": P("tp"), "w2": P("tp", None)}

    def loss(p: Any, x: Any, y: Any, key: Any) -> Any:
        h = dropped(key, jax.nn.relu(x @ p["w1"] + p["b1"]))
        return cross_entropy(h @ p["w2"], y)

    def step(p: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p, x, y, key)
        return value, *adam(p, grads, state)

    args = params, adam_state(params), n(8, 16), n.below(8, 8), jax.random.PRNGKey(3)
    return step, args, (layouts, adam_layouts(layouts), P("dp"), P("dp"), None)


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


def gpt_loss(p: Any, ids: Any, labels: Any, key: Any) -> Any:
    x = p["emb"][ids]
    for layer, own in zip(p["layers"], jax.random.split(key, 2), strict=True):
        x = dropped(own, block(x, layer))
    return cross_entropy(rms(x, p["g"]) @ p["emb"].T, labels)


@program
def gpt() -> Program:
    """A transformer with a tied embedding and dropout, and a step of Adam."""
    n = Draw()
    params = gpt_params(n)

    def step(p: Any, state: Any, ids: Any, labels: Any, key: Any) -> Any:
        value, grads = jax.value_and_grad(gpt_loss)(p, ids, labels, key)
        return value, *adam(p, grads, state)

    ids, labels = n.below(V, B, T), n.below(V, B, T)
    args = params, adam_state(params), ids, labels, jax.random.PRNGKey(3)
    return step, args, (GPT_LAYOUTS, adam_layouts(GPT_LAYOUTS), P("dp"), P("dp"), None)


@program
def remat() -> Program:
    """The same layers with jax.checkpoint, which retains the results of products."""
    n = Draw()

    def loss(p: Any, ids: Any, labels: Any) -> Any:
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        x = p["emb"][ids]
        for layer in p["layers"]:
            x = jax.checkpoint(block, policy=policy)(x, layer)
        return cross_entropy(rms(x, p["g"]) @ p["emb"].T, labels)

    args = gpt_params(n), n.below(V, B, T), n.below(V, B, T)
    return jax.value_and_grad(loss), args, (GPT_LAYOUTS, P("dp"), P("dp"))


@program
def mixed() -> Program:
    """A transformer in bf16, whose parameters and step are in f32."""
    n = Draw()

    def half(x: Any) -> Any:
        return x.astype(jnp.bfloat16)

    def loss(p: Any, ids: Any, labels: Any) -> Any:
        low = jax.tree.map(half, p)
        x = low["emb"][ids]
        for layer in low["layers"]:
            x = block(x, layer)
        logits = rms(x, low["g"]) @ low["emb"].T
        return cross_entropy(logits.astype(jnp.float32), labels)

    def step(p: Any, ids: Any, labels: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p, ids, labels)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)

    params = jax.tree.map(lambda x: x.astype(jnp.float32), gpt_params(n))
    return step, (params, n.below(V, B, T), n.below(V, B, T)), (GPT_LAYOUTS, P("dp"), P("dp"))


@program
def scan() -> Program:
    """Layers of a transformer by scan, each with jax.checkpoint."""
    n = Draw()
    p = gpt_params(n)
    p["layers"] = jax.tree.map(lambda *a: jnp.stack([*a, *a]), *p["layers"])
    layouts = {
        **GPT_LAYOUTS,
        "layers": {k: P(None, *s) for k, s in GPT_LAYOUTS["layers"][0].items()},
    }

    def loss(p: Any, ids: Any, labels: Any) -> Any:
        layer = jax.checkpoint(lambda x, layer: (block(x, layer), None))
        x, _ = lax.scan(layer, p["emb"][ids], p["layers"])
        return cross_entropy(rms(x, p["g"]) @ p["emb"].T, labels)

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
    """A vision transformer: patches, a class token, layer norms, dropout, and a step of Adam."""
    n = Draw()
    p = {
        "patch": n(48, D), "pos": n(1, 17, D), "cls": n(1, 1, D), "head": n(D, 10),
        "g1": n(D), "b1": n(D), "g2": n(D), "b2": n(D), "qkv": n(D, 3 * D), "o": n(D, D),
        "w1": n(D, F), "c1": n(F), "w2": n(F, D), "c2": n(D),
    }  # fmt: skip

    def loss(p: Any, images: Any, labels: Any, key: Any) -> Any:
        b = images.shape[0]
        x = images.reshape(b, 4, 4, 4, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(b, 16, 48)
        x = jnp.concatenate([jnp.broadcast_to(p["cls"], (b, 1, D)), x @ p["patch"]], 1) + p["pos"]
        q, k, v = (
            u.reshape(b, 17, H, D // H).transpose(0, 2, 1, 3)
            for u in jnp.split(layer_norm(x, p["g1"], p["b1"]) @ p["qkv"], 3, -1)
        )
        a = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 2, -1) @ v
        x = x + dropped(key, a.transpose(0, 2, 1, 3).reshape(b, 17, D) @ p["o"])
        h = jax.nn.gelu(layer_norm(x, p["g2"], p["b2"]) @ p["w1"] + p["c1"], approximate=False)
        return cross_entropy((x + h @ p["w2"] + p["c2"])[:, 0] @ p["head"], labels)

    def step(p: Any, state: Any, images: Any, labels: Any, key: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p, images, labels, key)
        return value, *adam(p, grads, state)

    split = {"w1": P(None, "tp"), "c1": P("tp"), "w2": P("tp")}
    layouts = {k: split.get(k, P()) for k in p}
    args = p, adam_state(p), n(4, 16, 16, 3), n.below(10, 4), jax.random.PRNGKey(3)
    return step, args, (layouts, adam_layouts(layouts), P("dp"), P("dp"), None)


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
def unet() -> Program:
    """A block of a diffusion model: group norms, the embedding of a time, attention between a
    convolution down and one up, a skip connection; the noise is predicted, with gradients."""
    n = Draw()
    p = {
        "in": n(3, 3, 3, 8), "time": n(8, 8), "c1": n(3, 3, 8, 8), "down": n(3, 3, 8, 16),
        "qkv": n(16, 48), "o": n(16, 16), "up": n(3, 3, 16, 8), "out": n(3, 3, 16, 3),
        "g1": jnp.ones(8), "g2": jnp.ones(16),
    }  # fmt: skip

    def conv(x: Any, w: Any, s: int = 1) -> Any:
        order = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (s, s), "SAME", dimension_numbers=order)

    def group_norm(x: Any, g: Any) -> Any:
        b, h, w, c = x.shape
        x = x.reshape(b, h, w, 4, c // 4)
        mean, var = x.mean((1, 2, 4), keepdims=True), x.var((1, 2, 4), keepdims=True)
        return ((x - mean) * lax.rsqrt(var + 1e-5)).reshape(b, h, w, c) * g

    def loss(p: Any, x: Any, noise: Any, time: Any) -> Any:
        angle = time[:, None] * jnp.exp(-jnp.arange(4.0))
        embedded = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1) @ p["time"]
        level = jnp.exp(-time)[:, None, None, None]
        h = conv(x * level + noise * jnp.sqrt(1 - level**2), p["in"])
        h = h + conv(jax.nn.silu(group_norm(h, p["g1"]) + embedded[:, None, None]), p["c1"])
        low = conv(h, p["down"], 2)
        b, s, c = low.shape[0], low.shape[1], low.shape[3]
        tokens = group_norm(low, p["g2"]).reshape(b, s * s, c)
        q, k, v = jnp.split(tokens @ p["qkv"], 3, -1)
        weights = jax.nn.softmax(jnp.einsum("bqc,bkc->bqk", q, k) / 4, -1)
        low = low + ((weights @ v) @ p["o"]).reshape(low.shape)
        up = conv(jax.image.resize(low, (b, 2 * s, 2 * s, c), "nearest"), p["up"])
        predicted = conv(jnp.concatenate([h, up], -1), p["out"])
        return jnp.mean((predicted - noise) ** 2)

    split = {"down": P(None, None, None, "tp"), "qkv": P("tp"), "up": P(None, None, "tp")}
    args = p, n(2, 8, 8, 3), n(2, 8, 8, 3), jnp.abs(n(2)) + 0.1
    return jax.value_and_grad(loss), args, (
        {k: split.get(k, P()) for k in p}, P("dp"), P("dp"), P("dp"))  # fmt: skip


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
def ring() -> Program:
    """Attention by shard_map: keys and values go around a ring by ppermute, and a psum makes the
    loss, with gradients."""
    n = Draw()
    shift = [(i, (i + 1) % 4) for i in range(4)]

    def local(q: Any, k: Any, v: Any) -> Any:
        out = jnp.zeros_like(q)
        high, total = jnp.full_like(q[..., :1], -jnp.inf), jnp.zeros_like(q[..., :1])
        for _ in range(4):
            scores = q @ k.swapaxes(1, 2)
            new = jnp.maximum(high, scores.max(-1, keepdims=True))
            e, kept = jnp.exp(scores - new), jnp.exp(high - new)
            out, total, high = out * kept + e @ v, total * kept + e.sum(-1, keepdims=True), new
            k, v = (lax.ppermute(x, "tp", shift) for x in (k, v))
        return lax.psum(jnp.sum((out / total) ** 2), ("dp", "tp"))

    axis_types = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=axis_types)
    specs = (P("dp", "tp"),) * 3
    loss = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
    args = n(2, 8, 8), n(2, 8, 8), n(2, 8, 8)
    return jax.value_and_grad(loss, (0, 1, 2)), args, specs


@program
def lora() -> Program:
    """A low-rank adapter of a frozen matrix, with gradients."""
    n = Draw()

    def loss(p: Any, w: Any, x: Any) -> Any:
        return jnp.sum((x @ (w + 0.5 * p["a"] @ p["b"])) ** 2)

    args = {"a": n(D, 2), "b": n(2, D)}, n(D, D), n(4, D)
    return jax.value_and_grad(loss), args, (P(), P(None, "tp"), P("dp"))


@program
def sampling() -> Program:
    """Three tokens of a recurrent model, each drawn from the five most likely of a split
    vocabulary."""
    n = Draw()

    def generate(p: Any, first: Any, key: Any) -> Any:
        def draw(carry: Any, key: Any) -> Any:
            h, ids = carry
            h = jnp.tanh(h @ p["wh"] + p["emb"][ids])
            best, chosen = lax.top_k(h @ p["head"], 5)
            drawn = jax.random.categorical(key, (best / 0.7).astype(jnp.float32))
            ids = jnp.take_along_axis(chosen, drawn[:, None], 1)[:, 0]
            return (h, ids), ids

        start = jnp.zeros((first.shape[0], D)), first
        return lax.scan(draw, start, jax.random.split(key, 3))[1]

    p = {"emb": n(V, D), "wh": n(D, D), "head": n(D, V) * 3}
    layouts = {"emb": P(), "wh": P(), "head": P(None, "tp")}
    return generate, (p, n.below(V, 4), jax.random.PRNGKey(5)), (layouts, P("dp"), None)


@program
def signal() -> Program:
    """Spectra without a Fourier transform: a filter, frames, a window, products with cosines and
    sines, bands, and a recursive mean over time."""
    n = Draw()

    def features(taps: Any, bands: Any, x: Any) -> Any:
        y = lax.conv_general_dilated(x[:, None], taps[None, None], (1,), ((3, 3),))[:, 0]
        frames = y[:, jnp.arange(7)[:, None] * 8 + jnp.arange(16)]
        t = jnp.arange(16.0)
        angle = 2 * jnp.pi * t[:, None] * jnp.arange(9.0) / 16
        frames = frames * (0.5 - 0.5 * jnp.cos(2 * jnp.pi * t / 16))
        power = (frames @ jnp.cos(angle)) ** 2 + (frames @ jnp.sin(angle)) ** 2
        energy = jnp.log(power @ jnp.abs(bands) + 1e-3)

        def combine(a: Any, b: Any) -> Any:
            return a[0] * b[0], a[1] * b[0] + b[1]

        decay = jnp.full_like(energy, 0.8)
        smooth = lax.associative_scan(combine, (decay, 0.2 * energy), axis=1)[1]
        return smooth, energy - jnp.roll(energy, 1, 1), jnp.sum(y**2, -1)

    return features, (n(7), n(9, 4), n(4, 64)), (P(), P(None, "tp"), P("dp"))


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
    """Reads and writes of each of a batch, and the gradients of each example."""
    n = Draw()

    def f(w: Any, x: Any, i: Any) -> Any:
        grads = jax.grad(lambda w: jnp.tanh(w @ x)[i])(w)
        return grads, x[i], x.at[i].set(0.0), w.at[:, i].set(x), w.at[i, i - 2].set(1.0)

    args = n(4, 4, 4), n(4), jnp.array([0, 2, 1, 9])
    return jax.vmap(f, (0, None, 0), (0, 0, 0, 1, 0)), args, (P("dp"), P(), P("dp"))


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
