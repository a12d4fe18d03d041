"""What a terminal shows: its width, colours, and the progress of long work. It is decided here
alone.

Colours are for terminals. `--color always` or `never` decides first, then NO_COLOR, then
FORCE_COLOR, then TERM=dumb.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from shardir.diagnostics.progress import is_listened_to, progress_to

COLORS = ("auto", "always", "never")

STYLES = {
    "error": "1;31", "warning": "1;33", "note": "1;36", "bold": "1", "dim": "2", "good": "32",
}  # fmt: skip
"""The codes of ANSI escapes."""

WIDTH = 100
"""The columns of what is no terminal."""

NARROWEST = 60

DELAY, PERIOD = 1.0, 5.0
"""The seconds until progress is shown on a terminal, and between its lines elsewhere."""

Paint = Callable[[str, str], str]
"""Returns a text in a style of STYLES."""

_chosen = "auto"


def choose_color(when: str) -> None:
    """Set whether output has colours for the rest of the process, by one of COLORS."""
    global _chosen  # noqa: PLW0603 - a choice for the process, as the environment's
    _chosen = when


def is_terminal(stream: TextIO) -> bool:
    return hasattr(stream, "isatty") and stream.isatty()


def has_color(stream: TextIO) -> bool:
    """Return whether what is written to a stream has colours."""
    if _chosen != "auto":
        return _chosen == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM") != "dumb" and is_terminal(stream)


def plain(text: str, style: str) -> str:
    return text


def colored(text: str, style: str) -> str:
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if text else text


def painter(stream: TextIO) -> Paint:
    """Return the painter of what is written to a stream."""
    return colored if has_color(stream) else plain


def print_error(text: str, tool: str = "", word: str = "error") -> None:
    """Print an error on stderr: what is wrong in the first line, where in indented ones, what to do
    in one that begins with `help:`.

    Args:
        tool: its name, before the word.
        word: `error` or `warning`.
    """
    paint = painter(sys.stderr)
    what, *where = text.split("\n")
    before = f"{tool}: " if tool else ""
    print(f"{before}{paint(f'{word}:', word)} {paint(what, 'bold')}", file=sys.stderr)
    for line in where:
        blank, label, rest = line.partition("help: ")
        if label and not blank.strip():
            print(f"{blank}{paint('help:', 'note')} {rest}", file=sys.stderr)
        else:
            print(paint(line, "dim"), file=sys.stderr)
    sys.stderr.flush()


def width() -> int:
    """Return the columns of the terminal: COLUMNS, or those of the stream that is a terminal, else
    WIDTH; at least NARROWEST."""
    if (columns := os.environ.get("COLUMNS", "")).isdecimal() and int(columns):
        return max(int(columns), NARROWEST)
    for stream in (sys.stderr, sys.stdout):
        try:
            return max(os.get_terminal_size(stream.fileno()).columns, NARROWEST)
        except (OSError, ValueError, AttributeError):  # no terminal, or closed
            continue
    return WIDTH


def console(stream: TextIO, columns: int | None = None) -> Any:
    """Return rich's console for a stream, with our choice of colours.

    Args:
        columns: where the stream is no terminal.
    """
    from rich.console import Console

    return Console(
        file=stream, width=None if is_terminal(stream) else columns, no_color=not has_color(stream),
        force_terminal=True if is_terminal(stream) else None, highlight=False,
    )  # fmt: skip


class Waiting:
    """The name of the present work: after DELAY a line that stays on a terminal; elsewhere, if
    `lines`, a line every PERIOD. It needs no calls while the work goes on."""

    def __init__(self, text: str, stream: TextIO, lines: bool = True):
        self.text, self.stream = text, stream
        self._begun, self._status = time.monotonic(), None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if is_terminal(stream) or lines:
            self._thread = threading.Thread(target=self._show, daemon=True)
            self._thread.start()

    def update(self, text: str) -> None:
        self.text = text

    def stop(self) -> None:
        """Remove the line; nothing is shown afterwards."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _line(self) -> str:
        return f"{self.text}: {time.monotonic() - self._begun:.0f} s"

    def _show(self) -> None:
        if not is_terminal(self.stream):
            while not self._ended.wait(PERIOD):
                print(self._line(), file=self.stream, flush=True)
            return
        if self._ended.wait(DELAY):
            return
        from rich.markup import escape

        with console(self.stream).status(escape(self._line())) as status:
            while not self._ended.wait(0.1):
                status.update(escape(self._line()))


@contextmanager
def progress_shown(text: str, lines: bool = True) -> Iterator[None]:
    """Show on stderr what is reported to `report_progress` within the block, beginning with `text`,
    unless a caller shows it already.

    Args:
        lines: whether it has lines where stderr is no terminal.
    """
    if is_listened_to():
        yield
        return
    waiting = Waiting(text, sys.stderr, lines)
    try:
        with progress_to(waiting.update):
            yield
    finally:
        waiting.stop()


@contextmanager
def counted(text: str, total: int) -> Iterator[Callable[[int], object]]:
    """Yield a function that shows on stderr how many of `total` parts are done: a bar on a
    terminal, else a line each."""
    if not is_terminal(sys.stderr):
        yield lambda done: print(f"{text}: {done} of {total}", file=sys.stderr, flush=True)
        return
    from rich.progress import Progress

    with Progress(console=console(sys.stderr)) as bar:
        task = bar.add_task(text, total=total)
        yield lambda done: bar.update(task, completed=done)
