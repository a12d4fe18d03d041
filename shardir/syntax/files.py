"""Files of the tools: atomic writes, reads with clear errors, and temporary folders."""

import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import copyfileobj
from threading import current_thread, main_thread

from shardir.backend.torch.shardir_runtime.data.writing import writing
from shardir.diagnostics import ShardirError
from shardir.syntax.descriptors import keep_from_forks, release

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that end a command."""


def write_text(path: Path, text: str) -> None:
    """Write a text atomically (see `writing`). File names in the text may have any bytes.

    Raises:
        ShardirError: the file can't be written; an existing file is unchanged.
    """
    try:
        with writing(path) as file:
            file.write(text.encode("utf-8", "surrogateescape"))
    except (OSError, ValueError) as e:
        raise ShardirError(f"cannot write {path}: {reason(e)}") from None


def copy_file(source: Path, path: Path) -> None:
    """Copy a file atomically (see `writing`).

    Raises:
        ShardirError: the copy can't be written; an existing file is unchanged.
    """
    try:
        with source.open("rb") as read, writing(path) as file:
            copyfileobj(read, file)
    except (OSError, ValueError) as e:
        raise ShardirError(f"cannot write {path}: {reason(e)}") from None


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ShardirError: the file can't be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as e:
        raise ShardirError(
            f"{path}: expected UTF-8 text, got {e.reason} at byte {e.start}"
        ) from None
    except (OSError, ValueError) as e:
        raise ShardirError(f"{path} cannot be read: {reason(e)}") from None


def reason(e: Exception) -> str:
    """Return the system's message of an OSError, or the text of another error."""
    return (e.strerror if isinstance(e, OSError) else None) or str(e)


@contextmanager
def _defer_signals() -> Iterator[None]:
    """Defer signals to the end of the block. A signal mask does not suffice: the system would
    deliver to another thread, and Python would still run the handler in the main thread."""
    deferred: list[int] = []
    with ExitStack() as handlers:
        for number in ENDS if current_thread() is main_thread() else ():
            if callable(handler := signal.getsignal(number)):
                handlers.callback(signal.signal, number, handler)
                signal.signal(number, lambda n, _: deferred.append(n))
        yield
    for number in deferred:
        signal.raise_signal(number)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new folder, which is removed at the end of the block, or of this process.

    A shell waits for the end of a pipe that only this process holds, so the folder is removed even
    if this process is killed.
    """
    make = tempfile.TemporaryDirectory
    with ExitStack() as stack:
        with _defer_signals():  # so that no folder is created without its cleanup
            folder = stack.enter_context(make(prefix="shardir-", ignore_cleanup_errors=True))
        remove = 'read _; rm -rf -- "$0" || { sleep 1; rm -rf -- "$0"; }'
        guard = subprocess.Popen(
            ["/bin/sh", "-c", remove, folder], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, cwd="/", start_new_session=True,
        )  # fmt: skip
        assert guard.stdin is not None
        keep_from_forks(guard.stdin.fileno())
        try:
            yield Path(folder)
        finally:
            release(guard.stdin.fileno())
            guard.stdin.close()
            guard.wait()
