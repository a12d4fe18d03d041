"""Garbage collection, disabled while many long-lived objects are made."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_gc() -> Iterator[None]:
    """Disable garbage collection within a block.

    An IR is one live cyclic graph, and the layouts of a search are all retained, so a collection
    frees nothing. Collecting while they grow costs 40% of the time.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
