"""Files that the tools write: complete or as before, with the permissions of others."""

import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardir.backend.torch.shardir_runtime.data.writing import writing
from shardir.diagnostics import ShardirError
from shardir.syntax.files import read_text, scratch_folder, write_text


@pytest.fixture(params=[0o022, 0o077, 0o002, 0o000])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_permissions_are_those_of_the_umask_or_of_the_earlier_file(
    tmp_path: Path, umask: int
) -> None:
    path = tmp_path / "f"
    write_text(path, "one")
    assert mode(path) == 0o666 & ~umask
    for earlier in (0o640, 0o755, 0o600):
        path.chmod(earlier)
        write_text(path, "two")
        assert mode(path) == earlier


def test_links_stay_and_their_targets_are_written(tmp_path: Path) -> None:
    """Also one that names no file yet, and a link to a link, relative to its own folder."""
    (tmp_path / "deep").mkdir()
    for name, target in (("a", "deep/x"), ("b", "a"), ("c", "deep/y")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "deep/x").write_text("old")
    for name, target in (("a", "x"), ("b", "x"), ("c", "y")):
        write_text(tmp_path / name, name)
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "deep" / target).read_text() == name
    assert {p.name for p in (tmp_path / "deep").iterdir()} == {"x", "y"}


@pytest.mark.parametrize("old", [None, "old"])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), SystemExit(1)]
)
def test_after_an_error_all_is_as_before(
    tmp_path: Path, old: str | None, error: BaseException
) -> None:
    path = tmp_path / "f"
    if old is not None:
        path.write_text(old)
    before = {p.name: p.read_text() for p in tmp_path.iterdir()}
    with pytest.raises(type(error)), writing(path) as file:
        file.write(b"half")
        file.flush()
        assert {p.name: p.read_text() for p in tmp_path.iterdir() if p == path} == before
        raise error
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == before


def test_no_file_of_a_foreseeable_name_is_written(tmp_path: Path) -> None:
    """Neither `FILE.part` nor any other that was there, be it a link to a file of value."""
    value = tmp_path / "value"
    value.write_text("mine")
    for name in ("f.part", ".f", "f~", "f.tmp", f"f.{os.getpid()}"):
        (tmp_path / name).symlink_to(value)
    write_text(tmp_path / "f", "text")
    assert value.read_text() == "mine" and (tmp_path / "f").read_text() == "text"


def test_names_that_no_file_can_have_are_errors(tmp_path: Path) -> None:
    for name in ("a\0b", "x" * 10_000, "x" * 256, "no/where", "."):
        with pytest.raises(ShardirError, match="cannot write"):
            write_text(tmp_path / name, "text")
        with pytest.raises(ShardirError, match="cannot be read"):
            read_text(tmp_path / name)
    write_text(tmp_path / os.fsdecode(b"\xff" + b"y" * 254), os.fsdecode(b"\xff"))
    (only,) = tmp_path.iterdir()
    assert only.read_bytes() == b"\xff"


def test_devices_are_written_to(tmp_path: Path) -> None:
    write_text(Path("/dev/null"), "text")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(ShardirError, match="No space left on device"):
        write_text(Path("/dev/full"), "text")


@pytest.mark.parametrize("file", [True, False], ids=["a trial file", "the folder"])
def test_an_interrupt_while_a_scratch_folder_is_made_leaves_nothing(
    file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python tries by a file of its own whether the folder for temporary files can be written."""

    module, name = (os, "open") if file else (tempfile, "mkdtemp")
    make = getattr(module, name)

    def interrupted(*args, **_):
        monkeypatch.setattr(module, name, make)
        made = make(*args)
        os.kill(os.getpid(), signal.SIGINT)
        return made

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(module, name, interrupted)
    with pytest.raises(KeyboardInterrupt), scratch_folder():
        raise AssertionError("the interrupt came too late")
    assert not [*tmp_path.iterdir()]


def test_a_scratch_folder_is_removed_also_if_its_process_is_killed() -> None:
    program = """
import sys, time
from shardir.syntax.files import scratch_folder
with scratch_folder() as folder:
    (folder / "file").write_text("x")
    print(folder, flush=True)
    time.sleep(100) if sys.argv[1] == "stay" else None
"""
    for word in ("stay", "go"):
        process = subprocess.Popen(
            [sys.executable, "-c", program, word], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        if word == "stay":
            assert (folder / "file").is_file()
            process.kill()
        process.communicate(timeout=60)
        until = time.monotonic() + 30
        while folder.exists():
            assert time.monotonic() < until
            time.sleep(0.01)
