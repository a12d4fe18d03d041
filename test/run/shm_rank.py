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
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.append(f"{Path(__file__).parents[2]}/shardir/backend/torch/runtime")
import runtime_shm
import runtime_shm_moves
from runtime_shm_links import INLINE

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64,
          torch.int16, torch.uint8]  # fmt: skip
SIZES = [0, 1, 3, INLINE // 8, INLINE // 2 + 1, 20_000, 140_001]
GROUPS = [(0, 1, 2, 3), (0, 1), (2, 3), (0, 3), (1, 2), (0, 1, 2), (0, 1, 2, 3)]
REDUCTIONS = {"SUM": np.sum, "MAX": np.max, "MIN": np.min, "PRODUCT": np.prod}


def given(number, rank, size, dtype):
    """Small integers, whose sums and products are exact in every type."""
    values = np.random.default_rng([number, rank]).integers(0, 4, size)
    return torch.tensor(values, dtype=torch.int64).to(dtype)


class Sequence:
    """A sequence of operations, the same on all ranks, and what they are to return on this one."""

    def __init__(self, seed, rank):
        self.rank, self.groups = rank, [(ranks, dist.new_group(ranks)) for ranks in GROUPS]
        self.common, self.own = random.Random(seed), random.Random(f"{seed} {rank}")
        self.started = []

    def run(self, count):
        """Start operations; wait for some of those before, in an order of this rank."""
        for number in range(count):
            ranks, group = self.common.choice(self.groups)
            kind = self.common.choice(
                ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather",
                 "scatter", "reduce", "send", "barrier", "all_gather_object"]
            )  # fmt: skip
            dtype, size = self.common.choice(DTYPES), self.common.choice(SIZES)
            ends, op = self.common.sample(ranks, 2), self.common.choice(list(REDUCTIONS))
            if self.rank in ranks:
                call = getattr(self, kind)
                what = f"{number}: {kind} {dtype} {size} {op} {ranks} {ends}"
                expected = call(number, ranks, group, size, dtype, ends, op)
                self.started.append((what, *expected))
            while self.started and self.own.random() < 0.5:
                self.end(self.own.randrange(len(self.started)))
        while self.started:
            self.end(self.own.randrange(len(self.started)))

    def end(self, which):
        """Wait for an operation, and compare; of some drop the handle, and look later."""
        what, work, found, wanted = self.started.pop(which)
        if work is not None:
            if self.own.random() < 0.2:
                while not work.is_completed():
                    time.sleep(0.001)
            work.wait()
        for x, want in zip(found, wanted, strict=True):
            assert np.array_equal(x.double().numpy(), want), f"{what}: {x}, expected {want}"

    def all_reduce(self, number, ranks, group, size, dtype, ends, op):
        x = given(number, self.rank, size, dtype)
        work = dist.all_reduce(x, getattr(dist.ReduceOp, op), group=group, async_op=True)
        return work, [x], [self.reduced(number, ranks, size, dtype, op)]

    def reduced(self, number, ranks, size, dtype, op):
        each = [given(number, r, size, dtype).double().numpy() for r in ranks]
        return REDUCTIONS[op](np.stack(each), axis=0)

    def reduce(self, number, ranks, group, size, dtype, ends, op):
        x = given(number, self.rank, size, dtype)
        reduction = getattr(dist.ReduceOp, op)
        work = dist.reduce(x, ends[0], reduction, group=group, async_op=True)
        if self.rank != ends[0]:
            return work, [], []
        return work, [x], [self.reduced(number, ranks, size, dtype, op)]

    def all_gather(self, number, ranks, group, size, dtype, ends, op):
        x, out = given(number, self.rank, size, dtype), torch.empty(len(ranks) * size, dtype=dtype)
        if op == "SUM":  # the list form, of which an element is not contiguous
            outs = [torch.empty(size, 2, dtype=dtype)[:, 0] for _ in ranks]
            work = dist.all_gather(outs, x, group=group, async_op=True)
            return work, outs, [given(number, r, size, dtype).double().numpy() for r in ranks]
        work = dist.all_gather_into_tensor(out, x, group=group, async_op=True)
        each = [given(number, r, size, dtype).double().numpy() for r in ranks]
        return work, [out], [np.concatenate(each)]

    def all_gather_object(self, number, ranks, group, *_):
        found = [None] * len(ranks)
        dist.all_gather_object(found, (number, self.rank), group=group)
        assert found == [(number, r) for r in ranks], found
        return None, [], []

    def reduce_scatter(self, number, ranks, group, size, dtype, ends, op):
        x, out = given(number, self.rank, len(ranks) * size, dtype), torch.empty(size, dtype=dtype)
        how = {"op": getattr(dist.ReduceOp, op), "group": group, "async_op": True}
        if op == "SUM":
            work = dist.reduce_scatter(out, list(x.view(len(ranks), size)), **how)
        else:
            work = dist.reduce_scatter_tensor(out, x, **how)
        total = self.reduced(number, ranks, len(ranks) * size, dtype, op)
        return work, [out], [total.reshape(len(ranks), size)[ranks.index(self.rank)]]

    def all_to_all(self, number, ranks, group, size, dtype, ends, op):
        """From rank r to rank s `size` elements times (r + s) % 3."""
        sizes = [(self.rank + r) % 3 * size for r in ranks]
        x, out = given(number, self.rank, sum(sizes), dtype), torch.empty(sum(sizes), dtype=dtype)
        work = dist.all_to_all_single(out, x, sizes, sizes, group=group, async_op=True)
        want = []
        for r in ranks:
            theirs = [(r + s) % 3 * size for s in ranks]
            cuts = np.cumsum(theirs)[:-1]
            values = given(number, r, sum(theirs), dtype).double().numpy()
            want.append(np.split(values, cuts)[ranks.index(self.rank)])
        return work, [out], [np.concatenate(want)]

    def broadcast(self, number, ranks, group, size, dtype, ends, op):
        x = given(number, self.rank, size, dtype)
        work = dist.broadcast(x, ends[0], group=group, async_op=True)
        return work, [x], [given(number, ends[0], size, dtype).double().numpy()]

    def gather(self, number, ranks, group, size, dtype, ends, op):
        outs = [torch.empty(size, dtype=dtype) for _ in ranks] if self.rank == ends[0] else None
        x = given(number, self.rank, size, dtype)
        work = dist.gather(x, outs, ends[0], group=group, async_op=True)
        each = [given(number, r, size, dtype).double().numpy() for r in ranks]
        return work, outs or [], each if outs else []

    def scatter(self, number, ranks, group, size, dtype, ends, op):
        x, out = given(number, ends[0], len(ranks) * size, dtype), torch.empty(size, dtype=dtype)
        parts = list(x.view(len(ranks), size)) if self.rank == ends[0] else None
        work = dist.scatter(out, parts, ends[0], group=group, async_op=True)
        want = x.double().numpy().reshape(len(ranks), size)[ranks.index(self.rank)]
        return work, [out], [want]

    def send(self, number, ranks, group, size, dtype, ends, op):
        tag = size % 3
        if self.rank == ends[0]:
            x = given(number, self.rank, size, dtype)
            work = dist.isend(x, ends[1], group=group, tag=tag)
            x.zero_()  # it is copied, or has been waited for
            return work, [], []
        if self.rank == ends[1]:
            out = torch.empty(size, dtype=dtype)
            work = dist.irecv(out, ends[0], group=group, tag=tag)
            return work, [out], [given(number, ends[0], size, dtype).double().numpy()]
        return None, [], []

    def barrier(self, number, ranks, group, *_):
        return dist.barrier(group=group, async_op=True), [], []


def segments_of_all() -> Any:
    """Return the segments of the group of all ranks."""
    group: Any = dist.group.WORLD
    return group._moves.links.segments


def sequences(rank, seed):
    """Random operations in several groups, waited for in another order on each rank."""
    runtime_shm_moves.AHEAD = random.Random(seed).choice([0, 1 << 16, 1 << 25])
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
    sizes = [sizes.randrange(1, 200_000) for _ in range(10)]
    taken = []
    for step in range(16):
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
    runtime_shm_moves.AHEAD = -1
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
        runtime_shm.NAME, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks,
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
