"""Internal errors: unexpected exceptions become one line."""

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
"""Makes the guard of a part of the compiler, by name."""


class InternalError(Exception):
    """An unexpected exception, which is not an error of the input."""


def guard(show_traceback: bool) -> Internal:
    """Return a guard that turns unexpected exceptions into InternalErrors."""

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
            first_line = str(e).split("\n")[0]
            notes = "".join(f" ({n})" for n in getattr(e, "__notes__", ()) if "\n" not in n)
            raise InternalError(f"{part}: {type(e).__name__}: {first_line}{notes}") from e

    return internal
