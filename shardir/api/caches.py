"""What a process retains between compilations, bounded.

Results that follow from types, layouts and meshes are cached in the process, since most programs
share them. One that compiles many programs would retain those of all: 0.2 MB for a small one.
"""

import sys
from collections.abc import Iterator
from functools import _lru_cache_wrapper
from itertools import count
from typing import Any

from shardir.dialects.signatures import forget_signatures, number_of_signatures

MAX_ENTRIES = 50_000
"""The number of entries, of some 0.5 KB each, beyond which all are dropped."""

EVERY = 16
"""The number of compilations after which entries are counted: of a large program that is compiled
again and again, most compilations find theirs."""

_compilations = count(1)


def bound_caches() -> None:
    """Begin a compilation: drop all entries if they are too many."""
    if next(_compilations) % EVERY == 0 and number_of_entries() > MAX_ENTRIES:
        drop_caches()


def number_of_entries() -> int:
    """Return the number of cached results in this process."""
    return number_of_signatures() + sum(c.cache_info().currsize for c in _caches())


def drop_caches() -> None:
    """Drop all cached results; they are computed again where they are needed."""
    forget_signatures()
    for cached in _caches():
        cached.cache_clear()


def _caches() -> Iterator["_lru_cache_wrapper[Any]"]:
    """Yield the functions and methods of shardir whose results are cached, up to some number. Those
    without a bound have an entry for each class of ops, or one."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "shardir":
            continue
        for value in list(vars(module).values()):
            if getattr(value, "__module__", None) != name:
                continue
            for f in vars(value).values() if isinstance(value, type) else (value,):
                if isinstance(f, _lru_cache_wrapper) and f.cache_info().maxsize is not None:
                    yield f
