"""Data that takes long to compute, retained in files between processes.

    data = retained("everything that the data depends on", compute)

A file is in the user's cache folder, is named by its key, and appears complete. It is JSON with a
digest: damaged data is computed again, and a forged file can only contain wrong data.
"""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

MAX_FILES = 32
"""The maximum number of files; those that were read the longest ago are removed."""

PART = ".part"
"""The suffix of a file while it is written."""


def retained(key: str, compute: Callable[[], Any]) -> Any:
    """Return the data of a key, as JSON values: from its file, or computed."""
    try:
        file = cache_folder() / f"{sha256(key.encode()).hexdigest()[:32]}.json"
    except RuntimeError:  # there is no home directory
        return json.loads(json.dumps(compute()))
    try:
        data = json.loads(_content(file))
        with contextlib.suppress(OSError):  # the folder is read-only
            os.utime(file)
        return data
    except (OSError, ValueError):  # no file, or a damaged one
        data = json.dumps(compute(), separators=(",", ":")).encode()
    with contextlib.suppress(OSError):  # the disk is full, or the folder read-only
        _retain(file, data)
    return json.loads(data)


@cache
def version(package: str) -> str:
    """Return the version of an installed package. Python's own function parses all metadata."""
    installed = distribution(package)
    line = re.search(r"^Version: *(\S+)", installed.read_text("METADATA") or "", re.M)
    return line[1] if line else installed.version


def cache_folder() -> Path:
    """Return the folder of retained files: `shardir` in $XDG_CACHE_HOME, else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "shardir"


def _content(file: Path) -> bytes:
    """Return the JSON text of a file.

    Raises:
        OSError: it cannot be read. ValueError: its digest differs.
    """
    digest, _, data = file.read_bytes().partition(b"\n")
    if sha256(data).hexdigest().encode() != digest:
        raise ValueError(f"{file} is damaged")
    return data


def _retain(file: Path, data: bytes) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, suffix=PART, delete=False) as part:
        try:
            part.write(sha256(data).hexdigest().encode() + b"\n" + data)
            part.flush()
            Path(part.name).replace(file)
        except BaseException:
            os.unlink(part.name)
            raise
    _prune(file.parent)


def _prune(folder: Path) -> None:
    """Remove the files that were read the longest ago. Recent partial files stay: another process
    may be writing them."""
    files = sorted(folder.iterdir(), key=lambda f: f.stat().st_mtime)
    for file in files[:-MAX_FILES]:
        file.unlink(missing_ok=True)
