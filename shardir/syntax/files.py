"""Atomic writes of text files: the new content, or the old one."""

import os
import tempfile
from pathlib import Path

from shardir.diagnostics import ShardirError


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, replacing an existing one. A device or a pipe is written to
    directly.

    Raises:
        ShardirError: it can't be written; an existing file is unchanged.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        handle, fresh = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as f:
                f.write(text)
            os.chmod(fresh, 0o644)
            os.replace(fresh, path)
        except OSError:
            os.unlink(fresh)
            raise
    except OSError as e:
        raise ShardirError(f"cannot write {path}: {e.strerror or e}") from None


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ShardirError: it can't be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise ShardirError(f"{path} cannot be read: {e.strerror or e}") from None
    except UnicodeDecodeError as e:
        raise ShardirError(
            f"{path}: expected UTF-8 text, got {e.reason} at byte {e.start}"
        ) from None
