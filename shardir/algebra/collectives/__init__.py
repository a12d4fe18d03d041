"""The collectives: one record each, which planner, cost, dialect, interpreter and emitter read.

    all_gather dim 0 over <dp>       [{tp, dp}, {}]  ->  [{tp}, {}]

Most of them change how a value is placed along their axes, from one state to another: replicated,
sharded along a dimension, partial, or held by a root. The record says from which state to which,
and from that follow the layout after it and what it refuses. The op of the dialect (`dist.<name>`),
numpy and torch are registered by the record's name. docs/how-to-add-a-collective.md adds one.
"""

from shardir.algebra.collectives import all_devices, by_position, halo
from shardir.algebra.collectives.base import (
    COLLECTIVES,
    AxisState,
    Cases,
    Collective,
    CollectiveStep,
    Transfer,
    check_position,
)
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Mesh

__all__ = [
    "COLLECTIVES",
    "PRICED",
    "AxisState",
    "Cases",
    "Collective",
    "CollectiveStep",
    "Transfer",
    "all_devices",
    "between",
    "by_position",
    "check_position",
    "halo",
    "move",
]  # fmt: skip

PRICED = (*(name for name, c in COLLECTIVES.items() if c.communicates), "recv")
"""What a cluster may say to be slower than its forms: all that communicates."""

_BETWEEN = {(c.start, c.end): c for c in COLLECTIVES.values() if c.start and c.planned}


def between(start: AxisState, end: AxisState) -> Collective:
    """The record of the collective with which redistributions go from one state to another."""
    return _BETWEEN[start, end]


def move(
    start: AxisState, end: AxisState, mesh: Mesh, before: Layout, axes: Axes, dim: int = -1,
    concat: int = -1, reduction: str = "",
) -> CollectiveStep:  # fmt: skip
    """The step from a layout with which axes go from one state to another.

    Args:
        reduction: of what becomes partial, if not that of the value.

    Raises:
        ShardirError: the axes are not in that state, or cannot come to the other.
    """
    record, reduction = _BETWEEN[start, end], reduction or before.reduction
    planned = CollectiveStep(record.name, axes, before, dim, concat, reduction)
    layout = record.after(mesh, before, planned)
    return CollectiveStep(record.name, axes, layout, dim, concat, reduction)
