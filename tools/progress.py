"""The progress of long passes: one temporary line on a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shardir.diagnostics import progress_to


@contextmanager
def progress_shown() -> Iterator[None]:
    """Show the progress of passes, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status, progress_to(status.update):
        yield
