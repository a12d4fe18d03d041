"""One rank of test_runtime.py: every collective against numpy slices of the global array.

python collectives_rank.py MESH STORE BACKEND RANK: MESH as `dp=2,tp=2`. It prints the cases that
failed.
"""

import math
import os
import sys
import traceback
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

if sys.argv[1] == "d=3":  # as torch 2.11, which has only the older names
    for newer in ("all_gather_single", "reduce_scatter_single"):
        if hasattr(dist, newer):
            delattr(dist, newer)

from support.device import DEVICE
from support.extent import extent
from support.ranks.collective_cases import FEWER, NAMES, Cases, check, integers, shards, tensor

from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.backend.torch.shardir_runtime.collectives import blocks
from shardir.backend.torch.shardir_runtime.shm import register


def main(mesh_text, rank, store, backend):
    torch.set_num_threads(1)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    mesh_axes = [(name, int(n)) for name, n in (a.split("=") for a in mesh_text.split(","))]
    world = math.prod(size for _, size in mesh_axes)
    register()
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=30),
    )
    mesh = rt.Mesh(mesh_axes, rank, torch.device(DEVICE))
    failures = []
    if backend != "nccl":
        assert blocks.is_library(torch.ones(1)) == (backend == "shm")
    if world == 8:
        for axes in [(("d", 2, 2),), (("d", 2, 4),), ("d",), (("d", 1, 2), ("d", 4, 2))]:
            Cases(mesh, mesh_axes, axes).group()
    for axes in choices(mesh_axes):
        cases = Cases(mesh, mesh_axes, axes)
        few = world == 8 or axes[0] == "tp" or extent(axes == ("dp",), False)
        for name in FEWER if few else NAMES:
            try:
                getattr(cases, name)()
            except Exception:  # all failures are wanted, not only the first
                failures.append(f"rank {rank}, {axes}, {name}: {traceback.format_exc(limit=-2)}")
    two_axes(mesh, mesh_axes, failures)
    in_flight(mesh, mesh_axes, failures)
    print("\n".join(failures) or f"rank {rank}: all passed")
    dist.barrier()
    dist.destroy_process_group()


def choices(mesh_axes):
    """Return the groups that are tried: one axis, several, in both orders, and sub-axes."""
    return {
        "d=2": [("d",)],
        "dp=2,tp=2": [("dp",), ("dp", "tp"), ("tp", "dp")],
        "d=3": [("d",)],
        "d=8": [(("d", 4, 2), ("d", 1, 2))],
    }[",".join(f"{name}={size}" for name, size in mesh_axes)]


def two_axes(mesh, mesh_axes, failures):
    """A value that is split along two dimensions, unevenly along both, is gathered again."""
    if len(mesh_axes) != 2:
        return
    (a, _), (b, _) = mesh_axes
    full = integers([7], (5, 7))
    for dims in [((a,), (b,)), ((b,), (a,)), ((a, b), ()), ((b, a), ())]:
        local = [mesh.bounds(s, axes) for s, axes in zip(full.shape, dims, strict=True)]
        x = tensor(full[tuple(np.s_[s:t] for s, t in local)])
        try:
            check(rt.gather_global(mesh, x, dims, None, full.shape), full)
        except Exception:
            failures.append(f"rank {mesh.rank}, {dims}: {traceback.format_exc(limit=-2)}")


class Started:
    """The runtime with each collective that can be started started, and waited for at once."""

    def __getattr__(self, name):
        call = getattr(rt, name)
        if name not in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            return call
        return lambda *given, **options: call(*given, **options, wait=False).wait()


def in_flight(mesh, mesh_axes, failures):
    """Collectives that are started have the same results, also where several are in flight, over
    the same and other groups, and are waited for in another order."""
    if mesh.size > 4:
        return
    cases = Cases(mesh, mesh_axes, choices(mesh_axes)[-1], Started())
    for name in (n for n in NAMES if n.startswith(("all_", "reduce_"))):
        try:
            getattr(cases, name)()
        except Exception:
            failures.append(f"rank {mesh.rank}, {name} started: {traceback.format_exc(limit=-2)}")
    all_axes = tuple(name for name, _ in mesh_axes)
    groups = [Cases(mesh, mesh_axes, axes) for axes in {all_axes, all_axes[:1], all_axes[-1:]}]
    groups.sort(key=lambda c: c.axes)
    for size in (1, 3, 50_000):
        pending = []
        for c in groups:
            each, full = c.each((size, 2 * c.n)), c.unsharded((size * c.n, 2))
            x, part = tensor(each[c.me]), tensor(shards(full, 0, c.n)[c.me])
            pending += [
                (rt.all_reduce(mesh, x, "sum", c.axes, wait=False), sum(each)),
                (rt.all_gather(mesh, part, 0, c.axes, wait=False), full),
                (rt.reduce_scatter(mesh, x, "sum", 1, c.axes, wait=False),
                 shards(sum(each), 1, c.n)[c.me]),
            ]  # fmt: skip
            del x, part
        for one, want in reversed(pending):
            try:
                check(one.wait(), want)
            except Exception:
                failures.append(f"rank {mesh.rank}, in flight: {traceback.format_exc(limit=-2)}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[4]), *sys.argv[2:4])
