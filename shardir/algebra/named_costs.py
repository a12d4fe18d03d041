"""The latencies and rates of many named collectives at once.

    [{b}, {}] -> [{}, {b}]             priced once
    [{a, b}, {c}] -> [{a}, {c, b}]     the same latency, and the rate times the share of a device
                                       over a and c: 1 / (a c), or more where shards are uneven

The bytes of a named collective, and those that it packs, are in proportion to the shards; and a
device packs unless it moves blocks of the first dimension, along which shards are contiguous.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardir.algebra.arrays import Table
from shardir.algebra.collectives import AxisState, Collective, CollectiveStep, between
from shardir.algebra.collectives import move as step_of
from shardir.algebra.forms import NO_COMMUNICATION, Forms
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.steps import step_forms


class NamedMove(NamedTuple):
    """The change of the state of some axes: `dim` and `concat` as those of a step."""

    start: AxisState
    end: AxisState
    axes: Axes
    dim: int = -1
    concat: int = -1

    @property
    def record(self) -> Collective:
        return between(self.start, self.end)


def named_costs(mesh: Mesh, moves: Sequence[tuple[NamedMove, Shape]]) -> tuple[Table, Table]:
    """Return the latency of each form of each move, and its seconds for each byte of a tensor that
    no other axes split: [form, move].

    Args:
        moves: of the `first_dims`, each with the sizes of its `dim` and `concat`, 0 for one that is
            split evenly.
    """
    forms = [named_forms(mesh, *move) for move in moves]
    count = max(map(len, forms), default=1)
    each = np.array([
        [(form.latency, form.rate) for form in (*some, *[some[-1]] * (count - len(some)))]
        for some in forms
    ])  # fmt: skip
    latency, rate = each.reshape(-1, count, 2).T
    return latency, rate


def first_dims(move: NamedMove) -> NamedMove:
    """Return the same move of the first dimensions: the others cost the same as the second."""
    dim, concat = min(move.dim, 1), min(move.concat, 1)
    return move._replace(dim=dim, concat=2 if dim == concat == 1 else concat)


@lru_cache(maxsize=16384)
def named_forms(mesh: Mesh, move: NamedMove, sizes: Shape = ()) -> Forms:
    """Return the forms of a move, for a tensor that no other axes split, with dimensions of these
    sizes, or so large that no shard is rounded."""
    if not move.record.communicates:
        return NO_COMMUNICATION
    return step_forms(mesh, *_example(mesh, move, sizes))


def _example(mesh: Mesh, move: NamedMove, sizes: Shape) -> tuple[Shape, Layout, CollectiveStep]:
    """Return the tensor, its layout and the step."""
    start, end, axes, dim, concat = move
    before = Layout(mesh.name, ((),) * 4)
    if start is AxisState.SHARDED:
        before = before.with_dim(concat if end is AxisState.SHARDED else dim, axes)
    elif start is AxisState.PARTIAL:
        before = before.with_partial(axes)
    shape = [*[2 * mesh.size] * 3, mesh.size**2]
    for d, size in zip((dim, concat), sizes, strict=False):
        shape[d] = size or shape[d]
    return tuple(shape), before, step_of(start, end, mesh, before, axes, dim, concat)
