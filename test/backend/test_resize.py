"""Directories that are compiled for other numbers of ranks, by what they keep of their source."""

import json
import math
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")

import shardir
from shardir.backend.torch.backend import TorchBackend
from shardir.tools import opt

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def plan_of(directory: Path) -> dict:
    return json.loads((directory / "plan.json").read_text())


def axes(directory: Path) -> dict[str, int]:
    return dict(plan_of(directory)["mesh"]["axes"])


def arguments(directory: Path) -> dict:
    """The arguments of each function, without layouts."""
    return {
        name: [{k: v for k, v in arg.items() if k not in ("dims", "partial")} for arg in f["args"]]
        for name, f in plan_of(directory)["functions"].items()
    }


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("digits.ir", ["-p", "train"]),
        ("tokens.ir", ["--mode=auto"]),
        ("presets.ir", ["--mode=semi_auto", "--plan=plan.txt", "--save-strategies=saved"]),
    ],
)
def test_the_same_ranks_give_the_same_program(file, words, tmp_path, monkeypatch):
    """Without the files of the source, in another folder."""
    monkeypatch.chdir(tmp_path)
    for path in EXAMPLES.iterdir():
        if path.stem.startswith(Path(file).stem) or path.suffix == ".bin":
            shutil.copy(path, tmp_path)
    Path("plan.txt").write_text('"up*": [{}, {d}]\n')
    assert opt.main([file, *words, "-t", "torch", "-o", "out"]) == 0
    for path in tmp_path.iterdir():
        if path.is_file():
            path.unlink()
    shutil.move("out", "moved")
    size = math.prod(axes(Path("moved")).values())
    TorchBackend().emit_resized(Path("moved"), size, size, Path("again"))
    assert Path("again/program.py").read_text() == Path("moved/program.py").read_text()
    plans = [plan_of(Path(d)) for d in ("moved", "again")]
    assert [plan.pop("single") for plan in plans] == ["single.py", None]
    assert plans[0] == plans[1]
    for path in Path("moved").glob("data/*"):
        assert path.read_bytes() == Path("again/data", path.name).read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"moved", "again"}


@pytest.mark.parametrize(
    ("file", "pipeline", "before", "after"),
    [
        ("digits.ir", "train", {"dp": 2, "tp": 2}, {"dp": 1, "tp": 2}),
        ("presets.ir", "auto", {"d": 2}, {"d": 1}),
        ("presets.ir", "search-mesh{devices=2},auto", {"a": 2}, {"a": 1}),
    ],
)
def test_half_of_the_ranks(file, pipeline, before, after, tmp_path):
    """The outermost axis is half as long; a search for a mesh finds another. Arguments stay."""
    full, half = (
        shardir.compile_file(EXAMPLES / file, pipeline).save(tmp_path / "full"),
        tmp_path / "half",
    )
    size = math.prod(axes(full).values())
    TorchBackend().emit_resized(full, size // 2, size, half)
    assert (axes(full), axes(half)) == (before, after)
    assert arguments(full) == arguments(half)
