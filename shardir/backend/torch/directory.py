"""Emitted directories on disk, written atomically: beside their path, and then moved there."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardir.backend.torch.runtime import RUNTIME_FILES
from shardir.diagnostics import ShardirError


def _is_ours(name: str) -> bool:
    """Whether a file of an emitted directory is replaced with it."""
    known = {*RUNTIME_FILES, "program.py", "single.py", "plan.json", "data", "__pycache__"}
    return name in known or (name.startswith("program_rank") and name.endswith(".py"))


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Yield a new folder, which replaces `out` at the end. Other files of an earlier one, such as
    checkpoints, stay.

    Raises:
        ShardirError: `out` exists and is not an emitted program, or cannot be written.
    """
    out = out.absolute()
    if out.is_symlink():
        out = out.resolve()
    if out.exists() and not out.is_dir():
        raise ShardirError(f"{out} is a file, not a directory")
    old = sorted(out.iterdir()) if out.exists() else []
    if old and not (out / "plan.json").is_file():
        raise ShardirError(
            f"{out} has other files and no plan.json: it is not overwritten; choose another"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise ShardirError(f"{out} cannot be written: {error}") from None
    fresh, aside = work / "new", work / "old"
    try:
        fresh.mkdir()
        yield fresh
        if not out.exists():
            fresh.rename(out)
            return
        out.rename(aside)
        try:
            fresh.rename(out)
        except BaseException:
            aside.rename(out)
            raise
        for path in old:
            if not _is_ours(path.name):
                (aside / path.name).rename(out / path.name)
    except OSError as error:
        raise ShardirError(f"{out} cannot be written: {error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
