"""Files that are written completely or not at all. This file needs only Python."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` at the end of the block.

    1. After an error `path` is unchanged, and no other file is left.
    2. A new file has the permissions of the umask; a replaced file keeps its own.
    3. The content is written to a new file in the folder, with a random name and no link followed.
       If `path` is a link, it stays, and its target is replaced.
    4. A device or a pipe is written to directly.
    """
    mode = path.stat().st_mode if path.exists() else None
    if mode is not None and not stat.S_ISREG(mode):
        with path.open("wb") as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    if mode is not None and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    fresh = target.with_name(f".shardir.{os.urandom(8).hex()}")
    with fresh.open("xb") as file:
        try:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            yield file
            file.flush()
            os.replace(fresh, target)
        except BaseException:
            with suppress(OSError):
                fresh.unlink()
            raise
