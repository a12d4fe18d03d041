"""Arenas on real ranks: a slot whose value is dead is overwritten, and all bits are those of the
program without one."""
# ruff: noqa: E402 (torch may not be installed)

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.extent import extent

torch = pytest.importorskip("torch")

import shardir
from shardir.api.compiled import Compiled
from shardir.backend.runs import Options
from shardir.backend.torch.launch.start import run
from shardir.syntax.parser import parse
from shardir.tools import bench

gpt, bare = bench.load("programs").gpt, bench.load("plans").bare
GPT = {"layers": extent(1, 3), "hidden": 32, "seq": 8, "heads": 4, "vocab": 32, "lr": 1e-3,
       "optimizer": "adamw"}  # fmt: skip
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def fsdp(arena: bool, microbatches: int = 1, **options: Any) -> Compiled:
    text = gpt(mesh=(4, 1), **GPT)
    if microbatches > 1:
        how = f"accumulate <mean, microbatches = {microbatches}>"
        text = re.sub(r"(train\.step .*>)", rf"\1 {how}", text)
    return shardir.compile(bare(parse(text)), plan="fsdp", arena=arena, **options)


def staged(arena: bool) -> Compiled:
    text = (Path(__file__).parents[1] / "filecheck" / "split-stages" / "skip.ir").read_text()
    return shardir.compile(text, "train", arena=arena)


def example(name: str) -> Callable[[bool], Compiled]:
    return lambda arena: shardir.compile_file(EXAMPLES / f"{name}.ir", arena=arena)


PROGRAMS: dict[str, Callable[[bool], Compiled]] = {"fsdp": fsdp} | extent({}, {
    "accumulated": partial(fsdp, microbatches=2), "recomputed": partial(fsdp, recompute="full"),
    "staged": staged, **{name: example(name) for name in (
        "mixed_precision", "offload", "pangu_alpha", "ring_attention", "towers", "ulysses")},
})  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_computes_the_same_in_an_arena(name: str, tmp_path: Path) -> None:
    found = []
    for arena in (False, True):
        directory = PROGRAMS[name](arena).save(tmp_path / str(arena))
        if arena:
            plan = json.loads((directory / "plan.json").read_text())
            plan["arena"]["check"] = True
            (directory / "plan.json").write_text(json.dumps(plan))
            assert "slots." in (directory / "program.py").read_text()
        dump = tmp_path / f"{arena}.npz"
        report = run(directory, Options(timeout=60, steps=2, dump=dump))
        with np.load(dump) as file:
            found.append((report.losses, dict(file)))
    (losses, plain), (others, within) = found
    assert losses == others and plain.keys() == within.keys()
    for key, value in plain.items():
        assert value.tobytes() == within[key].tobytes(), key
