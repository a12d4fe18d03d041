"""The examples of split sequences on real ranks: results, gradients and losses."""
# ruff: noqa: E402 (torch may not be installed)

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.ranks.example_runs import (
    Tensors,
    attention,
    check_training,
    equal,
    gradients,
    sinusoids,
)


def turned(x: Any) -> Any:
    """Rotary embeddings (Su et al., 2021) as products of complex numbers: x[i] and x[i + d / 2]."""
    rows, columns = x.shape[-2:]
    rate = 1e4 ** (-torch.arange(0, columns, 2).double() / columns)
    turn = torch.polar(torch.ones(rows, columns // 2).double(), torch.arange(rows)[:, None] * rate)
    pairs = torch.complex(x[..., : columns // 2], x[..., columns // 2 :]) * turn
    return torch.cat([pairs.real, pairs.imag], -1)


@pytest.mark.parametrize("kind", ["learned", "sinusoidal", "rotary"])
def test_positions(ran, kind):
    def attended(x: Any, *weights: Any) -> Any:
        table = weights[0] if kind == "learned" else sinusoids(6, 8)
        placed = x if kind == "rotary" else x + table
        q, k, v = (torch.einsum("bse,ehd->bhsd", placed, w) for w in weights[-3:])
        if kind == "rotary":
            q, k = turned(q), turned(k)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    example = ran("positions")
    args = example.args(f"{kind}_gradient")
    names = ["x", *(["table"] if kind == "learned" else []), "wq", "wk", "wv"]
    right = gradients(attended, [args[n] for n in names], args["d_y"])
    for name, found, value in zip(
        ("y", *names), example.results(f"{kind}_gradient"), right, strict=True
    ):
        equal(found, value, name)


def test_ulysses(ran):
    def loss(v: Tensors) -> Any:
        weights = (v["wq"], v["wk"], v["wv"], v["wo"])
        y = v["x"] + attention(v["x"], v["x"], *weights, is_causal=True)
        return torch.nn.functional.mse_loss(y, v["target"])

    check_training(ran("ulysses"), loss, steps=3)


def test_ring_attention(ran):
    """The blocks [4, batch, heads, 2, columns] are a sequence of 8."""

    def attended(*blocks: Any) -> Any:
        sequences = (x.permute(1, 2, 0, 3, 4).flatten(2, 3) for x in blocks)
        y = torch.nn.functional.scaled_dot_product_attention(*sequences, is_causal=True)
        return y.unflatten(2, (4, 2)).permute(2, 0, 1, 3, 4)

    example = ran("ring_attention")
    args = example.args("gradient")
    right = gradients(attended, [args[n] for n in "qkv"], args["d_y"])
    equal(example.results("ring")[0], right[0])
    for found, value in zip(example.results("gradient"), right, strict=True):
        equal(found, value)
