"""Windows of a dimension: the elements of each, and the devices that hold them.

Window p of a dimension of N elements is [p step + offset, p step + offset + size); elements outside
of the dimension are padding. With the elements and the windows split over the same axes, a device
needs its own elements and a few of its neighbours', the halo.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from shardir.algebra.mesh import shard_bounds


class Run(NamedTuple):
    """Elements [start, stop) on the device at position `holder`."""

    holder: int
    start: int
    stop: int


@dataclass(frozen=True)
class Windows:
    """`count` windows of `size` elements, `step` apart, of a dimension of `rows` elements."""

    rows: int
    count: int
    size: int
    step: int
    offset: int = 0

    def span(self, parts: int, k: int) -> tuple[int, int]:
        """Return the range of elements of part k of the windows, padding included."""
        first, last = shard_bounds(self.count, parts, k)
        start = first * self.step + self.offset
        return start, start + (last - first - 1) * self.step + self.size if last > first else start

    def needed(self, parts: int, k: int) -> tuple[Run, ...]:
        """Return the elements of part k of the windows, in order and without repetition, with their
        holders if the elements are split into `parts` too."""
        return _needed(self, parts, k)

    def count_needed(self, parts: int, k: int, low: int, high: int) -> int:
        """Return the number of elements of [low, high) that part k of the windows needs."""
        first, last = shard_bounds(self.count, parts, k)
        start, stop = self.span(parts, k)
        if self.step <= self.size:
            return max(0, min(high, stop) - max(low, start))

        def below(end: int) -> int:
            full, rest = divmod(max(end - start, 0), self.step)
            return min(full * self.size + min(rest, self.size), (last - first) * self.size)

        return below(high) - below(low)

    def halo(self, parts: int) -> int:
        """Return the maximum number of elements that a device needs from other devices."""
        return _halo(self, parts)


@lru_cache(maxsize=65536)
def _halo(w: Windows, parts: int) -> int:
    shard = max(-(-w.rows // parts), 1)
    return max(
        w.count_needed(parts, k, 0, w.rows)
        - w.count_needed(parts, k, min(k * shard, w.rows), min((k + 1) * shard, w.rows))
        for k in range(parts)
    )


@lru_cache(maxsize=65536)
def _needed(w: Windows, parts: int, k: int) -> tuple[Run, ...]:
    runs: list[Run] = []
    done = 0
    shard = max(-(-w.rows // parts), 1)
    for p in range(*shard_bounds(w.count, parts, k)):
        low = max(p * w.step + w.offset, done, 0)
        high = min(p * w.step + w.offset + w.size, w.rows)
        while low < high:
            holder = low // shard
            stop = min(high, (holder + 1) * shard)
            if runs and runs[-1].holder == holder and runs[-1].stop == low:
                runs[-1] = runs[-1]._replace(stop=stop)
            else:
                runs.append(Run(holder, low, stop))
            low = done = stop
    return tuple(runs)
