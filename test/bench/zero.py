"""ZeRO: a training step of a GPT on 4 ranks, by torch's FSDP2 and DDP, by hand, and emitted.

FSDP2 is `fully_shard` of each layer and of the rest, DDP alone and with ZeroRedundancyOptimizer,
all with the fused AdamW; `hand` is a ZeRO-3 with a flat buffer for each layer (`zero_torch.py`);
the others are emitted, by presets and by the mode auto. torch's variants are in four processes with
one thread each, the emitted ones in four others, both for each backend, all in turns of one step,
so that the ratios hold while the machine's speed drifts.
"""

import json
import statistics
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.plans import bare
from bench.programs import gpt
from bench.started import run_groups
from shardir.api.compilation import compile
from shardir.syntax.parser import parse

RANKS, ROUNDS = 4, 21
TIMEOUT = 900
GPT = {"layers": 4, "hidden": 512, "vocab": 2048, "lr": 1e-3, "optimizer": "adamw"}
SIDES = ("torch", "emitted")
"""Of processes (`zero_rank.py`), of each backend."""
BACKENDS: tuple[str, ...] = ("gloo", "shm")
OURS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "ddp": ((4, 1), {"plan": "ddp"}),
    "zero1": ((4, 1), {"plan": "zero1"}),
    "fsdp": ((4, 1), {"plan": "fsdp"}),
    "auto": ((2, 2), {"mode": "auto"}),
}
"""The mesh, dp and tp, and what decides on the layouts."""
SMOKE = {
    "RANKS": 2, "ROUNDS": 1, "GPT": GPT | {"layers": 1, "hidden": 16, "vocab": 32, "seq": 8},
    "BACKENDS": ("gloo",), "OURS": {"fsdp": ((2, 1), {"plan": "fsdp"})},
}  # fmt: skip


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="the steps of each variant")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)


def records(
    log: Callable[[str], object], rounds: int = ROUNDS, backends: Sequence[str] = BACKENDS
) -> list[dict[str, Any]]:
    """One record per variant and backend: ratio, the median of the ratios of each turn to FSDP2 on
    the first; on Gloo collectives and the bytes of the larger side of each, on one rank; the peak
    of the bytes of tensors, and those that remain between steps, on the rank that has most, without
    shared ones; loss_error (relative, against one device); the medians of a step's seconds, and of
    a rank's processor seconds, Gloo's threads included, and pages of memory that the system
    maps."""
    sides = [f"{side} {backend}" for backend in backends for side in SIDES]
    with tempfile.TemporaryDirectory() as folder:
        for name, (mesh, how) in OURS.items():
            module = bare(parse(gpt(mesh=mesh, **GPT)))
            compile(module, name="gpt.ir", **how).save(Path(folder) / name)
        log(f"{len(OURS)} programs compiled")
        outs = [Path(folder) / f"{side}.json" for side in sides]
        groups = [
            [folder, str(out), str(rounds), side, ",".join(sides)]
            for out, side in zip(outs, sides, strict=True)
        ]
        run_groups("zero_rank.py", groups, RANKS, TIMEOUT)
        found = {name: v for out in outs for name, v in json.loads(out.read_text()).items()}
    base = found[f"fsdp2 {backends[0]}"]["seconds"]
    return [
        {
            "variant": name.rpartition(" ")[0],
            "backend": name.rpartition(" ")[2],
            "ratio": statistics.median(a / b for a, b in zip(v["seconds"], base, strict=True)),
            **{k: statistics.median(x) if isinstance(x, list) else x for k, x in v.items()},
        }
        for name, v in found.items()
    ]
