"""Plans of presets on real ranks: losses and results are those of one device."""

from io import StringIO
from pathlib import Path

import pytest

import shardir
from shardir.backend.runs import Options
from shardir.tools import bench

pytest.importorskip("torch")

from shardir.backend.torch.launch.report import Progress, run_and_check
from shardir.backend.torch.launch.start import read_plan

programs, search = bench.load("programs"), bench.load("search")
SIZES = {"layers": 1, "batch": 8, "seq": 16, "hidden": 32, "heads": 4}


@pytest.mark.parametrize(
    "plan", ["zero1", "megatron(tp) * fsdp(dp)", "megatron+sequence(tp) * zero1(dp)"]
)
def test_a_plan_trains_as_one_device(plan: str, tmp_path: Path) -> None:
    text = search.LAYOUT.sub("", programs.gpt(**SIZES, vocab=64, mesh=(2, 2)))
    directory = shardir.compile(text, plan=plan).save(tmp_path / "out")
    options, progress = Options(steps=3, timeout=60), Progress("", 3, 3, StringIO())
    _, differences = run_and_check(read_plan(directory, None), options, progress)
    assert differences and all(d.agrees for d in differences), [*map(str, differences)]
