"""Emitted directories on disk: complete when they appear, and no other files are overwritten."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardir.backend.torch import shardir_runtime
from shardir.rewriting.options import UsageError
from shardir.syntax.files import reason

PLAN, SOURCE = "plan.json", "source.ir"
FILES = {"program.py", "single.py", PLAN, SOURCE}
"""The names of an emitted directory, beside shardir_runtime/, data/*.npy and program_rank*.py."""

RUNTIME = Path(shardir_runtime.__file__).parent
"""The package that programs import; each program has a copy beside it."""


def copy_runtime(folder: Path) -> None:
    """Copy the runtime to a folder, in which programs then run."""
    for path in RUNTIME.rglob("*.py"):  # copytree would report the errors of all files
        copy = folder / RUNTIME.name / path.relative_to(RUNTIME)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Yield a new folder, whose files replace the program in `out` at the end.

    1. A new directory appears at once, with all its files.
    2. An existing directory is empty or has a program. The files of the program are replaced one by
       one, plan.json last, and files that the new program lacks are removed.
    3. All other files in it, such as checkpoints, stay.
    4. After an error before the end, nothing has changed.

    Raises:
        UsageError: `out` exists and is not an emitted program, or cannot be written.
    """
    try:
        out = out.absolute()
        old = _files_of(out)
        folder = out.resolve() if old is not None else out.parent
        folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".shardir.", dir=folder))
    except (OSError, ValueError) as e:
        raise UsageError(f"cannot write {out}: {reason(e)}") from None
    try:
        fresh = work / "new"
        fresh.mkdir()
        yield fresh
        if old is None:
            fresh.rename(out)
        else:
            _replace(folder, old, fresh)
    except OSError as e:
        raise UsageError(f"cannot write {out}: {reason(e)}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _files_of(out: Path) -> set[Path] | None:
    """Return the files of the program in a directory, relative to it; None if there is no
    directory."""
    try:
        out.lstat()
    except FileNotFoundError:
        return None
    if not out.is_dir():
        raise UsageError(f"expected a directory, got the file {out}")
    names = {path.name for path in out.iterdir()}
    if not names:
        return set()
    try:
        plan = json.loads((out / PLAN).read_text(encoding="utf-8"))
        inits = [arg["init"] for f in plan["functions"].values() for arg in f["args"]]
        data = {Path(init["file"]) for init in inits if init["kind"] == "file"}
        data = {path for path in data if path.parent == Path("data") and path.name != ".."}
    except FileNotFoundError:
        raise UsageError(
            f"{out} has other files and no {PLAN}: it is not overwritten; choose another"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(
            f"{out}/{PLAN} is not that of a program: {out} is not overwritten; choose another"
        ) from None
    for name in ("data", RUNTIME.name):
        if (out / name).is_symlink():
            raise UsageError(f"{out}/{name} is a link: {out} is not overwritten; choose another")
    own = {n for n in names if n in FILES or (n.startswith("program_rank") and n.endswith(".py"))}
    runtime = {path.relative_to(out) for path in (out / RUNTIME.name).rglob("*.py")}
    return {*map(Path, own), *data, *runtime}


def _replace(out: Path, old: set[Path], fresh: Path) -> None:
    """Move all files of `fresh` to `out`, and remove the files of `old` that `fresh` lacks."""
    new = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()}
    for path in sorted(new, key=lambda path: (path == Path(PLAN), path)):
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(fresh / path, out / path)
    for path in old - new:
        (out / path).unlink(missing_ok=True)
    data = out / "data"
    if data.is_dir() and not any(data.iterdir()):
        data.rmdir()
    for folder in (out / "__pycache__", *(out / RUNTIME.name).rglob("__pycache__")):
        shutil.rmtree(folder, ignore_errors=True)  # a file's time may be the old one's
