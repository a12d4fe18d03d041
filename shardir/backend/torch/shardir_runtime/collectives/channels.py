"""Messages between two ranks, on their channel (`Mesh.connect`).

Gloo transfers no CUDA tensors between two ranks: there they pass through host memory.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import buffers
from .mesh import Mesh


def start_send(mesh: Mesh, x: Tensor, peer: int) -> Any:
    """Start to send a contiguous tensor to a rank; return the work, which may need the tensor."""
    x, channel = buffers.in_transport_dtype(x), mesh.channel(mesh.rank, peer)
    return dist.isend(to_transport(x), peer, group=channel)


def start_receive(mesh: Mesh, x: Tensor, peer: int) -> Any:
    """Post the receive of a contiguous tensor from a rank; return the work."""
    x, channel = buffers.in_transport_dtype(x), mesh.channel(peer, mesh.rank)
    return receive_by_transport(x, lambda x: dist.irecv(x, peer, group=channel))


def is_by_host(x: Tensor) -> bool:
    """Whether messages pass through host memory."""
    return x.is_cuda and dist.get_backend() == "gloo"


def to_transport(x: Tensor) -> Tensor:
    """Return x in memory from which the backend sends."""
    return x.cpu() if is_by_host(x) else x


def receive_by_transport(x: Tensor, start: Callable[[Tensor], Any]) -> Any:
    """Return the work of a receive into x. `start` posts it for a tensor in memory into which the
    backend receives."""
    if not is_by_host(x):
        return start(x)
    host = torch.empty_like(x, device="cpu")
    return _ReceiveByHost(start(host), host, x)


class _ReceiveByHost:
    """The work of a receive into host memory, from which `wait` copies it."""

    def __init__(self, work: Any, host: Tensor, x: Tensor):
        self._work, self._host, self._x = work, host, x

    def wait(self) -> None:
        self._work.wait()
        self._x.copy_(self._host)
