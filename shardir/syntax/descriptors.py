"""Descriptors whose end another process waits for, although this process may fork.

Workers of a user's DataLoader are forks of this process. They would hold the descriptors too, so
that a rank that reads batches, or a shell that waits to remove a folder, would wait for them.
"""

import os
from contextlib import suppress

_OWN: set[int] = set()


def keep_from_forks(descriptor: int) -> int:
    """Return a descriptor that processes forked from this one will not hold."""
    _OWN.add(descriptor)
    return descriptor


def release(descriptor: int) -> int:
    """Return a descriptor that is about to be closed, or whose number may be another's."""
    _OWN.discard(descriptor)
    return descriptor


def _let_go() -> None:
    """Replace the descriptors in a fork. Their numbers stay in use, since objects have them."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in _OWN:
            os.dup2(null, descriptor, inheritable=False)
        os.close(null)
    _OWN.clear()


os.register_at_fork(after_in_child=_let_go)
