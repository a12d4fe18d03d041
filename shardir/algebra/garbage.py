"""Garbage collection, disabled while many objects are made of which few are freed."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_gc() -> Iterator[None]:
    """Disable garbage collection: IR is one live cyclic graph, and the layouts of a search for a
    plan are all retained, so that nothing can be freed.

    Collecting while they grow costs 40% of the time.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
