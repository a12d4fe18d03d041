"""One rank of test_shm.py: the backend `shm` by itself, against numpy.

python shm_rank.py CASE RANKS STORE SEED RANK. It prints what failed.
"""

import math
import os
import random
import sys
import time
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from support.extent import extent
from support.ranks.shm_sequences import Sequence, given

from shardir.backend.torch.shardir_runtime.shm import NAME, moves


def segments_of_all() -> Any:
    """Return the segments of the group of all ranks."""
    group: Any = dist.group.WORLD
    return group._moves.links.segments


def sequences(rank, seed):
    """Random operations in several groups, waited for in another order on each rank."""
    moves.AHEAD = random.Random(seed).choice([0, 1 << 16, 1 << 25])
    Sequence(seed, rank).run(400)


def dropped(rank, seed):
    """Operations whose handles are dropped end, and what others need of them comes."""
    xs = [torch.full((80_000,), float(rank)) for _ in range(20)]
    for x in xs[:-1]:
        dist.all_reduce(x, async_op=True)
    dist.all_reduce(xs[-1])
    for _ in range(3):
        dist.barrier()
    assert all(float(x[k]) == 6.0 for x in xs for k in (0, -1)), [x[0] for x in xs]
    peaks = set()
    for _ in range(100):  # of nothing that nobody waits for there is more and more
        dist.all_gather_into_tensor(torch.empty(80_000), torch.ones(20_000), async_op=True)
        dist.barrier()
        peaks.add(segments_of_all().unread)
    assert max(peaks) <= 8 * 80_000, peaks


def steady(rank, seed):
    """A step that is repeated takes no new memory, whoever is ahead; sums have equal bits."""
    segments, sizes = segments_of_all(), random.Random(seed)
    sizes = [sizes.randrange(1, 200_000) for _ in range(extent(4, 10))]
    taken = []
    for step in range(12):
        time.sleep(random.random() * 0.002)
        for size in sizes:
            generator = torch.Generator().manual_seed(1000 * step + size)
            each = [torch.randn(size, generator=generator) for _ in range(4)]
            x = each[rank].clone()
            dist.all_reduce(x)
            assert torch.equal(x, each[0] + each[1] + each[2] + each[3])
        taken.append(segments.size)
    assert taken[-1] <= 3 * 5 * sum(sizes) and taken[8] == taken[-1], taken


def special(rank, seed):
    """NaN is the maximum and the minimum; booleans; what there is not is one error."""
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        x = torch.tensor([float(rank), math.nan if rank == 2 else 1.0] * 20_000)
        dist.all_reduce(x, op)
        assert x[1::2].isnan().all() and not x[::2].isnan().any()
    x = torch.full((50_000,), float(rank), requires_grad=True)  # no operation has a gradient
    dist.all_reduce(x)
    dist.all_gather_into_tensor(torch.empty(200_000), x)
    assert x.is_leaf and float(x[7]) == 6.0 and torch.is_grad_enabled()
    alone: Any = [dist.new_group([k]) for k in range(4)][rank]
    x, out = torch.full((300_000,), float(rank)), torch.empty(300_000)
    for call in (
        lambda: dist.all_reduce(x, group=alone),
        lambda: dist.all_gather_into_tensor(out, x, group=alone),
        lambda: dist.reduce_scatter_tensor(out, x, group=alone),
        lambda: dist.barrier(group=alone),
    ):
        call()
        assert torch.equal(x, torch.full((300_000,), float(rank)))
    assert torch.equal(out, x) and alone._moves.links.segments.size == 0
    for call in (  # into memory that is not contiguous
        dist.all_reduce,
        lambda out: dist.reduce(out, 1),
        lambda out: dist.reduce_scatter(out, [out.clone() for _ in range(4)]),
    ):
        out = torch.full((3, 200), float(rank)).t()
        call(out)
        assert rank != 1 or (out == 6.0).all()
    x = torch.tensor([rank == 1, False])
    dist.all_reduce(x, dist.ReduceOp.MAX)
    assert x.tolist() == [True, False]
    for message, call in {
        "shm has no receives from any rank; use gloo": lambda: dist.recv(torch.empty(1)),
        "expected a reduction of SUM, AVG": lambda: dist.all_reduce(
            torch.ones(1), dist._make_nccl_premul_sum(2.0)
        ),
        "expected tensors on CPUs": lambda: dist.all_reduce(torch.ones(1, device="meta")),
        "expected dense tensors": lambda: dist.all_reduce(torch.eye(2).to_sparse_csr()),
        "expected a tag of at least 0": lambda: dist.send(torch.ones(1), (rank + 1) % 4, tag=-1),
        "expected a multiple of 4 elements": lambda: dist.reduce_scatter_tensor(
            torch.ones(1), torch.ones(5)
        ),
    }.items():
        try:
            call()
        except Exception as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"expected an error: {message}")


def posted(rank, seed):
    """A sender that waits until its message is read does not wait for a rank that has posted the
    receive and waits for a later one, though the message had come before."""
    moves.AHEAD = -1
    pair: Any = dist.new_group([0, 1], timeout=timedelta(seconds=10))
    first, second, third = (given(k, 0, 20_000, torch.float32) for k in range(3))
    if rank == 0:
        sends: Any = [dist.isend(first, 1, pair, 1), dist.isend(second, 1, pair, 2)]
        sends[0].wait()
        dist.send(third, 1, pair, 3)
        sends[1].wait()
    elif rank == 1:
        pair._moves.links.wake = 60.0  # else it looks around after a second
        got = [torch.zeros(20_000) for _ in range(3)]
        dist.recv(got[1], 0, pair, 2)  # by then the first one has come
        posted: Any = dist.irecv(got[0], 0, pair, 1)
        dist.recv(got[2], 0, pair, 3)
        posted.wait()
        for x, expected in zip(got, (first, second, third), strict=True):
            assert torch.equal(x, expected)


def unordered(rank, seed):
    """Messages of tensors whose elements are not in the order of their bytes, or not as they are
    there, into such ones."""
    values = given(0, 0, 6000, torch.float32)
    for x in (values.view(60, 100).mT, values[::3], torch._neg_view(values)):
        if rank == 0:
            for _ in range(2):
                dist.send(x, 1)
        elif rank == 1:
            for into in (torch.zeros(x.shape), torch.zeros(*x.shape, 2)[..., 0]):
                dist.recv(into, 0)
                assert torch.equal(into, x.resolve_neg()), x.shape


def mismatch(rank, seed):
    """Ranks that call different collectives, or with other sizes."""
    for other in (torch.ones(3), torch.ones(1000)):
        try:
            if rank == 0:
                dist.all_reduce(other)
            else:
                dist.all_gather_into_tensor(torch.ones(16), torch.ones(4))
        except RuntimeError as error:
            assert "the ranks of a group call the same collectives" in str(error), error
            assert f"rank {1 - rank}" in str(error) or rank > 1, error
        else:
            assert rank > 1

    try:
        dist.all_reduce(torch.ones(5 if rank == 0 else 3))
    except RuntimeError as error:
        sizes = {f"expected {n} bytes" for n in (12, 20)}
        assert any(size in str(error) for size in sizes), error
    else:
        raise AssertionError("expected an error")


def left(rank, seed):
    """Messages arrive although their sender has left; and while it does not wait."""
    if rank == 0:
        for k in range(1500):  # more than a socket takes
            dist.send(torch.full((1000,), float(k)), 1)
        for k in range(40):  # more than one message acknowledges
            dist.send(torch.full((2000,), float(k)), 1)
        dist.destroy_process_group()
    elif rank == 1:
        time.sleep(0.3)
        for size, count in ((1000, 1500), (2000, 40)):
            for k in range(count):
                x = torch.empty(size)
                dist.recv(x, 0)
                assert (x == k).all()


def absent(rank, seed):
    """A rank that does not come is named."""
    if rank == 0:
        how: Any = {"timeout": timedelta(seconds=0.5), "use_local_synchronization": True}
        try:
            dist.new_group([0, 1], **how)
        except RuntimeError as error:
            assert "rank 1 did not come within 0.5 s" in str(error), error
        else:
            raise AssertionError("expected an error")


def ended(rank, seed):
    """A rank that ends is named by the others, one that is silent by those who wait for it."""
    if rank == 2:
        dist.barrier()
        os._exit(0)
    dist.barrier()  # which it has left
    if rank == 0:
        time.sleep(0.3)  # its messages find rank 2 ended, and reach the ranks after it all the same
    for call in (lambda: dist.all_reduce(torch.ones(3)), lambda: dist.recv(torch.ones(3), 2)):
        try:
            call()
        except RuntimeError as error:
            assert "connection closed by peer: rank 2 has ended" in str(error), error
        else:
            raise AssertionError("expected an error")
    if rank < 2:
        pair: Any = dist.new_group([0, 1], use_local_synchronization=True)
        if rank == 1:
            work: Any = dist.irecv(torch.ones(1), 0, group=pair)
            began = time.monotonic()
            try:
                work.wait(timedelta(seconds=0.2))
            except RuntimeError as error:
                assert "timed out: waited for rank 0 for 0.2 s" in str(error), error
            assert 0.2 <= time.monotonic() - began < 10
        else:
            time.sleep(0.4)


def main(case, ranks, store, seed, rank):
    torch.set_num_threads(1)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    dist.init_process_group(
        NAME, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks,
        timeout=timedelta(seconds=30),
    )  # fmt: skip
    try:
        globals()[case](rank, seed)
    except Exception:
        print(traceback.format_exc(), flush=True)
        os._exit(1)
    print(f"rank {rank}: passed", flush=True)
    if case in (
        "mismatch",
        "ended",
        "left",
    ):  # no barrier is possible; the others look at this rank
        file = dist.FileStore(store, ranks)
        file.add("passed", 1)
        while file.add("passed", 0) < ranks - (case == "ended"):
            time.sleep(0.01)
        os._exit(0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
