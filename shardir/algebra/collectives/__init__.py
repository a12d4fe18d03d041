"""The collectives: one record each, for planner, cost, dialect, interpreter and emitter.

    all_gather dim 0 over <dp>       [{tp, dp}, {}]  ->  [{tp}, {}]

Most collectives change the state of a value along their axes: replicated, sharded along a
dimension, partial, or held by a root. A record has the states before and after, from which the
layout of the result and the errors follow. The op of the dialect (`dist.<name>`), numpy and torch
are registered by the record's name. docs/contribute/how-to-add-a-collective.md adds one.
"""

from functools import lru_cache

from shardir.algebra.collectives import all_devices, by_position, halo, host
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
    "host",
    "move",
]  # fmt: skip

PRICED = (*(name for name, c in COLLECTIVES.items() if c.communicates), "recv")
"""The keys of a cluster's `collectives`: every kind that communicates."""

_BETWEEN = {(c.start, c.end): c for c in COLLECTIVES.values() if c.start and c.planned}


def between(start: AxisState, end: AxisState) -> Collective:
    """Return the collective by which redistributions change the state of axes."""
    return _BETWEEN[start, end]


@lru_cache(maxsize=16384)
def move(
    start: AxisState, end: AxisState, mesh: Mesh, before: Layout, axes: Axes, dim: int = -1,
    concat: int = -1, reduction: str = "",
) -> CollectiveStep:  # fmt: skip
    """Return the step from the layout `before` that changes the state of axes.

    Args:
        reduction: of a new partial value; the value's own if empty.

    Raises:
        ShardirError: the axes are not in the state `start`, or cannot get to `end`.
    """
    record, reduction = _BETWEEN[start, end], reduction or before.reduction
    planned = CollectiveStep(record.name, axes, before, dim, concat, reduction)
    layout = record.after(mesh, before, planned)
    return CollectiveStep(record.name, axes, layout, dim, concat, reduction)
