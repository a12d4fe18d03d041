"""The memory that redistributions need while they run.

[{a}, {}] -> [{}, {a}]      the operand, the blocks to send, those received, the result
by way of [{}, {}]          the largest of its moves
"""

from collections.abc import Sequence
from functools import lru_cache
from math import inf

import numpy as np
from xdsl.dialects.builtin import TensorType

from shardir.algebra.arrays import Indices, Table
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Mesh
from shardir.algebra.redistribution import plan
from shardir.algebra.retained import RetainedTables
from shardir.algebra.routes import Routes, routes
from shardir.algebra.steps import elements, step_memory
from shardir.dialects.nn.types import itemsize


def transfer_peaks(
    mesh: Mesh, t: TensorType, sources: Sequence[Layout], targets: Sequence[Layout]
) -> Table:
    """Return the most bytes that a device needs at once during the planned redistribution from each
    source to each target, operand and result among them: [source, target]; 0 between equal ones."""
    shape, size = t.get_shape(), itemsize(t)
    found = np.full((len(sources), len(targets)), inf)
    for reduction in {l.reduction for l in (*sources, *targets)}:
        known = _route_peaks(mesh, len(shape), reduction)
        if known is not None:
            rows, columns = (known.even(shape, some) for some in (sources, targets))
            among = np.ix_([*rows], [*columns])
            peaks = known.of(shape, size, [*rows.values()], [*columns.values()])
            found[among] = np.minimum(found[among], peaks)
    for i, j in np.argwhere(np.isinf(found)):
        found[i, j] = _planned_peak(mesh, shape, sources[i], targets[j], size)
    return found * size


def _planned_peak(mesh: Mesh, shape: Shape, now: Layout, target: Layout, size: int) -> int:
    """Return the most elements during a redistribution that is not in a table."""
    found = 0
    for step in plan(shape, mesh, now, target, size) if now != target else ():
        needed, _ = step_memory(mesh, shape, now, step, elements(mesh, shape, now))
        found, now = max(found, needed), step.layout
    return found


@lru_cache(maxsize=256)
def _route_peaks(mesh: Mesh, rank: int, reduction: str) -> "_RoutePeaks | None":
    found = routes(mesh, rank, reduction)
    return _RoutePeaks(found) if found else None


class _RoutePeaks:
    """The memory of the paths between the layouts of a table."""

    def __init__(self, found: Routes):
        self.routes = found
        self._needed = RetainedTables[tuple[Table]]()

    def even(self, shape: Shape, layouts: Sequence[Layout]) -> dict[int, int]:
        """Return the places of those layouts that are in the table and split the tensor evenly,
        each with its number there."""
        numbers, even = self.routes.index, self.routes.even(shape)
        known = ((i, numbers[l]) for i, l in enumerate(layouts) if l in numbers)
        return {i: k for i, k in known if even[k]}

    def of(self, shape: Shape, size: int, sources: list[int], targets: list[int]) -> Table:
        """Return the most elements during each path. Of an operand that is retained only those
        count that its move reads."""
        _, via = self.routes.paths(shape, size)
        to = np.array(targets, dtype=np.int64)
        now = np.repeat(np.array(sources, dtype=np.int64)[:, None], len(to), axis=1)
        found = np.zeros(now.shape)
        while (now != to).any():
            then = via[now, to].astype(np.int64)
            found = np.maximum(found, self._moves(shape, size, now, then))
            now = then
        return found

    def _moves(self, shape: Shape, size: int, now: Indices, then: Indices) -> Table:
        """Return the most elements during moves between layouts of these numbers."""
        (known,) = self._needed.get((shape, size), self._unknown)
        new = np.isnan(known[now, then])
        for i, j in {*zip(now[new].tolist(), then[new].tolist(), strict=True)}:
            mesh, before = self.routes.mesh, self.routes.layouts[i]
            step = self.routes.step(shape, size, i, j)
            known[i, j], _ = step_memory(mesh, shape, before, step, elements(mesh, shape, before))
        return known[now, then]

    def _unknown(self) -> tuple[Table]:
        """Return a table of moves of which only those that change nothing are known."""
        n = len(self.routes.layouts)
        found = np.full((n, n), np.nan)
        np.fill_diagonal(found, 0.0)
        return (found,)
