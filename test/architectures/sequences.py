"""Networks of sequences in plain torch.nn, as its users and its examples write them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from architectures.architecture import (
    BATCH,
    CLASSES,
    HEADS,
    HIDDEN,
    LAYERS,
    LENGTH,
    VOCABULARY,
    Architecture,
    Example,
    classes,
    tokens,
)


class Encoder(nn.Module):
    """Embeddings, nn.TransformerEncoder with a causal mask, and a decoder of tied weights.

    The transformer form of torch's example of word-level language models.
    """

    def __init__(self, norm_first: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        layer = nn.TransformerEncoderLayer(
            HIDDEN, HEADS, 2 * HIDDEN, 0.0, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.decoder = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.decoder.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        position = torch.arange(LENGTH).unsqueeze(1)
        rate = torch.exp(torch.arange(0, HIDDEN, 2) * (-math.log(10000.0) / HIDDEN))
        positions = torch.zeros(LENGTH, HIDDEN)
        positions[:, 0::2] = torch.sin(position * rate)
        positions[:, 1::2] = torch.cos(position * rate)
        self.register_buffer("positions", positions)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * math.sqrt(HIDDEN) + self.positions
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        return F.log_softmax(self.decoder(self.encoder(x, mask=mask, is_causal=True)), dim=-1)


class Translator(nn.Module):
    """nn.Transformer, as in torch's tutorial on translation."""

    def __init__(self):
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, HIDDEN)
        self.target = nn.Embedding(VOCABULARY, HIDDEN)
        self.transformer = nn.Transformer(
            HIDDEN, HEADS, LAYERS, LAYERS, 2 * HIDDEN, 0.0, batch_first=True
        )
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        x = self.transformer(
            self.source(source), self.target(target), tgt_mask=mask.bool(), tgt_is_causal=True
        )
        return self.head(x)


class Block(nn.Module):
    """A residual block about nn.MultiheadAttention, with a mask of padding."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU("tanh"), nn.Linear(2 * HIDDEN, HIDDEN)
        )

    def forward(self, x: Tensor, padding: Tensor) -> dict[str, Tensor]:
        y = self.norm1(x)
        y, weights = self.attention(y, y, y, key_padding_mask=padding)
        x = x + y
        return {"hidden": x + self.mlp(self.norm2(x)), "weights": weights}


class Recurrent(nn.Module):
    """The recurrent form of torch's example of word-level language models."""

    def __init__(self, kind: Callable[..., nn.Module]):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.rnn = kind(HIDDEN, HIDDEN, LAYERS)
        self.decoder = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor, hidden: Tensor | tuple[Tensor, Tensor]):
        output, hidden = self.rnn(self.embedding(ids), hidden)
        return F.log_softmax(self.decoder(output).view(-1, VOCABULARY), dim=1), hidden


class Cells(nn.Module):
    """A loop of nn.LSTMCell over the sequence, which export unrolls."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(x.shape[0], HIDDEN)
        cell = torch.zeros_like(hidden)
        for step in x.unbind(1)[:4]:
            hidden, cell = self.cell(step, (hidden, cell))
        return self.head(hidden)


class Regions(nn.Module):
    """Blocks that are recomputed in the backward pass, and a product outside autocast."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Mish())
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        with torch.autocast("cpu", enabled=False):
            return self.head(x).mean(dim=1)


def shifted() -> tuple[Tensor, Tensor]:
    """Tokens, and the one after each."""
    ids = tokens(LENGTH + 1)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def hiddens() -> Tensor:
    """A vector for each token."""
    return torch.randn(BATCH, LENGTH, HIDDEN)


def language(norm_first: bool) -> Example:
    ids, labels = shifted()
    return Example(Encoder(norm_first), (ids,), {}, labels)


def translation() -> Example:
    ids, labels = shifted()
    return Example(Translator(), (tokens(),), {"target": ids}, labels)


def attention() -> Example:
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[::2, -2:] = True
    return Example(Block(), (hiddens(),), {"padding": padding})


def recurrent(kind: Callable[..., nn.Module]) -> Example:
    """The sequence is the first dimension, and the states that it begins with are inputs."""
    ids, labels = shifted()
    states = [torch.zeros(LAYERS, BATCH, HIDDEN) for _ in range(2)]
    state = tuple(states) if kind is nn.LSTM else states[0]
    return Example(Recurrent(kind), (ids.T.contiguous(), state), {}, labels.T.flatten())


def language_loss(scores: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(scores.flatten(0, 1), labels.flatten())


def recurrent_loss(outputs: tuple[Tensor, object], labels: Tensor) -> Tensor:
    return F.nll_loss(outputs[0], labels)


def translation_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels)


def attention_loss(outputs: dict[str, Tensor]) -> Tensor:
    return outputs["hidden"].square().mean()


SEQUENCES = (
    Architecture("nn.TransformerEncoder", lambda: language(False), language_loss),
    Architecture("nn.TransformerEncoder, norm first", lambda: language(True), language_loss),
    Architecture("nn.Transformer", translation, translation_loss),
    Architecture("nn.MultiheadAttention", attention, attention_loss),
    Architecture("LSTM", lambda: recurrent(nn.LSTM), recurrent_loss),
    Architecture("GRU", lambda: recurrent(nn.GRU), recurrent_loss),
    Architecture("Elman RNN", lambda: recurrent(nn.RNN), recurrent_loss),
    Architecture(
        "LSTM cells", lambda: Example(Cells(), (hiddens(),), {}, classes()), F.cross_entropy
    ),
    Architecture(
        "Checkpoints and autocast",
        lambda: Example(Regions(), (hiddens(),), {}, classes()),
        F.cross_entropy,
    ),
)
