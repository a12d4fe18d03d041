"""The examples of models on real ranks: losses and parameters of their training."""
# ruff: noqa: E402 (torch may not be installed)

from typing import Any

import pytest
from support.extent import long_form

torch = pytest.importorskip("torch")

from support.ranks.example_runs import (
    Tensors,
    attention,
    check_training,
    classified,
    equal,
    gelu,
    norm,
    sinusoids,
)


@long_form
def test_reid(ran):
    def loss(v: Tensors) -> Any:
        features = torch.relu(v["images"] @ v["w1"]) @ v["w2"]
        return torch.nn.functional.cross_entropy(features @ v["people"], v["labels"])

    check_training(ran("reid"), loss, steps=3)


@long_form
def test_dlrm(ran):
    def loss(v: Tensors) -> Any:
        rows = torch.nn.functional.embedding(v["ids"], v["table"])
        dense = torch.relu(v["dense"] @ v["bottom"])
        between = torch.bmm(rows, rows.mT).flatten(1)
        crossed = torch.bmm(rows, dense[:, :, None])[:, :, 0]
        logits = between @ v["pairs"] + crossed @ v["cross"]
        return torch.nn.functional.cross_entropy(logits, v["clicks"])

    example = ran("dlrm")
    check_training(example, loss, steps=3)
    args = example.args("net")
    equal(example.results("net")[0], args["x"] @ args["w"] @ args["v"])


def test_wide_and_deep(ran):
    def loss(v: Tensors) -> Any:
        linear = v["wide"][v["crossed"]].sum(1)
        features = torch.cat([v["deep"][v["ids"]].flatten(1), v["dense"]], 1)
        deep = torch.relu(features @ v["w1"] + v["b1"]) @ v["w2"]
        logits = (linear + deep + v["b"])[:, 0]
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, v["clicks"])

    check_training(ran("wide_and_deep"), loss, steps=3)


@long_form
def test_densenet(ran):
    """It has the sizes of the lecture."""

    def loss(v: Tensors) -> Any:
        e = v["x"] @ v["table"]
        q, k, u = (torch.relu(e @ v[f"w{i}"] + v[f"b{i}"]) for i in (1, 2, 3))
        return torch.nn.functional.mse_loss(q @ k.T @ u, v["labels"])

    check_training(ran("densenet"), loss, steps=3, lr=0.01)


# ---- transformers ----


def test_transformer(ran):
    functional = torch.nn.functional

    def loss(v: Tensors) -> Any:
        a = functional.layer_norm(v["x"], (8,), v["n1"], v["c1"])
        q, k, u = (torch.einsum("bse,ehd->bhsd", a, v[w]) for w in ("wq", "wk", "wv"))
        context = functional.scaled_dot_product_attention(q, k, u, is_causal=True)
        r1 = v["x"] + torch.einsum("bhsd,hde->bse", context, v["wo"])
        f = functional.layer_norm(r1, (8,), v["n2"], v["c2"])
        out = r1 + functional.gelu(f @ v["up"], approximate="tanh") @ v["down"]
        return functional.mse_loss(out, v["target"])

    check_training(ran("transformer_block"), loss, steps=3)


@long_form
def test_realformer(ran):
    def loss(v: Tensors) -> Any:
        x, scores = v["x"], 0.0
        for n in "12":
            q, k, u = (torch.einsum("bse,ehd->bhsd", x, v[w + n]) for w in ("wq", "wk", "wv"))
            scores = q @ k.mT / 2 + scores
            context = torch.softmax(scores, -1) @ u
            attended = torch.einsum("bhsd,hde->bse", context, v[f"wo{n}"])
            x = norm(x + attended, v[f"g{n}a"], v[f"c{n}a"])
            x = norm(x + gelu(x @ v[f"up{n}"]) @ v[f"down{n}"], v[f"g{n}b"], v[f"c{n}b"])
        return torch.nn.functional.mse_loss(x, v["target"])

    check_training(ran("realformer"), loss, steps=3)


@long_form
def test_encoder_decoder(ran):
    def embedded(v: Tensors, tokens: Any) -> Any:
        return v["table"][tokens] * 8**0.5 + sinusoids(tokens.shape[1], 8)

    def fed(v: Tensors, x: Any, n: str, of: str) -> Any:
        return norm(x + torch.relu(x @ v[f"up{n}"]) @ v[f"down{n}"], v[f"n{of}"], v[f"c{of}"])

    def loss(v: Tensors) -> Any:
        encoder, decoder, across = ([v[a + b] for b in "qkvo"] for a in "edx")
        s, t = embedded(v, v["source"]), embedded(v, v["target"])
        memory = fed(v, norm(s + attention(s, s, *encoder), v["n1"], v["c1"]), "1", "2")
        m = norm(t + attention(t, t, *decoder, is_causal=True), v["n3"], v["c3"])
        m = norm(m + attention(m, memory, *across), v["n4"], v["c4"])
        logits = fed(v, m, "2", "5") @ v["table"].T
        return classified(logits, v["labels"], label_smoothing=0.1)

    check_training(ran("encoder_decoder"), loss, steps=3)


def test_bert(ran):
    functional = torch.nn.functional

    def loss(v: Tensors) -> Any:
        e = v["table"][v["tokens"]] + v["sides"][v["segments"]] + v["places"]
        x = norm(e, v["n0"], v["c0"], 1e-12)
        counts = (torch.arange(6) < v["lengths"][:, None])[:, None, None]
        weights = (v["wq"], v["wk"], v["wv"], v["wo"])
        f = norm(x + attention(x, x, *weights, attn_mask=counts), v["n1"], v["c1"], 1e-12)
        y = norm(f + functional.gelu(f @ v["up"]) @ v["down"], v["n2"], v["c2"], 1e-12)
        t = norm(functional.gelu(y @ v["wt"]), v["n3"], v["c3"], 1e-12)
        labels = v["masked"].where(v["masked"] >= 0, -100)
        missing = classified(t @ v["table"].T + v["bias"], labels)
        return missing + classified(torch.tanh(y[:, 0] @ v["wp"]) @ v["ws"], v["follows"])

    example = ran("bert")
    values = example.args("step")
    assert (values["lengths"] < 6).any() and (values["masked"] < 0).any()
    check_training(example, loss, steps=3)


def test_pangu_alpha(ran):
    def fed(v: Tensors, x: Any, up: str, a: str, down: str, b: str) -> Any:
        return gelu(x @ v[up] + v[a]) @ v[down] + v[b]

    def loss(v: Tensors) -> Any:
        x = v["table"][v["tokens"]] + v["positions"][v["places"]]
        a = norm(x, v["n1"], v["c1"])
        x = x + attention(a, a, *(v[f"w{w}"] for w in "qkvo"), is_causal=True)
        x = x + fed(v, norm(x, v["n2"], v["c2"]), "up", "b1", "down", "b2")
        y = norm(x, v["n3"], v["c3"])
        memory = norm(y, v["n4"], v["c4"])
        asks = v["next"][v["places"]]
        y = y + attention(asks, memory, *(v[f"u{w}"] for w in "qkvo"), is_causal=True)
        y = y + fed(v, norm(y, v["n5"], v["c5"]), "up2", "b3", "down2", "b4")
        return classified(y @ v["table"].T, v["targets"])

    check_training(ran("pangu_alpha"), loss, steps=3)
