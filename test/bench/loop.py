"""A step that a loop of the user calls, beside the same step in a run; and the start of its ranks.

4 Gloo ranks on this machine train a perceptron. On ranks, `Trainer.step` of global batches and the
step of a run (`Session.train_step` of shards, with a reading of its loss) take turns. From outside,
the loop of one process calls the ranks. A start is the time from `start()` to the first loss, in
processes that have imported torch, beside the same with FSDP2.
"""

import json
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import shardir
from bench.started import run

RANKS, ROWS, WIDTH, HIDDEN = 4, 64, 256, 1024
ROUNDS, STEPS, STARTS, TIMEOUT = 40, 25, 5, 300
SIDES = "shardir.start", "FSDP2"
SMOKE = {
    "RANKS": 1, "ROWS": 4, "WIDTH": 4, "HIDDEN": 8, "ROUNDS": 1, "STEPS": 2, "STARTS": 1,
    "SIDES": SIDES[:1],
}  # fmt: skip


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"turns of each ({ROUNDS})")


def _on_ranks(folder: Path, *words: Any) -> Any:
    """Return what rank 0 of loop_rank.py has measured."""
    file = folder / "measured.json"
    run("loop_rank.py", [str(file), *map(str, words)], RANKS, TIMEOUT)
    return json.loads(file.read_text())


def _from_outside(program: Any, batch: tuple[torch.Tensor, ...], rounds: int) -> list[float]:
    """Return the seconds of a step in each round, of a loop in this process."""
    seconds = []
    with program.ranks(timeout=TIMEOUT) as trainer:
        trainer.step(*batch)
        for _ in range(rounds):
            begun = time.perf_counter()
            for _ in range(STEPS):
                trainer.step(*batch)
            seconds.append((time.perf_counter() - begun) / STEPS)
    return seconds


def records(log: Callable[[str], object], rounds: int) -> list[dict[str, Any]]:
    """A record of steps: run_ms, loop_ms, ratio (of the medians), lowest and highest (ratios of
    pairs, in the middle half of them), outside_ms. And one of each start: start, seconds, lowest,
    highest."""
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    program = shardir.compile(
        model, batch[0], labels=batch[1], loss=nn.functional.mse_loss, plan="fsdp(dp)",
        optimizer=torch.optim.AdamW(model.parameters()), mesh=f"dp = {RANKS}",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saved = program.save(folder / "program")
        sizes = ROWS, WIDTH, HIDDEN
        in_run, in_loop = _on_ranks(folder, "steps", saved, *sizes, rounds, STEPS)
        log(f"{rounds} rounds on ranks")
        outside = _from_outside(program, batch, rounds)
        log(f"{rounds} rounds from outside")
        starts: dict[str, list[float]] = {side: [] for side in SIDES}
        for number in range(STARTS):
            for side in SIDES:
                starts[side].append(_on_ranks(folder, side, saved, *sizes, 0, 0))
            log(f"start {number + 1}/{STARTS}")
    ratios = sorted(b / a for a, b in zip(in_run, in_loop, strict=True))
    steps = {
        "run_ms": median(in_run) * 1e3, "loop_ms": median(in_loop) * 1e3,
        "ratio": median(in_loop) / median(in_run), "lowest": ratios[len(ratios) // 4],
        "highest": ratios[-1 - len(ratios) // 4], "outside_ms": median(outside) * 1e3,
    }  # fmt: skip
    return [steps, *(
        {"start": side, "seconds": median(x), "lowest": min(x), "highest": max(x)}
        for side, x in starts.items()
    )]  # fmt: skip


def tables(records: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of steps and of starts."""
    return {
        "a step": [r for r in records if "start" not in r],
        "from the start to the first loss": [r for r in records if "start" in r],
    }
