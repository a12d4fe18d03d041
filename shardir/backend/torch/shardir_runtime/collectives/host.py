"""Copies between a device and the memory of its host.

On a CPU the two memories are one, and a copy is a new tensor. Tensors on the host of a CUDA device
are pinned, and copies run on streams of their own: to the host after the work of the current stream
that makes the source, to the device at once, since an op of the host has ended when its call
returns. After `wait`, an op of the host may read the copy, or write into its source.
"""

from typing import Any

import torch
from torch import Tensor

from . import buffers
from .mesh import Mesh

_streams: dict[tuple[torch.device, str], Any] = {}
"""The streams of copies, by CUDA device and direction."""


def copy(mesh: Mesh, x: Any, to: str, into: Tensor | None = None, wait: bool = True) -> Any:
    """Return a tensor, or a list of tensors, in the memory of the `host` or of the `device`.

    into: the memory for the copy of a single tensor: a tensor there that nothing reads later.
    """
    xs = [x] if isinstance(x, Tensor) else x
    if mesh.device.type == "cuda":
        pending = _on_stream(mesh, xs, to, into)
    else:
        copies = [_start_copy(mesh, x, to, into) for x in xs]
        pending = buffers.Pending(None, lambda: copies)
    if isinstance(x, Tensor):
        copies_of_one = pending
        pending = buffers.Pending(None, lambda: copies_of_one.wait()[0])
    return pending.wait() if wait else pending


def _on_stream(mesh: Mesh, xs: list[Tensor], to: str, into: Tensor | None) -> buffers.Pending:
    if (mesh.device, to) not in _streams:
        _streams[mesh.device, to] = torch.cuda.Stream(mesh.device)
    stream, present = _streams[mesh.device, to], torch.cuda.current_stream()
    if to == "host" or into is not None:
        stream.wait_stream(present)
    with torch.cuda.stream(stream):
        copies = [_start_copy(mesh, x, to, into) for x in xs]
        done = stream.record_event()
    for x in xs if to == "host" else copies:
        x.record_stream(stream if to == "host" else present)

    def finish() -> list[Tensor]:
        done.synchronize()
        return copies

    return buffers.Pending(None, finish)


def _start_copy(mesh: Mesh, x: Tensor, to: str, into: Tensor | None) -> Tensor:
    if into is None:
        pinned = to == "host" and mesh.device.type == "cuda"
        device = "cpu" if to == "host" else mesh.device
        into = torch.empty(x.shape, dtype=x.dtype, device=device, pin_memory=pinned)
    return into.copy_(x, non_blocking=True)


def move_to(mesh: Mesh, x: Tensor, host: bool) -> Tensor:
    """Return x in the memory of the host, or of the device; x itself if it is there already."""
    if not host:
        return x.to(mesh.device)
    x = x.cpu()
    return x.pin_memory() if mesh.device.type == "cuda" and not x.is_pinned() else x
