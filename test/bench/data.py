"""A training step that reads its data from files, against the same step on random values.

Three programs on 4 Gloo ranks: tokens, images, and many short rows. Both steps of a program run in
one start of the ranks, in turns; the one that reads takes its inputs as `shard-run` does, ahead of
their use. Its files are read before, so that they are in the system's cache: what is measured is
the work of the ranks, not the disk.
"""

import re
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.programs import gpt, mlp, resnet
from shardir.api.compilation import compile
from shardir.backend.runs import Options
from shardir.backend.torch.launch.measure import times

ROUNDS, TURN, TIMEOUT = 40, 0.5, 300
TOKENS, IMAGES, ROWS = 32 << 20, 2048, 1 << 16
VOCABULARY, IMAGE, WIDTH = 1024, 64, 256
BATCH = {"gpt": 8, "resnet": 32, "mlp": 1024}
"""The samples of a step of each model."""
LAYERS = 2
GPT: dict[str, Any] = {"mesh": (2, 2)}


Program = tuple[str, dict[str, str]]
"""A program with random inputs, and for each input the data that it reads instead."""


def _tokens(folder: Path, random: np.random.Generator) -> Program:
    """A GPT, from a file of 64 MB without a header."""
    random.integers(0, VOCABULARY, TOKENS, dtype=np.uint16).tofile(folder / "tokens.bin")
    file = 'tokens, path = "tokens.bin", type = "u16", shift = '
    text = gpt(layers=LAYERS, batch=BATCH["gpt"], vocab=VOCABULARY, **GPT)
    return text, {"tokens": f"{file}0", "targets": f"{file}1"}


def _images(folder: Path, random: np.random.Generator) -> Program:
    """A narrow ResNet, from images of 49 KB."""
    images = random.normal(size=(IMAGES, 3, IMAGE, IMAGE)).astype(np.float32)
    np.savez(folder / "images.npz", x=images, labels=random.integers(0, 10, IMAGES))
    text = resnet(
        blocks=(1, 1, 1, 1), width=16, batch=BATCH["resnet"], image=IMAGE, classes=10, dp=2, tp=2
    )
    return text, {x: f'file, path = "images.npz", array = "{x}"' for x in ("x", "labels")}


def _rows(folder: Path, random: np.random.Generator) -> Program:
    """Two wide layers, from 1024 rows of 1 KB at a step, and as many of the targets."""
    shape = (ROWS, WIDTH)
    x, target = (random.normal(size=shape).astype(np.float32) for _ in range(2))
    np.savez(folder / "rows.npz", x=x, target=target)
    text = mlp(batch=BATCH["mlp"], dim=WIDTH, hidden=1024, mesh=(2, 2))
    return text, {x: f'file, path = "rows.npz", array = "{x}"' for x in ("x", "target")}


def _reading(text: str, data: dict[str, str]) -> str:
    """Return a program that reads its inputs from files."""
    for name, init in data.items():
        pattern = rf"(%{name}: [^\n]*train\.input = #train\.init<)[^>]*>"
        text, count = re.subn(pattern, lambda match, init=init: f"{match[1]}{init}>", text)
        assert count == 1
    return text


PROGRAMS: dict[str, Callable[[Path, np.random.Generator], Program]] = {
    "tokens": _tokens,
    "images": _images,
    "rows": _rows,
}
SMOKE = {
    "ROUNDS": 1, "TURN": 0.0, "TOKENS": 1 << 12, "VOCABULARY": 16, "LAYERS": 1, "BATCH": {"gpt": 2},
    "GPT": {"mesh": (1, 2), "seq": 8, "hidden": 16, "heads": 2},
    "PROGRAMS": {"tokens": _tokens},
}  # fmt: skip


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"turns of each ({ROUNDS})")


def records(log: Callable[[str], object], rounds: int) -> list[dict[str, Any]]:
    """One record per program: data, random_ms, files_ms,
    ratio (of the medians), lowest and highest (ratios of pairs, in the middle half of them)."""
    with tempfile.TemporaryDirectory() as name:
        folder, directories = Path(name), []
        for kind, write in PROGRAMS.items():
            text, data = write(folder, np.random.default_rng(0))
            for what, one in (("random", text), ("files", _reading(text, data))):
                compiled = compile(one, "train", base_dir=folder)
                directories.append(compiled.save(folder / f"{kind}_{what}"))
        log(f"{len(directories)} programs compiled")
        for path in folder.glob("*_files/data/*"):
            path.read_bytes()
        measured = times(
            directories, rounds, TURN, Options(timeout=TIMEOUT),
            lambda done: log(f"round {done}/{rounds}"),
        )  # fmt: skip
    out = []
    for i, kind in enumerate(PROGRAMS):
        same, files = (measured[2 * i + k]["step"] for k in range(2))
        ratios = sorted(b / a for a, b in zip(same, files, strict=True))
        out.append({
            "data": kind, "random_ms": median(same) * 1e3, "files_ms": median(files) * 1e3,
            "ratio": median(files) / median(same),
            "lowest": ratios[len(ratios) // 4], "highest": ratios[-1 - len(ratios) // 4],
        })  # fmt: skip
    return out
