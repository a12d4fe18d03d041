"""What long passes say while they run: one line on a terminal, which goes away."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shardir.diagnostics import progress_to


@contextmanager
def progress_shown() -> Iterator[None]:
    """Shows how far passes have come, where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status, progress_to(status.update):
        yield
