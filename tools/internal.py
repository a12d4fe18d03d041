"""Internal errors: exceptions that are no errors of the input become one line."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from xdsl.utils.exceptions import DiagnosticException

from shardir.diagnostics import ShardirError

BUG = (
    "this is a bug of shardir, not an error of the input; please report it with {} "
    "(--traceback shows where)"
)

Internal = Callable[[str], AbstractContextManager[None]]
"""A guard of one part of the compiler, by its name."""


class InternalError(Exception):
    """An exception that is no error of the input."""


def guard(show_traceback: bool) -> Internal:
    """Return a guard that turns unexpected exceptions into an InternalError."""

    @contextmanager
    def internal(part: str) -> Iterator[None]:
        try:
            yield
        except (ShardirError, DiagnosticException):
            raise
        except RecursionError:
            raise InternalError(f"{part}: the program nests too deeply") from None
        except Exception as e:
            if show_traceback:
                traceback.print_exc()
            first = str(e).split("\n")[0]
            notes = "".join(f" ({n})" for n in getattr(e, "__notes__", ()) if "\n" not in n)
            raise InternalError(f"{part}: {type(e).__name__}: {first}{notes}") from e

    return internal
