"""The value that is redistributed in place of another.

    %y = nn.broadcast %x                            %x_1 = dist.redistribute %x
    %y_1 = dist.redistribute %y             ->      %y_1 = nn.broadcast %x_1

A broadcast's result is redistributed by its operand: that is smaller, and nothing is moved along
the dimensions in which it is repeated (rewriting/rewriter.py). So it takes the time of the
operand's redistribution.
"""

from collections.abc import Sequence
from typing import NamedTuple

from xdsl.dialects.builtin import TensorType
from xdsl.ir import SSAValue

from shardir.algebra.arrays import Table
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.dialects.nn.repeated import RepeatedDims, repeated, repeated_layout
from shardir.dialects.nn.types import unsharded_type
from shardir.search.graph.latency_shares import LatencyShares
from shardir.search.graph.transfer_costs import ValueTransfer, transfer_seconds


class MovedValue(NamedTuple):
    """The value that is redistributed for another: its type; of each of its dimensions that of the
    other, -1 for one in which it is repeated, None if both are the same."""

    type: TensorType
    dims: RepeatedDims | None = None

    @staticmethod
    def of(v: SSAValue) -> "MovedValue":
        """Return the value that is redistributed for another."""
        dims = None
        while (found := repeated(v)) is not None:
            v, of_v = found
            dims = of_v if dims is None else tuple([dims[d] if d >= 0 else -1 for d in of_v])
        return MovedValue(unsharded_type(v), dims)

    def layout(self, of_value: Layout) -> Layout:
        """Return its layout where the value has another one."""
        return of_value if self.dims is None else repeated_layout(of_value, self.dims)

    def transfer(self, source: Layout, target: Layout) -> ValueTransfer:
        """Return the transfer for a redistribution of the value."""
        return ValueTransfer(self.type, self.layout(source), self.layout(target))

    def seconds(
        self, mesh: Mesh, sources: Sequence[Layout], targets: Sequence[Layout],
        shares: LatencyShares | None = None,
    ) -> Table:  # fmt: skip
        """Return the times of the redistributions of the value: [source, target]."""
        froms, tos = self._layouts(sources), self._layouts(targets)
        return transfer_seconds(mesh, self.type, froms, tos, shares)

    def _layouts(self, of_value: Sequence[Layout]) -> list[Layout]:
        return [*map(self.layout, of_value)]
