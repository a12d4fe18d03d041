"""Emitted directories: what is replaced, and what is not."""

import json
import resource
from pathlib import Path

import numpy as np
import pytest
from support.extent import sampled

import shardir
from shardir.backend.torch import directory
from shardir.diagnostics import ShardirError
from shardir.rewriting.options import UsageError

PROGRAM = """
dist.mesh @m <a = 2>
func.func @f(%x: tensor<4xf32>{attributes}) -> tensor<f32> {{
  %s = nn.reduce <sum> %x dims <0> : (tensor<4xf32>) -> tensor<f32>
  func.return %s : tensor<f32>
}}
"""
PLAIN = PROGRAM.format(attributes="")


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def with_data(tmp_path: Path) -> str:
    np.savez(tmp_path / "x.npz", x=np.ones(4, np.float32))
    init = '#train.init<file, path = "x.npz", array = "x">'
    return PROGRAM.format(attributes=f" {{train.input = {init}}}")


def test_files_of_others_stay_and_stale_ones_of_the_program_go(tmp_path: Path) -> None:
    out, given = tmp_path / "out", with_data(tmp_path)
    shardir.compile(given, base_dir=tmp_path).save(out, per_rank=True)
    old = content(out)
    (data,) = (name for name in old if name.startswith("data/"))
    mine = {"checkpoint.npz": b"1", "data/mine.npy": b"2", "deep/er/x": b"3", "notes.py": b"4"}
    for name, text in mine.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(text)
    inode = out.stat().st_ino
    shardir.compile(PLAIN).save(out)
    fresh = content(shardir.compile(PLAIN).save(tmp_path / "fresh"))
    assert content(out) == fresh | mine
    assert data not in content(out) and "program_rank0.py" in old and out.stat().st_ino == inode
    (out / "data/mine.npy").unlink()
    shardir.compile(given, base_dir=tmp_path).save(out)
    shardir.compile(PLAIN).save(out)
    assert not (out / "data").exists()


@pytest.mark.parametrize("plan", [None, "", "[1]", "{}", '{"functions": {"f": 1}}', "[" * 100_000])
def test_a_folder_of_others_is_not_touched(tmp_path: Path, plan: str | None) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("program.py", "runtime.py"):
        (out / name).write_text("mine")
    if plan is not None:
        (out / "plan.json").write_text(plan)
    before = content(tmp_path)
    with pytest.raises(ShardirError, match="not overwritten; choose another"):
        shardir.compile(PLAIN).save(out)
    assert content(tmp_path) == before and [*tmp_path.iterdir()] == [out]


def test_the_target_of_a_link_is_not_touched(tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    shardir.compile(with_data(tmp_path), base_dir=tmp_path).save(out)
    (out / "data").rename(elsewhere)
    (out / "data").symlink_to(elsewhere)
    before = content(tmp_path)
    with pytest.raises(ShardirError, match=r"data is a link: .* is not overwritten"):
        shardir.compile(PLAIN).save(out)
    assert content(tmp_path) == before


@pytest.mark.parametrize("there", [True, False])
def test_an_error_or_an_interrupt_leaves_all_as_it_was(tmp_path: Path, there: bool) -> None:
    out = tmp_path / "out"
    if there:
        shardir.compile(PLAIN).save(out)
        (out / "mine").write_text("mine")
    before = content(tmp_path)
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt(), SystemExit(143)):
        with pytest.raises((ShardirError, type(error))), directory.replacing(out) as fresh:
            (fresh / "program.py").write_text("half")
            raise error
        assert content(tmp_path) == before and out.exists() == there


def test_the_plan_is_replaced_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So an interrupted replacement can be repeated, wherever it stopped."""
    out = shardir.compile(PLAIN).save(tmp_path / "out")
    wanted = content(shardir.compile(PLAIN.replace("@f", "@g")).save(tmp_path / "wanted"))
    moved = directory.os.replace
    for stop in sampled(range(len(wanted)), 12):
        count = iter(range(stop))

        def replace(source: Path, target: Path, count=count) -> None:
            if next(count, None) is None:
                raise KeyboardInterrupt
            moved(source, target)

        with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
            m.setattr(directory.os, "replace", replace)
            shardir.compile(PLAIN.replace("@f", "@g")).save(out)
        assert list(json.loads((out / "plan.json").read_text())["functions"]) == ["f"]
    shardir.compile(PLAIN.replace("@f", "@g")).save(out)
    assert content(out) == wanted


def test_names_that_no_folder_can_have_are_errors(tmp_path: Path) -> None:
    for name in ("a\0b", "x" * 10_000, "x" * 256):
        with pytest.raises(ShardirError, match="cannot write"):
            shardir.compile(PLAIN).save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [0, 100, 3000])
def test_a_full_disk_is_an_error_of_the_directory(tmp_path: Path, size: int) -> None:
    """Whichever file does not fit, as one that may not grow; nothing is left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises(UsageError, match=f"^cannot write {tmp_path / 'out'}: File too large"):
            shardir.compile(PLAIN).save(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_program_for_each_rank_is_for_few_ranks(tmp_path: Path) -> None:
    """Of more than 1,024 none is written, and nothing else."""
    text = (
        "dist.mesh @m <a = 65536>\n"
        "func.func @f(%x: tensor<8xf32>) -> tensor<8xf32> {\n"
        "  func.return %x : tensor<8xf32>\n}"
    )
    with pytest.raises(ShardirError, match=r"at most 1024 devices for per-rank=true.*got 65536"):
        shardir.compile(text).save(tmp_path / "out", per_rank=True)
    assert not (tmp_path / "out").exists()
