"""Transfers between the ranks of stages.

d_a_0 = stages.receive(mesh, VALUES["d_a"], 1)       the receive is posted
a_0_sent = stages.send(mesh, a_0, 1)
d_a_0 = d_a_0.wait()
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..collectives import channels, position
from ..collectives.mesh import Mesh
from ..collectives.shards import local_bounds
from .tables import StageValue

STAGE = "stage"
"""The axis of the mesh over which the ranks of different stages differ."""


class StageTransfer:
    """A started send or receive: its work (None for an empty tensor), its tensor, and the peer."""

    def __init__(self, work: Any, x: Tensor, peer: int):
        self.work, self.x, self.peer = work, x, peer

    def wait(self, line: int = 0) -> Tensor:
        """Wait for the end, and return the tensor, which the transfer releases. `line`: the line of
        the program that waits, by default the current one."""
        if self.work is not None:
            position.begin(self.peer, line)
            self.work.wait()
            position.complete()
        x = self.x
        del self.x
        return x


def zeros(mesh: Mesh, type: StageValue) -> Tensor:
    """Return zeros of this rank's shard of a value."""
    return torch.zeros(shard_shape(mesh, type), dtype=type.dtype, device=mesh.device)


@lru_cache(maxsize=1024)
def shard_shape(mesh: Mesh, type: StageValue) -> tuple[int, ...]:
    """Return the shape of this rank's shard of a value."""
    return tuple(b - a for a, b in local_bounds(mesh, type.shape, type.dims))


@lru_cache(maxsize=1024)
def peer_rank(mesh: Mesh, position: int) -> int:
    """Return the rank at a position among the ranks that differ only in the stage."""
    return mesh.members((STAGE,), mesh.rank)[position]


def send(mesh: Mesh, x: Tensor, target: int) -> StageTransfer:
    """Start to send a tensor to the rank at a position of the stages."""
    x, peer, work = x.contiguous(), peer_rank(mesh, target), None
    if x.numel():
        work = channels.start_send(mesh, x, peer)
    return StageTransfer(work, x, peer)


def receive(mesh: Mesh, type: StageValue, source: int) -> StageTransfer:
    """Post the receive of a value from the rank at a position of the stages."""
    x = torch.empty(shard_shape(mesh, type), dtype=type.dtype, device=mesh.device)
    peer, work = peer_rank(mesh, source), None
    if x.numel():
        work = channels.start_receive(mesh, x, peer)
    return StageTransfer(work, x, peer)


def hold(mesh: Mesh, *transfers: StageTransfer) -> None:
    """Hold the tensors of transfers until the end of the step, which waits for them."""
    mesh.hold((transfer.work, transfer.x) for transfer in transfers)
