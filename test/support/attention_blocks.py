"""Transformer blocks whose queries, keys and values are made in the forms that libraries have."""

from random import Random
from typing import NamedTuple

import torch
from torch import nn

FEATURES = 4
"""The elements of a head."""

SHARED = ("apart", "repeated", "expanded", "grouped", "pair", "split", "heads", "slices")
"""The forms in which keys and values may have fewer heads."""

EQUAL = ("timm", "swin", "index", "chunk", "inner", "neox")
"""Those in which one product makes as many heads of queries, keys and values."""


class Case(NamedTuple):
    """A form, the heads of queries, those of keys and values, and the samples of a batch."""

    form: str
    heads: int
    keys: int
    samples: int = 12


def random_case(random: Random) -> Case:
    keys, group = random.choice((1, 2, 3, 4, 6)), random.choice((1, 2, 4))
    form = random.choice(SHARED + EQUAL if group == 1 else SHARED)
    return Case(form, keys * group, keys, random.choice((2, 12)))


class Block(nn.Module):
    """An attention, of causal scores, and a gated MLP, beside residuals."""

    def __init__(self, case: Case):
        super().__init__()
        self.case = case
        width, keys = case.heads * FEATURES, case.keys * FEATURES
        if case.form in ("apart", "repeated", "expanded", "grouped"):
            self.q, self.k, self.v = (nn.Linear(width, n) for n in (width, keys, keys))
        elif case.form == "pair":
            self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * keys)
        else:
            self.qkv = nn.Linear(width, width + 2 * keys)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        _, h, n, _ = self.case
        q, k, v = self._parts(self.norm(x))
        match self.case.form:
            case "repeated":
                k, v = (y.repeat_interleave(h // n, 1) for y in (k, v))
            case "expanded":
                k, v = (y[:, :, None].expand(b, n, h // n, t, FEATURES) for y in (k, v))
                k, v = (y.reshape(b, h, t, FEATURES) for y in (k, v))
        if self.case.form == "grouped":
            q = q.reshape(b, n, h // n, t, FEATURES)
            scores = torch.einsum("bngid,bnjd->bngij", q, k) / FEATURES**0.5
            y = torch.einsum("bngij,bnjd->bngid", scores.softmax(-1), v).reshape(b, h, t, FEATURES)
        else:
            y = nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=k.shape[1] != h
            )
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.silu(self.up(x)))

    def _parts(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values, [samples, heads, tokens, features]."""
        b, t, _ = x.shape
        _, h, n, _ = self.case

        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(b, t, -1, FEATURES).transpose(1, 2)

        match self.case.form:
            case "apart" | "repeated" | "expanded" | "grouped":
                return heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
            case "pair":
                kv = self.kv(x).reshape(b, t, 2, n, FEATURES).permute(2, 0, 3, 1, 4)
                return heads(self.q(x)), *kv.unbind(0)
        y = self.qkv(x)
        match self.case.form:
            case "timm":
                return y.reshape(b, t, 3, h, FEATURES).permute(2, 0, 3, 1, 4).unbind(0)
            case "swin":
                y = y.reshape(b, t, 3, h, FEATURES).permute(2, 0, 3, 1, 4)
                return y[0], y[1], y[2]
            case "index":
                y = y.view(b, t, 3, h, FEATURES)
                return tuple(y[:, :, i].transpose(1, 2) for i in range(3))
            case "chunk":
                return tuple(map(heads, y.chunk(3, -1)))
            case "inner":
                return y.view(b, t, h, 3, FEATURES).permute(3, 0, 2, 1, 4).unbind(0)
            case "neox":
                y = y.view(b, t, h, 3 * FEATURES).transpose(1, 2)
                return y.chunk(3, -1)
            case "split":
                return tuple(map(heads, y.split([z * FEATURES for z in (h, n, n)], -1)))
            case "heads":
                y = y.view(b, t, h + 2 * n, FEATURES).split([h, n, n], 2)
                return tuple(z.transpose(1, 2) for z in y)
            case "slices":
                y = y.view(b, t, h + 2 * n, FEATURES).transpose(1, 2)
                return y[:, :h], y[:, h : h + n], y[:, h + n :]
        raise ValueError(self.case.form)
