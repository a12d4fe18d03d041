"""The bytes that DTensor's `redistribute` receives; redistribution.py runs it as a process.

    python dtensor_redistribution.py 2x4 64x64 OUT

writes JSON to OUT: a list of [source, target, bytes that rank 0 receives]; placements are R, S0,
S1.
With a fake process group nothing is communicated, but every collective is issued, and its bytes
follow from its operands. On CPU devices these are all-gathers: DTensor has no other path from one
split dimension to another there. Shards are even, so all ranks receive equal numbers of bytes.
"""

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode


class Received(TorchDispatchMode):
    """Adds up the bytes that the collectives within it receive."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out, name = func(*args, **(kwargs or {})), str(func)
        if "c10d_functional" in name and not any(w in name for w in ("wait", "wrap")):
            if "all_gather" not in name:
                raise NotImplementedError(name)
            self.bytes += sum(
                s * t.numel() * t.element_size() for s, t in ((1, out), (-1, args[0]))
            )
        return out


def main(mesh_sizes: list[int], shape: list[int], out: Path) -> None:
    world = 1
    for n in mesh_sizes:
        world *= n
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    names = tuple(f"a{i}" for i in range(len(mesh_sizes)))
    mesh = init_device_mesh("cpu", tuple(mesh_sizes), mesh_dim_names=names)
    each = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1)}
    found = []
    for source, target in product(product(each, repeat=len(mesh_sizes)), repeat=2):
        local = list(shape)
        for n, s in zip(mesh_sizes, source, strict=True):
            if s != "R":
                local[int(s[1])] //= n
        x = DTensor.from_local(torch.zeros(local), mesh, [each[s] for s in source])
        with Received() as counted:
            x.redistribute(mesh, [each[t] for t in target]).to_local()
        found.append([list(source), list(target), counted.bytes])
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    sizes, shape = ([int(n) for n in a.split("x")] for a in sys.argv[1:3])
    main(sizes, shape, Path(sys.argv[3]))
