"""Arenas on one device: slots that are live at once are apart, and no bit depends on them."""
# ruff: noqa: E402 (torch may not be installed)

import copy
import json
import re
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.extent import extent

torch = pytest.importorskip("torch")

import shardir
from shardir.api.compiled import Compiled
from shardir.backend.torch.backend import TorchBackend
from shardir.backend.torch.emit.arena import arena_plan
from shardir.backend.torch.emit.program import emit
from shardir.backend.torch.measured import ProgramLines
from shardir.backend.torch.shardir_runtime.arena import Arena
from shardir.backend.torch.shardir_runtime.plan.program import PlanError, load_plan
from shardir.diagnostics import ShardirError
from shardir.tools import bench
from shardir.tools import run as tool

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


@pytest.mark.parametrize("recompute", extent([None], [None, "full"]))
@pytest.mark.parametrize("microbatches", [1, 2])
def test_slots_that_are_live_at_once_are_apart(recompute: str | None, microbatches: int) -> None:
    """By pairs. Those of layers are live at other times: there is an offset for each layer."""
    compiled = shardir.compile(gpt(microbatches), recompute=recompute)
    arenas = emit(compiled.module, arena=True).arenas
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


def trained(compiled: Compiled, directory: Path, *batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the states after three steps, and the losses."""
    has_arena = compiled.backend.arena
    directory = checked(compiled, directory) if has_arena else compiled.save(directory)
    program = shardir.load(directory)
    losses = [program(*batch) for _ in range(3)]
    assert ("slots." in (directory / "program.py").read_text()) == has_arena
    return {**program.state_dict(), "losses": torch.tensor(losses)}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


@pytest.mark.parametrize("microbatches", extent([2], [1, 2]))
def test_loops_over_layers_compute_the_same_in_an_arena(microbatches: int, tmp_path: Path) -> None:
    shape = (8, 16) if microbatches == 1 else (microbatches, 8, 16)
    tokens = torch.arange(128 * microbatches, dtype=torch.int32).view(shape) % 32
    plain, within = (
        trained(shardir.compile(gpt(microbatches), arena=arena), tmp_path / str(arena), tokens,
                tokens.flip(-1))
        for arena in (False, True)
    )  # fmt: skip
    assert "for i in range(4):" in (tmp_path / "True" / "program.py").read_text()
    equal(plain, within)


class Attention(torch.nn.Module):
    """An attention of [rows, batch, elements], whose operands have gradients of other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).view(6, 4, 2, 8).permute(1, 2, 0, 3) for f in (self.q, self.k, self.v))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return found.permute(2, 0, 1, 3).reshape(6, 4, 16)


def test_reshapes_of_values_with_strides_of_their_own(tmp_path: Path) -> None:
    """A reshape of such a gradient may be a view. The sums of its rows have the same bits."""
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(6, 4, 16)
    weights = copy.deepcopy(model.state_dict())
    found = []
    for arena in (False, True):
        model.load_state_dict(weights)
        compiled = shardir.compile(
            model, x, labels=x, loss=torch.nn.MSELoss(), mesh="dp = 1", arena=arena,
            optimizer=torch.optim.AdamW(model.parameters()),
        )  # fmt: skip
        found.append(trained(compiled, tmp_path / str(arena), x, x))
    equal(*found)


def test_calls_in_inference_mode_and_others_have_one_arena(tmp_path: Path) -> None:
    text, batch, losses = programs.mlp(mesh=(1, 1), batch=4, dim=8, hidden=16), torch.ones(4, 8), []
    for arena in (False, True):
        program = shardir.load(shardir.compile(text, arena=arena).save(tmp_path / str(arena)))
        with torch.inference_mode():
            first = program(batch, -batch)
        losses.append((first.item(), program(batch, -batch).item()))
    assert losses[0] == losses[1]


def test_what_an_arena_is_not_for(tmp_path: Path) -> None:
    directory = shardir.compile(programs.mlp(mesh=(1, 1)), arena=True).save(tmp_path / "out")
    with pytest.raises(ShardirError, match="expected a program without an arena; compile it with"):
        shardir.load(directory, compile=True)


def test_an_arena_is_an_option_of_a_compilation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is retained where a directory is compiled again, for other ranks or for a trace."""
    source, text = tmp_path / "net.ir", programs.mlp(mesh=(2, 1))
    source.write_text(text)
    options = tool.parser().parse_args([str(source), "--arena"])
    directory = tool._compile(source, options, tmp_path / "out")
    program = (directory / "program.py").read_text()
    assert (
        program
        == shardir.compile_file(source, arena=True).program
        != shardir.compile_file(source).program
    )
    TorchBackend().emit_resized(directory, 1, 2, tmp_path / "one")
    assert "slots." in (tmp_path / "one" / "program.py").read_text()
    plan = load_plan(directory)
    assert plan.arena is not None
    ProgramLines(shardir.compile_file(source).module, arena=True).check(program)
    assert tool.main([str(directory), "--arena"]) == 2
    assert "compiled already; --arena is for an .ir file" in capsys.readouterr().err


@pytest.mark.parametrize(("field", "value"), [
    ("offsets", []), ("offsets", [2]), ("offsets", [-64]), ("offsets", [1 << 40]),
    ("bytes", -1), ("bytes", 1 << 40), ("live", []), ("dtype", "f33"),
])  # fmt: skip
def test_a_slot_that_is_none_is_an_error_of_the_plan(
    field: str, value: object, tmp_path: Path
) -> None:
    directory = shardir.compile(programs.mlp(mesh=(1, 1)), arena=True).save(tmp_path / "out")
    plan = json.loads((directory / "plan.json").read_text())
    name, slot = next(iter(plan["arena"]["functions"]["step"].items()))
    slot[field] = value
    (directory / "plan.json").write_text(json.dumps(plan))
    error = PlanError
    with pytest.raises(error, match=rf"arena.functions.step.{name}.* expected"):
        arena = Arena(str(directory / "program.py"))
        arena.slots(SimpleNamespace(device="cpu"), "step")


def test_a_slot_that_is_missing_is_an_error_of_the_plan(tmp_path: Path) -> None:
    directory = shardir.compile(programs.mlp(mesh=(1, 1)), arena=True).save(tmp_path / "out")
    arena = Arena(str(directory / "program.py"))
    slots = arena.slots(SimpleNamespace(device="cpu"), "step")
    with pytest.raises(PlanError, match="slot nothing, got none"):
        _ = slots.nothing
