"""Data that takes long to compute, retained in files from one process to the next.

    data = retained("all that the data depends on", compute)

A file is in the user's cache folder, is named by the key, and appears complete. It is JSON with its
digest, so that damaged data is computed again, and that of somebody else can do no more than be
wrong.
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
"""The files that are retained; the oldest ones are removed."""

PART = ".part"
"""The end of the name of a file that is being written."""


def retained(key: str, compute: Callable[[], Any]) -> Any:
    """Return the data of a key as JSON has it: from its file, or computed."""
    try:
        file = cache_folder() / f"{sha256(key.encode()).hexdigest()[:32]}.json"
    except RuntimeError:  # there is no home directory
        return json.loads(json.dumps(compute()))
    try:
        return json.loads(_content(file))
    except (OSError, ValueError):  # no file, or a damaged one
        data = json.dumps(compute(), separators=(",", ":")).encode()
    with contextlib.suppress(OSError):  # the disk is full, or the folder read-only
        _retain(file, data)
    return json.loads(data)


@cache
def version(package: str) -> str:
    """Return the version of an installed package. Python's own function parses all metadata."""
    found = distribution(package)
    line = re.search(r"^Version: *(\S+)", found.read_text("METADATA") or "", re.M)
    return line[1] if line else found.version


def cache_folder() -> Path:
    """Return the folder of the files: `shardir` in $XDG_CACHE_HOME, else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "shardir"


def _content(file: Path) -> bytes:
    """Return what a file holds.

    Raises:
        OSError: it cannot be read. ValueError: it is not as it was written.
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
    """Remove the oldest files; of an incomplete one another process may be the author."""
    files = sorted(folder.iterdir(), key=lambda f: f.stat().st_mtime)
    for file in files[:-MAX_FILES]:
        file.unlink(missing_ok=True)
