"""Arenas: a step with its values in one block at planned offsets, beside the same one without.

A GPT (4 layers, width 512, sequence 128, batch 8, vocabulary 2,048) by presets and an MLP of 8
layers of 1,024, on 4 Gloo ranks of one thread. Both forms of a program take turns of one step in
the same processes.
"""

import json
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bench.plans import bare
from bench.programs import gpt, mlp
from bench.started import run
from shardir.api.compilation import compile
from shardir.syntax.parser import parse

RANKS, ROUNDS = 4, 21
TIMEOUT = 900
GPT = {"layers": 4, "hidden": 512, "vocab": 2048, "lr": 1e-3, "optimizer": "adamw"}
PROGRAMS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "gpt ddp": lambda: (bare(parse(gpt(mesh=(4, 1), **GPT))), {"plan": "ddp"}),
    "gpt fsdp": lambda: (bare(parse(gpt(mesh=(4, 1), **GPT))), {"plan": "fsdp"}),
    "gpt tp": lambda: (gpt(mesh=(2, 2), **GPT), {}),
    "mlp tp": lambda: (mlp(mesh=(2, 2), layers=8, batch=512, hidden=1024), {}),
}
"""A module and what decides on its layouts."""
SMOKE = {
    "RANKS": 2, "ROUNDS": 1,
    "PROGRAMS": {"mlp tp": lambda: (mlp(mesh=(1, 2), batch=8, dim=8, hidden=8), {})},
}  # fmt: skip


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="the steps of each form")


def records(log: Callable[[str], object], rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """One record per program: the bytes of the arena and the lower bound on them; `share`, of the
    bytes that a step makes those in it; `predicted_mb`, what a rank holds between steps, the arena
    and the most of others, beside the measured peak of living tensors with it and without;
    storages that a step makes and pages that the system maps, both ways; and the median ratios of
    seconds and processor seconds to the form without it."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        places = {}
        for i, (name, make) in enumerate(PROGRAMS.items()):
            places[name] = Path(folder) / str(i)
            for form in ("plain", "arena"):
                module, how = make()
                compiled = compile(module, arena=form == "arena", **how)
                compiled.save(places[name] / form)
        log(f"{len(places)} programs compiled")
        for name, place in places.items():
            run("arena_rank.py", [str(place), str(place / "out.json"), str(rounds)], RANKS, TIMEOUT)
            found.append(record(name, place))
            log(f"{name}: done")
    return found


def record(name: str, place: Path) -> dict[str, Any]:
    """Return the record of a program from what its ranks have measured."""
    plan = json.loads((place / "arena" / "plan.json").read_text())["arena"]
    forms = json.loads((place / "out.json").read_text())
    plain, arena = forms["plain"], forms["arena"]
    if arena["losses"] != plain["losses"]:
        raise SystemExit(f"error: {name}: expected equal losses, got {arena['losses']}")
    ratios = {
        f"{kind}_ratio": median(a / b for a, b in zip(arena[kind], plain[kind], strict=True))
        for kind in ("seconds", "cpu_seconds")
    }
    return {
        "program": name,
        "arena_mb": plan["bytes"] / 1e6,
        "others_mb": plan["others"] / 1e6,
        "predicted_mb": (plain["kept_bytes"] + plan["bytes"] + plan["others"]) / 1e6,
        "peak_mb": arena["peak_bytes"] / 1e6,
        "plain_peak_mb": plain["peak_bytes"] / 1e6,
        "storages": arena["storages"],
        "plain_storages": plain["storages"],
        "pages": median(arena["pages"]),
        "plain_pages": median(plain["pages"]),
        "seconds": median(arena["seconds"]),
        **ratios,
    }
