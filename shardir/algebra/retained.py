"""Tables that are made once for each tensor, and retained up to a number of bytes.

Programs have few shapes, but a process may plan many: of layouts between which there are 31,000
paths (176 of them) the tables of one shape have 0.6 MB.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

T = TypeVar("T", bound=tuple[np.ndarray[Any, Any], ...])

MAX_BYTES = 2**28
"""The bytes of all retained tables, at most: those of 80 shapes with 400 layouts each."""


class RetainedTables(Generic[T]):
    """Some tables for each key. All objects of this class share MAX_BYTES; what was used last is
    retained, the last one however large it is."""

    _last: ClassVar["OrderedDict[tuple[RetainedTables[Any], Hashable], int]"] = OrderedDict()
    """The bytes of each entry of all objects, that used last at the end."""
    _bytes: ClassVar[int] = 0
    _lock: ClassVar[Lock] = Lock()
    """Of the two above and of what is found, but not of what makes tables."""

    def __init__(self):
        self._found: dict[Hashable, T] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._found

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the tables of a key, made if they are not there."""
        every = RetainedTables
        with every._lock:
            if (found := self._found.get(key)) is not None:
                every._last.move_to_end((self, key))
                return found
        made = make()
        with every._lock:
            if (found := self._found.get(key)) is not None:  # by another thread, meanwhile
                return found
            self._found[key] = made
            every._last[self, key] = sum(table.nbytes for table in made)
            every._bytes += every._last[self, key]
            while every._bytes > MAX_BYTES and len(every._last) > 1:
                (owner, old), freed = every._last.popitem(last=False)
                every._bytes -= freed
                del owner._found[old]
        return made
