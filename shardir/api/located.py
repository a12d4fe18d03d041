"""Errors of passes as errors of a source."""

from collections.abc import Callable
from typing import Any

from shardir.algebra.garbage import no_gc
from shardir.diagnostics import Failure, ParseErrors
from shardir.syntax.source import Source


def run_located(source: Source, work: Callable[[], Any]) -> Any:
    """Run `work`; raise the errors of passes and the emitter as ParseErrors, with their source
    locations."""
    try:
        with no_gc():
            return work()
    except Failure as failure:
        raise ParseErrors(failure.diagnostics(source)) from None
