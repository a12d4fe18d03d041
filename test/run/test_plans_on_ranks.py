"""Plans of presets, and those that a search makes within memory, on real ranks: losses and results
are those of one device."""

from io import StringIO
from pathlib import Path

import pytest
from support.extent import extent, long_form

import shardir
from shardir.api.compiled import Compiled
from shardir.backend.runs import Options
from shardir.diagnostics import ShardirError
from shardir.tools import bench

pytest.importorskip("torch")

from shardir.backend.torch.launch.report import Progress, run_and_check
from shardir.backend.torch.launch.start import read_plan

programs, search = bench.load("programs"), bench.load("search")
SIZES = {"layers": 1, "batch": 8, "seq": 16, "hidden": 32, "heads": 4}
TEXT = search.LAYOUT.sub("", programs.gpt(**SIZES, vocab=64, mesh=(2, 2)))


PLANS = ["zero1", "megatron(tp) * fsdp(dp)", "megatron+sequence(tp) * zero1(dp)"]


@pytest.mark.parametrize(
    "plan",
    extent(PLANS[-1:], PLANS),
)
def test_a_plan_trains_as_one_device(plan: str, tmp_path: Path) -> None:
    check(shardir.compile(TEXT, plan=plan), tmp_path / "out")


@long_form
@pytest.mark.parametrize("offload", [False, True])
def test_a_plan_within_memory_trains_as_one_device(offload: bool, tmp_path: Path) -> None:
    """Layouts, and with them ZeRO, recompute and host memory are chosen together."""
    text = search.LAYOUT.sub("", programs.gpt(**SIZES, vocab=64, mesh=(2, 2), optimizer="adamw"))
    fastest = shardir.compile(text, mode="auto").cost().memory
    chosen = shardir.compile(text, mode="auto", recompute=int(0.4 * fastest.peak), offload=offload)
    memory = chosen.cost().memory
    assert memory.peak <= 0.4 * fastest.peak
    assert memory.parts["states"] < fastest.parts["states"]
    assert "recompute" in chosen.text
    check(chosen, tmp_path / "out")


@long_form
def test_a_plan_with_states_on_hosts_trains_as_one_device(tmp_path: Path) -> None:
    """The limit is less than a device needs that has a part of the states."""
    text = search.LAYOUT.sub("", programs.mlp(layers=1, batch=8, dim=16, hidden=32, mesh=(2, 2)))
    text = text.replace("<sgd,", "<adamw,")
    assert "adamw" in text
    with pytest.raises(ShardirError) as e:
        shardir.compile(text, mode="auto", recompute=1000)
    limit = int(str(e.value).split(" got ")[1].split(" B ")[0]) - 1
    chosen = shardir.compile(text, mode="auto", recompute=limit, offload=True)
    assert chosen.cost().memory.peak <= limit
    assert "on host" in chosen.text
    check(chosen, tmp_path / "out")


def check(compiled: Compiled, out: Path) -> None:
    directory = compiled.save(out)
    options, progress = Options(steps=3, timeout=60), Progress("", 3, 3, StringIO())
    _, differences = run_and_check(read_plan(directory, None), options, progress)
    assert differences and all(d.agrees for d in differences), [*map(str, differences)]
