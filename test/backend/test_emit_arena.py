"""Arenas on one device: slots that are live at once are apart, and no bit depends on them."""
# ruff: noqa: E402 (torch may not be installed)

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import shardir
from shardir.api.compiled import Compiled
from shardir.backend.torch.emit.arena import arena_plan
from shardir.backend.torch.emit.program import emitted
from shardir.diagnostics import ShardirError
from shardir.tools import bench

programs = bench.load("programs")


def gpt(microbatches: int = 1) -> str:
    text = programs.gpt(layers=4, mesh=(1, 1), batch=8, seq=16, hidden=32, heads=4, vocab=32)
    how = f"accumulate <mean, microbatches = {microbatches}>"
    return text if microbatches == 1 else re.sub(r"(train\.step .*>)", rf"\1 {how}", text)


def checked(compiled: Compiled, directory: Path) -> Path:
    """Save a program with an arena whose slots are overwritten after their lives."""
    compiled.save(directory)
    plan = json.loads((directory / "plan.json").read_text())
    plan["arena"]["check"] = True
    (directory / "plan.json").write_text(json.dumps(plan))
    return directory


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_slots_that_are_live_at_once_are_apart(recompute: str | None, microbatches: int) -> None:
    """By pairs. Those of layers are live at other times: there is an offset for each layer."""
    compiled = shardir.compile(gpt(microbatches), recompute=recompute)
    arenas = emitted(compiled.module, arena=True).arenas
    assert arenas is not None
    arena = arena_plan(arenas)
    slots = arena["functions"]["step"].values()
    placed = [
        (offset, offset + slot["bytes"], *live)
        for slot in slots for offset, live in zip(slot["offsets"], slot["live"], strict=True)
    ]  # fmt: skip
    for (a, b, first, last), (c, d, start, end) in combinations(placed, 2):
        assert b <= c or d <= a or last < start or end < first
    times = range(max(last for *_, last in placed) + 1)
    live = [sum(-(-(b - a) // 64) * 64 for a, b, f, e in placed if f <= t <= e) for t in times]
    assert max(live) <= arena["bytes"] <= 1.01 * max(live)
    assert arena["bytes"] >= max(end for _, end, *_ in placed)
    assert any(slot["each_run"] and len({*slot["offsets"]}) > 1 for slot in slots)


def attention() -> tuple[torch.nn.Module, torch.Tensor]:
    """A model whose attention has gradients with strides of its own."""
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return model, torch.randn(4, 6, 16)


def test_reshapes_of_values_with_strides_of_their_own(tmp_path: Path) -> None:
    """The gradients of an attention's inputs have other strides than row-major ones, so that a
    reshape may be a view of one: the sums of their rows have the bits of those without an arena."""
    found = []
    for arena in (False, True):
        model, x = attention()
        compiled = shardir.compile(
            model, x, labels=x, loss=torch.nn.MSELoss(), mesh="dp = 1", arena=arena,
            optimizer=torch.optim.AdamW(model.parameters()),
        )  # fmt: skip
        directory = tmp_path / str(arena)
        program = shardir.load(checked(compiled, directory) if arena else compiled.save(directory))
        losses = [program(x, x) for _ in range(3)]
        found.append((losses, program.state_dict()))
    (losses, plain), (others, within) = found
    assert losses == others
    for key, value in plain.items():
        assert torch.equal(value, within[key]), key


def test_what_an_arena_is_not_for(tmp_path: Path) -> None:
    directory = shardir.compile(programs.mlp(mesh=(1, 1)), arena=True).save(tmp_path / "out")
    with pytest.raises(ShardirError, match="expected a program without an arena; compile it with"):
        shardir.load(directory, compile=True)
