"""A bf16 training step of a GPT on one GPU: emitted, and by torch, each eager and by torch.compile;
emitted also with an arena.

Causal attention, AdamW, weights and activations in bf16. All variants begin with the same weights,
run in turns in one process, and their first losses are compared. `--device cpu` tries the same on a
CPU, with small sizes.
"""

import copy
import json
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import shardir

SIZES = {"cuda": (8, 1024, 16, 8, 1024, 32768), "cpu": (2, 64, 4, 2, 32, 128)}
"""Layers, width, heads, samples, tokens of each, words of the vocabulary."""

STEPS, ROUNDS = 5, 10
DEVICE, COMPILED = "cuda", True
"""The device, and whether torch.compile is tried."""
SMOKE = {
    "STEPS": 1, "ROUNDS": 1, "DEVICE": "cpu", "COMPILED": False,
    "SIZES": {"cpu": (1, 16, 2, 2, 8, 16)},
}  # fmt: skip
TOLERANCE = 2e-2


class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        y, shape = self.norm1(x), (batch, tokens, self.heads, width // self.heads)
        q, k, v = (layer(y).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """The mean loss of all tokens."""

    def __init__(self, layers: int, width: int, heads: int, tokens: int, words: int):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return functional.cross_entropy(logits.float(), targets.flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def by_torch(model: nn.Module, compiled: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Return torch's own step of a copy of the model."""
    mine = copy.deepcopy(model)
    optimizer = optimizer_of(mine)
    loss_of = torch.compile(mine, dynamic=False) if compiled else mine

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--device", choices=list(SIZES), default=DEVICE, help="(cuda)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"turns of each ({ROUNDS})")


def records(log: Callable[[str], object], device: str, rounds: int) -> list[dict[str, Any]]:
    """One record per variant: median (milliseconds of a step), ratio to torch's eager step. On a
    GPU, by torch's allocator, `step_mb`, the most that a step has at once beside parameters and
    states (an arena, which outlives the step, included), and its number of `allocations`; and
    `predicted_mb` of the emitted program."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: gpu-step: expected a CUDA device, got none; use --device cpu")
    layers, width, heads, samples, length, words = SIZES[device]
    torch.manual_seed(0)
    model = GPT(layers, width, heads, length, words).to(device, torch.bfloat16)
    tokens, targets = torch.randint(words, (2, samples, length), device=device)
    with tempfile.TemporaryDirectory() as name:
        backend = "nccl" if device == "cuda" else "gloo"
        on_host = copy.deepcopy(model).cpu()
        program, within = (Path(name) / form for form in ("program", "arena"))
        for place in (program, within):
            compiled = shardir.compile(
                on_host, (tokens.cpu(), targets.cpu()), optimizer=optimizer_of(on_host),
                mode="stand_alone", arena=place is within,
            )  # fmt: skip
            compiled.save(place)
        use = compiled.cost("step").memory
        kept = ("parameters", "states", "inputs")
        predicted = use.peak - sum(n for part, n in use.parts.items() if part in kept)
        variants: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "torch": by_torch(model, False),
            "shardir": shardir.load(program, backend=backend),
            "shardir, arena": shardir.load(within, backend=backend),
        }
        if COMPILED:
            variants["torch, compiled"] = by_torch(model, True)
            loaded = shardir.load(program, backend=backend, compile=True)
            variants["shardir, compiled"] = loaded
        expected: list[float] = []
        times: dict[str, list[float]] = {name: [] for name in variants}
        memory: dict[str, dict[str, float]] = {name: {} for name in variants}
        memory["shardir"]["predicted_mb"] = predicted / 1e6
        arena = json.loads((within / "plan.json").read_text())["arena"]["bytes"]
        for variant, step in variants.items():
            losses = [step(tokens, targets).item() for _ in range(3)]
            expected = expected or losses
            torch.testing.assert_close(losses, expected, rtol=TOLERANCE, atol=0)
            log(f"{variant}: losses {losses}")
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before, made = torch.cuda.memory_allocated(), allocations()
                step(tokens, targets)
                peak = torch.cuda.max_memory_allocated() - before
                peak += arena if variant == "shardir, arena" else 0
                memory[variant] |= {"step_mb": peak / 1e6, "allocations": allocations() - made}
        for _ in range(rounds):
            for variant, step in variants.items():
                begun = time.perf_counter()
                for _ in range(STEPS - 1):
                    step(tokens, targets)
                step(tokens, targets).item()  # wait for the device
                times[variant].append((time.perf_counter() - begun) / STEPS * 1e3)
    base = median(times["torch"])
    return [
        {"variant": variant, "median": median(found), "ratio": median(found) / base}
        | memory[variant]
        for variant, found in times.items()
    ]


def allocations() -> int:
    """Return the number of blocks that torch's allocator has given so far."""
    return torch.cuda.memory_stats()["allocation.all.allocated"]
