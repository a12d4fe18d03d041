"""The bytes that live while one op runs: redistributed copies, and what redistributions need.

before an op    the copies of its operands, made one after the other: during one of them also
                its buffers and the layouts on the way, beside operand and copy
after it        the copy of its result
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from xdsl.dialects.builtin import TensorType

from shardir.algebra.arrays import Table
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.analysis.storages import Span
from shardir.search.graph.live_bytes import shard_bytes
from shardir.search.graph.transfer_peaks import transfer_peaks
from shardir.search.graph.value_layouts import ValueLayouts
from shardir.search.problem.memory import LiveBytes

Copies = Sequence[tuple[Layout, ...]]
"""The layouts in which each candidate of an op needs a value, or the one in which it makes it."""


class Transients:
    """The transients of a graph: of `copies`, and of `buffers`, each with the number of the
    redistribution among those of its op.

    Args:
        table: returns the table of a key, made once.
    """

    def __init__(self, mesh: Mesh, table: Callable[[tuple, Callable[[], Table]], Table]):
        self.mesh, self.table = mesh, table
        self.copies: list[LiveBytes] = []
        self.buffers: list[tuple[int, LiveBytes]] = []
        self._buffers_at = Counter[int]()

    def add(
        self, at: int, ends: tuple[int, int], key: tuple, t: TensorType,
        copies: Callable[[], Copies], layouts: ValueLayouts, made: bool = False,
    ) -> None:  # fmt: skip
        """Add those of the redistributions from the layouts of a value to the copies that the op at
        a position needs; `made`: from the copies to the layouts, of its result.

        Args:
            ends: the variables: of the op and of the layouts if `made`, else the reverse.
            key: of the tables.
        """

        def turned(table: Table) -> Table:
            return table if made else table.T

        span = Span(at, at)
        held = self.table(("copies", *key), lambda: turned(self._copies(t, copies(), layouts)))
        self.copies.append(LiveBytes(ends, held, span))
        more = self.table(
            ("buffers", *key), lambda: turned(self._buffers(t, copies(), layouts, made))
        )
        if more.any():
            self._buffers_at[at] += 1
            self.buffers.append((self._buffers_at[at], LiveBytes(ends, more, span)))

    def _copies(self, t: TensorType, copies: Copies, layouts: ValueLayouts) -> Table:
        """Return the bytes of redistributed copies of a value: [copies, layout]."""
        dims = [layout.dims for layout in layouts]
        held: dict[Layout, Table] = {}
        for copy in dict.fromkeys(l for ls in copies for l in ls):
            size = float(shard_bytes(t, copy, self.mesh))
            held[copy] = np.array([0.0 if copy.dims == d else size for d in dims])
        return np.array([sum(held[l] for l in ls) for ls in copies])

    def _buffers(self, t: TensorType, copies: Copies, layouts: ValueLayouts, made: bool) -> Table:
        """Return the bytes beside value and copy during the redistributions: [copies, layout]."""
        each, wide = (list(dict.fromkeys(ls)) for ls in (
            (l for ls in copies for l in ls), layouts
        ))  # fmt: skip
        ends = (each, wide) if made else (wide, each)
        peaks = transfer_peaks(self.mesh, t, *ends)
        sizes = [[float(shard_bytes(t, l, self.mesh)) for l in some] for some in ends]
        more = np.maximum(peaks - np.add.outer(*sizes), 0.0)
        more = more if made else more.T
        row, column = ({l: i for i, l in enumerate(some)} for some in (each, wide))
        found = more[:, [column[layout] for layout in layouts]]
        return np.array([found[[row[l] for l in ls]].max(axis=0) for ls in copies])


def in_turn(held: Sequence[LiveBytes], buffers: Sequence[tuple[int, LiveBytes]]) -> list[LiveBytes]:
    """Return live bytes with those of buffers, each at its own moment among those of its op: every
    op is as many ops as redistributions of one op have buffers, and one more."""
    n = 1 + max((number for number, _ in buffers), default=0)
    found = [
        LiveBytes(h.variables, h.bytes, Span((h.span.start + 1) * n - 1, (h.span.end + 2) * n - 2))
        for h in held
    ]
    for number, h in buffers:
        at = (h.span.start + 1) * n - 1 + number
        found.append(LiveBytes(h.variables, h.bytes, Span(at, at)))
    return found
