"""The work of a product in steps (a ring product).

In each of n steps a device computes a part of the product while a shard moves to its neighbour; one
step, the first or the last, has no transfer. A transfer of t seconds, of which a are latency, takes
`interference` of t - a and `occupancy` of a from the computation of c seconds beside it
(`schedule.py`). So all steps take

    (n - 1) max(t, interference (t - a) + occupancy a + c) + c
"""

from math import prod
from typing import NamedTuple

from xdsl.dialects.builtin import TensorType

from shardir.algebra.cluster import Cluster
from shardir.algebra.mesh import Mesh
from shardir.dialects import dist
from shardir.dialects.nn.types import element_name, size_of


class RingWork(NamedTuple):
    """The number of steps, and the work of one of them.

    Attributes:
        touched: bytes that the product reads and writes.
        copied: bytes copied or added beside the product.
        sent: bytes of a transfer.
    """

    steps: int
    element: str
    flops: int
    touched: int
    copied: int
    sent: int


def ring_work(op: dist.RingProductOp, mesh: Mesh) -> RingWork:
    """Return the work of a product in steps on one device."""
    n, gathers = op.steps(mesh), isinstance(op, dist.GatheredProductOp)
    moved, other = op.moved, op.operands[1 - op.ring[0]]
    out = size_of(op.out)
    part = out // n if gathers else out
    shard = size_of(moved) if gathers else size_of(moved) // n
    type = op.out.type
    assert isinstance(type, TensorType)
    sizes = dict[str, int]()
    for term, v in zip(op.letters, (*op.operands, op.out), strict=True):
        assert isinstance(v.type, TensorType)
        for letter, size in zip(term, v.type.get_shape(), strict=True):
            sizes[letter] = min(size, sizes.get(letter, size))
    flops = 2 * prod(sizes.values())
    touched = shard + size_of(other) + part
    return RingWork(
        n, element_name(type.element_type), flops, touched,
        copied=(2 if gathers else 3) * part + 2 * shard * (len(op.outs) - 1),
        sent=shard if gathers else part,
    )  # fmt: skip


def ring_seconds(steps: int, step: float, sent: float, latency: float, on: Cluster) -> float:
    """Return the seconds of a product in steps.

    Args:
        step: seconds of the computation of a step.
        sent: seconds of a transfer, of which `latency` are latency.
    """
    return (steps - 1) * max(sent, on.lost(sent, latency) + step) + step


def ring_buffers(op: dist.RingProductOp, mesh: Mesh) -> int:
    """Return the bytes of the buffers of a product in steps: for gathered operands a part of the
    result and at most two shards in transfer, for a scattered result at most two sums."""
    work = ring_work(op, mesh)
    out = size_of(op.out)
    if isinstance(op, dist.GatheredProductOp):
        return out // work.steps + min(2, work.steps - 1) * work.sent
    return min(2, work.steps - 1) * out
