"""The cases of collectives_rank.py: every collective against numpy slices of the global array."""

import itertools
import math
from functools import cache
from typing import Any

import numpy as np
import torch

from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.backend.torch.shardir_runtime.collectives import blocks, channels
from support.device import DEVICE
from support.extent import extent

DTYPES = ["float32", "float64", "bfloat16", "float16", "int32", "int64", "bool"]
SHAPES = [(3, 5), (), (0, 4), (4096,)]
REDUCE = {"sum": np.sum, "max": np.max, "min": np.min, "mean": np.mean}


def members_by_reshape(mesh_axes, axes, rank):
    """Return the group of `rank`: view all ranks as an array of all sub-axes, and transpose it."""
    cuts = {name: {1, size} for name, size in mesh_axes}
    spans = []
    for axis in axes:
        name, pre, size = (axis, 1, dict(mesh_axes)[axis]) if isinstance(axis, str) else axis
        cuts[name] |= {pre, pre * size}
        spans.append((name, pre, pre * size))
    pieces = []  # (axis name, from, to) of each piece of each axis, in mesh order
    for name, _ in mesh_axes:
        pieces += [(name, a, b) for a, b in itertools.pairwise(sorted(cuts[name]))]
    ranks = np.arange(math.prod(s for _, s in mesh_axes)).reshape([b // a for _, a, b in pieces])
    chosen = [
        i
        for name, low, high in spans
        for i, (piece, a, b) in enumerate(pieces)
        if piece == name and low <= a and b <= high
    ]
    rest = [i for i in range(len(pieces)) if i not in chosen]
    count = math.prod(ranks.shape[i] for i in chosen)
    groups = ranks.transpose(rest + chosen).reshape(-1, count)
    return next(list(map(int, g)) for g in groups if rank in g)


def shards(array, dim, count):
    size = -(-array.shape[dim] // count)
    cuts = [min(k * size, array.shape[dim]) for k in range(1, count)]
    return np.split(array, cuts, axis=dim)


def integers(seed, shape, dtype="float32"):
    """Small integers, whose sums are exact in every type."""
    return drawn(tuple(seed), tuple(shape), 2 if dtype == "bool" else 8)


@cache
def drawn(seed, shape, high):
    """Integers below `high`, which nobody may write."""
    found = np.asarray(np.random.default_rng(seed).integers(0, high, shape), np.int64)
    found.flags.writeable = False
    return found


def tensor(array, dtype="float32"):
    return torch.tensor(np.array(array)).to(DEVICE, getattr(torch, dtype))


def check(got, want, dtype="float32"):
    assert got.dtype == getattr(torch, dtype), f"{got.dtype} instead of {dtype}"
    assert list(got.shape) == list(np.shape(want)), f"{list(got.shape)} not {np.shape(want)}"
    rounded = tensor(want, dtype)
    # A mean of three: CUDA multiplies by the inverse of a number that it would divide by.
    ulp = 0 if DEVICE == "cpu" or not got.is_floating_point() else torch.finfo(got.dtype).eps
    same = torch.allclose(got, rounded, rtol=ulp, atol=0)
    assert same, f"{got.tolist()} instead of {rounded.tolist()}"


class Cases:
    """The cases for one choice of axes; `self.values(shape)` are one array for each member."""

    def __init__(self, mesh, mesh_axes, axes, runtime: Any = rt):
        self.mesh, self.axes, self.rt = mesh, axes, runtime
        self.ranks = members_by_reshape(mesh_axes, axes, mesh.rank)
        self.n, self.me = len(self.ranks), self.ranks.index(mesh.rank)
        self.seed = min(self.ranks)

    def each(self, shape, dtype="float32"):
        return [integers([self.seed, r], shape, dtype) for r in self.ranks]

    def unsharded(self, shape, dtype="float32"):
        return integers([self.seed, 99], shape, dtype)

    def group(self):
        group = self.mesh.group(self.axes)
        assert list(group.ranks) == self.ranks, f"{group.ranks} instead of {self.ranks}"
        assert (group.index, group.size) == (self.me, self.n)
        assert (self.mesh.index(self.axes), self.mesh.count(self.axes)) == (self.me, self.n)

    def all_reduce(self):
        for dtype, op in itertools.product(DTYPES, REDUCE):
            if op == "mean" and dtype not in ("float32", "float64", "bfloat16", "float16"):
                continue
            for shape in SHAPES if dtype == "float32" else SHAPES[: extent(1, None)]:
                each = self.each(shape, dtype)
                x = tensor(each[self.me], dtype)
                want = REDUCE[op](np.stack(each), axis=0)
                check(self.rt.all_reduce(self.mesh, x, op, self.axes), want, dtype)
                check(x, each[self.me], dtype)  # untouched

    def special_extremes(self):
        """Each pair of special numbers on each pair of ranks: NaN wins, wherever it is."""
        special = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.5, -1.5)
        pairs = np.array(list(itertools.product(special, repeat=2)))
        for dtype, op in itertools.product(("float32", "float64", "bfloat16"), ("max", "min")):
            for first, second in itertools.permutations(range(self.n), 2):
                each = np.full((self.n, len(pairs)), math.inf if op == "min" else -math.inf)
                each[first], each[second] = pairs.T
                want = REDUCE[op](each, axis=0)
                got = self.rt.all_reduce(self.mesh, tensor(each[self.me], dtype), op, self.axes)
                found = got.double().cpu().numpy()
                assert np.array_equal(found, want, equal_nan=True), f"{op} {found} not {want}"

    def all_reduce_in_place(self):
        each = self.each((4, 3))
        x = tensor(each[self.me])
        out = self.rt.all_reduce(self.mesh, x, "sum", self.axes, donate=True)
        assert out.data_ptr() == x.data_ptr()
        check(out, sum(each))
        rows = tensor(each[self.me]).t()
        check(
            self.rt.all_reduce(self.mesh, rows, "sum", self.axes, donate=True),
            np.sum(each, axis=0).T,
        )

    def all_reduce_fused(self):
        shapes = [((3, 2), "float32"), ((), "int64"), ((0,), "float32"), ((5,), "float32")]
        each = [self.each(shape, dtype) for shape, dtype in shapes]
        xs = [tensor(e[self.me], dtype) for e, (_, dtype) in zip(each, shapes, strict=True)]
        outs = self.rt.all_reduce(self.mesh, xs, "sum", self.axes)
        for out, e, (_, dtype) in zip(outs, each, shapes, strict=True):
            check(out, sum(e), dtype)

    def all_gather(self):
        for dtype, size, dim in itertools.product(["float32", "bool"], [8, 10, 2, 1, 0], [0, 1, 2]):
            shape = [2, 3, 2]
            shape[dim] = size
            full = self.unsharded(shape, dtype)
            x = tensor(shards(full, dim, self.n)[self.me], dtype)
            out = self.rt.all_gather(self.mesh, x, dim, self.axes, total=size)
            check(out, full, dtype)
        full = self.unsharded((self.n, 70_000))  # above the size of small ones
        x = tensor(full[self.me : self.me + 1])
        check(self.rt.all_gather(self.mesh, x, 0, self.axes), full)
        x = tensor(self.unsharded((8, 2)))[:2].t()  # not contiguous
        check(self.rt.all_gather(self.mesh, x, 1, self.axes), np.tile(x.cpu().numpy(), (1, self.n)))
        for dtype in DTYPES:
            full = self.unsharded((self.n, 3), dtype)
            x = tensor(full[self.me : self.me + 1], dtype)
            check(self.rt.all_gather(self.mesh, x, 0, self.axes), full, dtype)

    def all_gather_fused(self):
        given = [((6, 3), 0, "float32"), ((2, 10), 1, "float32"), ((0, 2), 0, "float32"),
                 ((3, 8), 1, "int32")]  # fmt: skip
        values = [self.unsharded(shape, dtype) for shape, _, dtype in given]
        xs = [
            tensor(shards(w, dim, self.n)[self.me], dtype)
            for w, (_, dim, dtype) in zip(values, given, strict=True)
        ]
        dims, totals = [g[1] for g in given], [g[0][g[1]] for g in given]
        outs = self.rt.all_gather(self.mesh, xs, dims, self.axes, totals)
        for out, full, (_, _, dtype) in zip(outs, values, given, strict=True):
            check(out, full, dtype)

    def all_gather_large_fused(self):
        """Some have messages of their own, some share a buffer."""
        given = [((self.n, 70_000), 0), ((6, 3), 0), ((self.n + 1, 70_000), 0), ((2, 70_000), 1)]
        values = [self.unsharded(shape) for shape, _ in given]
        xs = [
            tensor(shards(w, dim, self.n)[self.me])
            for w, (_, dim) in zip(values, given, strict=True)
        ]
        dims, totals = [dim for _, dim in given], [shape[dim] for shape, dim in given]
        outs = self.rt.all_gather(self.mesh, xs, dims, self.axes, totals)
        for out, full in zip(outs, values, strict=True):
            check(out, full)

    def coalesced(self):
        """As on CUDA devices: by the library's collectives of several tensors. Gloo's have sums."""
        plain = blocks.is_library
        blocks.is_library = lambda x: True
        try:
            self.all_gather_large_fused()
            self.reduce_scatter_large_fused()
            each = self.each((2 * self.n, 3), "bool")
            found = self.rt.reduce_scatter(
                self.mesh, tensor(each[self.me], "bool"), "sum", 0, self.axes
            )
            check(found, shards(np.max(np.stack(each), axis=0), 0, self.n)[self.me], "bool")
        finally:
            blocks.is_library = plain

    def reduce_scatter_large_fused(self):
        given = [((self.n, 70_000), 0), ((8, 3), 0), ((self.n + 1, 70_000), 0), ((2, 70_000), 1)]
        each = [self.each(shape) for shape, _ in given]
        dims = [dim for _, dim in given]
        for op in ("sum", "mean"):
            xs = [tensor(e[self.me]) for e in each]
            xs[0] = xs[0].t().contiguous().t()  # not contiguous
            outs = self.rt.reduce_scatter(self.mesh, xs, op, dims, self.axes)
            for out, e, dim in zip(outs, each, dims, strict=True):
                want = shards(REDUCE[op](np.stack(e), axis=0), dim, self.n)[self.me]
                check(out, want)

    def reduce_scatter(self):
        for op, size, dim in itertools.product(REDUCE, [8, 10, 2, 0], [0, 1]):
            shape = [2, 3, 2]
            shape[dim] = size
            each = self.each(shape)
            x = tensor(each[self.me])
            want = shards(REDUCE[op](np.stack(each), axis=0), dim, self.n)[self.me]
            check(self.rt.reduce_scatter(self.mesh, x, op, dim, self.axes), want)
        for dtype, op in itertools.product(DTYPES, ["sum", "max", "min"]):
            each = self.each((2 * self.n + 1, 2), dtype)
            want = shards(REDUCE[op](np.stack(each), axis=0), 0, self.n)[self.me]
            x = tensor(each[self.me], dtype)
            check(self.rt.reduce_scatter(self.mesh, x, op, 0, self.axes), want, dtype)

    def reduce_scatter_fused(self):
        given = [((8, 3), 0, "float32"), ((2, 10), 1, "float32"), ((8,), 0, "int64")]
        each = [self.each(shape, dtype) for shape, _, dtype in given]
        xs = [tensor(e[self.me], dtype) for e, (_, _, dtype) in zip(each, given, strict=True)]
        outs = self.rt.reduce_scatter(self.mesh, xs, "sum", [g[1] for g in given], self.axes)
        for out, e, (_, dim, dtype) in zip(outs, each, given, strict=True):
            check(out, shards(sum(e), dim, self.n)[self.me], dtype)

    def all_to_all(self):
        for split, concat in itertools.permutations(range(3), 2):
            few = [(10, 10)] if split > concat else itertools.product([8, 10, 2], [8, 10, 2])
            for split_size, concat_size in few:
                shape = [3, 3, 3]
                shape[split], shape[concat] = split_size, concat_size
                full = self.unsharded(shape)
                x = tensor(shards(full, concat, self.n)[self.me])
                out = self.rt.all_to_all(self.mesh, x, split, concat, self.axes, concat_size)
                check(out, shards(full, split, self.n)[self.me])
        for dtype in DTYPES:
            full = self.unsharded((2 * self.n, self.n), dtype)
            x = tensor(shards(full, 1, self.n)[self.me], dtype)
            out = self.rt.all_to_all(self.mesh, x, 0, 1, self.axes)
            check(out, shards(full, 0, self.n)[self.me], dtype)

    def all_to_all_fused(self):
        given = [((8, 10), "float32"), ((10, 3), "float32"), ((5, 8), "int32")]
        values = [self.unsharded(shape, dtype) for shape, dtype in given]
        xs = [
            tensor(shards(w, 1, self.n)[self.me], dtype)
            for w, (_, dtype) in zip(values, given, strict=True)
        ]
        outs = self.rt.all_to_all(self.mesh, xs, 0, 1, self.axes, [w.shape[1] for w in values])
        for out, full, (_, dtype) in zip(outs, values, given, strict=True):
            check(out, shards(full, 0, self.n)[self.me], dtype)

    def all_slice(self):
        for size, dim in itertools.product([8, 10, 2, 0], [0, 1]):
            full = self.unsharded((size, 3) if dim == 0 else (3, size))
            out = self.rt.all_slice(self.mesh, tensor(full), dim, self.axes)
            check(out, shards(full, dim, self.n)[self.me])

    def broadcast(self):
        for dtype, root in itertools.product(DTYPES, {0, self.n - 1}):
            for shape in [(3, 2), (), (0,)]:
                each = self.each(shape, dtype)
                x = tensor(each[self.me], dtype)
                check(self.rt.broadcast(self.mesh, x, root, self.axes), each[root], dtype)

    def gather(self):
        for root, size, dim in itertools.product({0, self.n - 1}, [8, 10, 1, 0], [0, 1]):
            full = self.unsharded((size, 3) if dim == 0 else (3, size))
            x = tensor(shards(full, dim, self.n)[self.me])
            out = self.rt.gather(self.mesh, x, dim, root, self.axes, total=size)
            check(out, full if self.me == root else np.zeros_like(full))

    def scatter(self):
        for dtype, root, size, dim in itertools.product(
            ["float32", "bool"], {0, self.n - 1}, [10, 1], [0, 1]
        ):
            each = self.each((size, 3) if dim == 0 else (3, size), dtype)
            x = tensor(each[self.me], dtype)
            out = self.rt.scatter(self.mesh, x, dim, root, self.axes)
            check(out, shards(each[root], dim, self.n)[self.me], dtype)

    def permute(self):
        ring = [(k, (k + 1) % self.n) for k in range(self.n)]
        swap = [(0, self.n - 1), (self.n - 1, 0)] if self.n > 1 else [(0, 0)]
        for pairs in [ring, swap, [(0, self.n - 1)], [(k, k) for k in range(self.n)], []]:
            for dtype in ["float32", "bool", "bfloat16"]:
                each = self.each((2, 3), dtype)
                out = self.rt.permute(self.mesh, tensor(each[self.me], dtype), pairs, self.axes)
                source = {t: s for s, t in pairs}.get(self.me)
                check(out, np.zeros((2, 3)) if source is None else each[source], dtype)
        pieces = shards(self.unsharded((5, 2)), 0, self.n)  # uneven: the shape changes hands too
        mine, theirs = pieces[self.me], pieces[(self.me - 1) % self.n]
        out = self.rt.permute(self.mesh, tensor(mine), ring, self.axes, shape=theirs.shape)
        check(out, theirs)

    def send_recv(self):
        last = self.n - 1
        for shape in [(40, 3), (), (0,), (200_000,)]:
            each = self.each(shape)
            x = tensor(each[self.me])
            self.rt.send(self.mesh, x, 0, last, self.axes)  # both first send, and then receive
            self.rt.send(self.mesh, x, last, 0, self.axes)
            x.zero_()
            there = self.rt.recv(self.mesh, shape, torch.float32, 0, last, self.axes)
            back = self.rt.recv(self.mesh, shape, torch.float32, last, 0, self.axes)
            check(there, each[0] if self.me == last else np.zeros(shape))
            check(back, each[last] if self.me == 0 else np.zeros(shape))
        self.mesh.wait()

    def by_host(self):
        """As between CUDA tensors on Gloo."""
        plain = channels.is_by_host
        channels.is_by_host = lambda x: True
        try:
            self.permute()
            self.send_recv()
            self.all_gather_fused()
            self.reduce_scatter()
        finally:
            channels.is_by_host = plain

    def gather_global(self):
        for size in [8, 10, 1]:
            full = self.unsharded((size, 3))
            x = tensor(shards(full, 0, self.n)[self.me])
            check(self.rt.gather_global(self.mesh, x, [self.axes, ()], None, [size, 3]), full)
        each = self.each((2, 3))
        out = self.rt.gather_global(
            self.mesh, tensor(each[self.me]), [(), ()], ("sum", self.axes), [2, 3]
        )
        check(out, sum(each))


NAMES = [
    name for name, value in vars(Cases).items() if not name.startswith("_") and callable(value)
]
NAMES = [name for name in NAMES if name not in ("each", "unsharded")]
if DEVICE != "cpu":
    NAMES.remove("coalesced")  # Gloo's would read the memory of the GPU
# Cases that depend on the ranks of the members of a group.
FEWER = [name for name in NAMES if name.endswith("_fused")]
FEWER += ["group", "all_slice", "all_to_all", "gather", "scatter", "permute", "gather_global"]
