"""Garbage collection, disabled while many objects are made of which few are freed."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_gc() -> Iterator[None]:
    """Disable garbage collection: IR is one live cyclic graph, and the layouts of a search for a
    plan are all retained, so that nothing can be freed.

    Collecting while they grow costs 40% of the time. Afterwards they count as old: the next
    collection of young objects would traverse all of them, which takes 3% of a search.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            if not gc.get_freeze_count():  # what others have frozen stays so
                gc.freeze()
                gc.unfreeze()  # moves all to the oldest generation
            gc.enable()
