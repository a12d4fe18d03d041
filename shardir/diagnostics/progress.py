"""Progress of long passes: they report it here, and the tool around them shows it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_sink: ContextVar[Callable[[str], object] | None] = ContextVar("progress", default=None)


@contextmanager
def progress_to(sink: Callable[[str], object]) -> Iterator[None]:
    """Send the progress that is reported within the block to `sink`."""
    token = _sink.set(sink)
    try:
        yield
    finally:
        _sink.reset(token)


def report_progress(text: str) -> None:
    """Report how far a long pass has come; nothing happens where nobody listens."""
    if (sink := _sink.get()) is not None:
        sink(text)


def is_listened_to() -> bool:
    """Return whether progress that is reported goes anywhere."""
    return _sink.get() is not None
