"""Random sequences of operations on the backend `shm`, and what numpy expects of them."""

import random
import time

import numpy as np
import torch
import torch.distributed as dist

from shardir.backend.torch.shardir_runtime.shm.links import INLINE

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
