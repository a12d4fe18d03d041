"""shard-calibrate and what measures, on real ranks."""

from pathlib import Path

import pytest
from support.extent import long_form

pytest.importorskip("torch")

import shardir
from shardir.backend.runs import LaunchError, Options, RunError
from shardir.backend.torch.launch.measure import times
from shardir.cost import clusters
from shardir.tools import calibrate
from shardir.tools.opt import main as shard_opt

PROGRAM = """dist.mesh @m <a = {a}>
#rows = #dist.layout<@m, [{{a}}, {{}}]>
func.func @f(%x: tensor<8x4xf32, #rows> {{train.input = #train.init<normal>}}) -> tensor<4xf32> {{
  %y = nn.reduce <sum> %x dims <0> : (tensor<8x4xf32, #rows>) -> tensor<4xf32>
  func.return %y : tensor<4xf32>
}}
"""


@long_form
@pytest.mark.started_ranks
def test_two_ranks_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiny sizes, on a machine without other load: a complete file is written, and a program can be
    priced by it. The ranks are started, and end, as those of a user."""
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    path, program = tmp_path / "here.ir", tmp_path / "p.ir"
    flags = ["--ranks", "2", "--most", "4096", "--rounds", "2", "--turn", "0.001"]
    assert calibrate.main([*flags, "--name", "mine", "-o", str(path)]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here.ir"]
    assert "round 2/2" in capsys.readouterr().err
    text = path.read_text()
    assert "dist.cluster @mine <levels [machine = 2 " in text
    assert "2 ranks on gloo" in text and "all_reduce:" in text and "beta1 = " in text
    cluster = clusters.load(path)
    assert cluster.units == (2,) and cluster.levels[0].latency > 0
    program.write_text(PROGRAM.format(a=2))
    assert shard_opt([str(program), "-p", "train", f"--cost={path}"]) == 0
    assert "all_reduce" in capsys.readouterr().err


def test_one_rank_has_the_links_of_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    path, links = tmp_path / "here.ir", clusters.load("h200")
    flags = ["--ranks", "1", "--most", "4096", "--rounds", "2", "--turn", "0.001"]
    assert calibrate.main([*flags, "--links", "h200", "-o", str(path)]) == 0
    found = clusters.load(path)
    assert (found.levels, found.host, found.skew) == (links.levels, links.host, links.skew)
    assert found.collectives == links.collectives and found.interference == links.interference
    assert found.memory_bandwidth != links.memory_bandwidth and dict(found.ops)["nn.gelu"] > 0
    assert "beta1" not in path.read_text()


def test_programs_are_measured_together(tmp_path: Path) -> None:
    """Two programs on meshes of other axes, one of them with a function whose name the program
    text needs itself; and a third that fails: its rank is named."""
    one = shardir.compile(PROGRAM.format(a=2)).save(tmp_path / "one")
    text = PROGRAM.format(a=2).replace("<a =", "<b = 1, a =").replace("@f(", "@rt(")
    other = shardir.compile(text).save(tmp_path / "other")
    heard: list[int] = []
    found = times([one, other], 3, 0.001, Options(timeout=60), heard.append)
    assert heard == [1, 2, 3]
    assert [list(f) for f in found] == [["f"], ["rt"]]
    assert all(len(s) == 3 and min(s) > 0 for f in found for s in f.values())
    (other / "program.py").write_text("def rt_1(mesh, x):\n    raise ValueError('no such luck')\n")
    with pytest.raises(RunError, match=r"rank . failed: ValueError: no such luck"):
        times([one, other], 1, 0.001, Options(timeout=60))
    four = shardir.compile(PROGRAM.format(a=4)).save(tmp_path / "four")
    with pytest.raises(LaunchError, match=r"programs for \[2, 4\] ranks cannot be measured"):
        times([one, four], 1, 0.001, Options())
