"""The predicted peak of a step is that of the bytes of tensors while its program runs, with loops
over layers of which each keeps something else."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
from support.extent import extent

pytest.importorskip("torch")

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardir
from shardir.tools import bench

GPT = bench.load("programs").gpt(
    layers=5, mesh=(1, 1), batch=8, seq=64, hidden=32, heads=4, vocab=32
)

PART = 0.01
"""The largest difference, relative to the peak: a loop may hold one value until its next run."""


class Peak(TorchDispatchMode):
    """The peak of the bytes of the storages that are made under it, and their number."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, Any] = {}
        self.live = self.peak = self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.see(x.untyped_storage())
        return out

    def see(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self.alive:
            size = storage.nbytes()
            self.alive[key] = weakref.ref(storage, lambda _: self.forget(key, size))
            self.live += size
            self.made += 1
            self.peak = max(self.peak, self.live)

    def forget(self, key: int, size: int) -> None:
        self.live -= size
        del self.alive[key]


@pytest.mark.parametrize("recompute", extent(["0.7"], [None, "full", "dots", "0.7", "0.5"]))
def test_the_predicted_peak_is_measured(recompute: str | None, tmp_path: Path):
    compiled = shardir.compile(GPT, recompute=recompute)
    (directory := tmp_path / "program").mkdir()
    with Peak() as peak:
        program = shardir.load(compiled.save(directory))
        tokens = torch.zeros(8, 64, dtype=torch.int32)
        for _ in range(2):
            peak.peak = peak.live
            program(tokens, tokens.clone())
    predicted = compiled.cost().memory.peak
    assert peak.peak == pytest.approx(predicted, rel=PART)
    text = (directory / "program.py").read_text()
    assert "for i in range(" in text


def test_the_peak_is_known_before_the_run(tmp_path: Path) -> None:
    """An MLP has all values but scalars in its arena: a step makes storages for those alone."""
    compiled = shardir.compile(
        bench.load("programs").mlp(mesh=(1, 1), batch=32, hidden=256), arena=True
    )
    with Peak() as seen:
        program = shardir.load(compiled.save(tmp_path / "out"))
        held = seen.live
        x = torch.randn(32, 256)
        for _ in range(2):
            seen.peak, seen.made = seen.live, 0
            program(x, x)
    arena = json.loads((tmp_path / "out" / "plan.json").read_text())["arena"]
    values = x.nbytes  # both inputs, which is memory of the caller
    assert seen.peak == pytest.approx(held + values + arena["bytes"] + arena["others"], rel=0.005)
    assert seen.made <= 5 and arena["others"] < 100
