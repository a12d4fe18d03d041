"""Tables that are computed once for each key, and retained in least-recently-used order.

A program has few shapes, but a process may plan many programs. The tables of one shape have 0.6 MB
for 176 layouts, between which there are 31,000 paths.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

T = TypeVar("T", bound=tuple[np.ndarray[Any, Any], ...])

MAX_BYTES = 2**28
"""Bounds the bytes of all retained tables: 256 MB, enough for 80 shapes with 400 layouts each."""


class RetainedTables(Generic[T]):
    """A cache of tables. All objects of this class share MAX_BYTES, and evict the least recently
    used entry; the last entry stays, however large it is."""

    _last: ClassVar["OrderedDict[tuple[RetainedTables[Any], Hashable], int]"] = OrderedDict()
    """The bytes of each entry of all objects, the most recently used last."""
    _bytes: ClassVar[int] = 0
    _lock: ClassVar[Lock] = Lock()
    """Guards all fields; not held while tables are computed."""

    def __init__(self):
        self._tables: dict[Hashable, T] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._tables

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the tables of a key; compute them with `make` if there are none."""
        shared = RetainedTables
        with shared._lock:
            if (retained := self._tables.get(key)) is not None:
                shared._last.move_to_end((self, key))
                return retained
        tables = make()
        with shared._lock:
            if (retained := self._tables.get(key)) is not None:  # of another thread, meanwhile
                return retained
            self._tables[key] = tables
            shared._last[self, key] = sum(table.nbytes for table in tables)
            shared._bytes += shared._last[self, key]
            while shared._bytes > MAX_BYTES and len(shared._last) > 1:
                (owner, old), freed = shared._last.popitem(last=False)
                shared._bytes -= freed
                del owner._tables[old]
        return tables
