"""Functions that emitted programs call, on one device: ops, the order of a group, padding."""

import platform
from itertools import accumulate, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.forked import run_ranks

from shardir.algebra.collectives.all_devices import MAX_PACKED
from shardir.backend.torch.shardir_runtime.collectives import buffers, reductions
from shardir.backend.torch.shardir_runtime.collectives.mesh import Group, Mesh, shard_size
from shardir.backend.torch.shardir_runtime.ops.tensors import in_slices, trust_ratio
from shardir.backend.torch.shardir_runtime.ops.updates import adagrad, adam, adamw
from shardir.cost.collective_work import MAX_WIDE


@pytest.mark.parametrize("w", [0.0, 4.0])
@pytest.mark.parametrize("u", [0.0, 9.0])
def test_a_trust_ratio_is_that_of_the_norms_or_one(w: float, u: float) -> None:
    found = trust_ratio(torch.tensor(w), torch.tensor(u), 0.5, 0.1)
    assert found.item() == pytest.approx(0.5 * 2 / (3 + 0.1 * 2) if w and u else 1.0)


@pytest.mark.parametrize("turned", range(4))
@pytest.mark.parametrize(
    ("update", "optimizer"), [(adam, torch.optim.Adam), (adamw, torch.optim.AdamW)]
)
def test_an_update_does_not_depend_on_the_order_of_elements_in_memory(
    turned: int, update: Any, optimizer: Any
) -> None:
    """The parameter, a moment or the gradient may be a transposed view; torch's optimizer, without
    a fused kernel, has the same results."""
    numbers = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1}
    given = [torch.randn(5, 7, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    w, m, v, g = given[0], torch.zeros(5, 7), torch.zeros(5, 7), given[1]
    expected = given[0].clone().requires_grad_()
    own = optimizer([expected], 0.1, (0.8, 0.9), 1e-3, 0.1, foreach=False)
    tensors = [x.t().contiguous().t() if i == turned else x for i, x in enumerate((w, m, v, g))]
    for step in (1, 2):
        expected.grad = given[step]
        own.step()
        tensors[3].copy_(given[step])
        update(*([x] for x in tensors), torch.tensor(step), 0.1, **numbers)
    torch.testing.assert_close(tensors[0], expected.detach())


@pytest.mark.parametrize(
    ("update", "optimizer"), [(adam, torch.optim.Adam), (adamw, torch.optim.AdamW)]
)
def test_an_update_in_bf16_is_that_of_exact_numbers(update: Any, optimizer: Any) -> None:
    """Of the same states and gradient in double precision, rounded once."""
    numbers = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1}
    w, g = torch.randn(2, 500, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = w.double().requires_grad_()
    own = optimizer([expected], 0.1, (0.8, 0.9), 1e-3, 0.1, foreach=False)
    expected.grad = g.double()
    own.step()
    zeros = torch.zeros_like(w), torch.zeros_like(w)
    update([w], *([x] for x in zeros), [g], torch.tensor(1), 0.1, **numbers)
    torch.testing.assert_close(w, expected.detach().bfloat16(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("turned", range(3))
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1, dtype=torch.float64)])
def test_adagrad_does_not_depend_on_the_order_of_elements_in_memory(turned: int, lr: Any) -> None:
    given = [torch.randn(5, 7, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    expected = given[0].clone().requires_grad_()
    own = torch.optim.Adagrad([expected], 0.1, weight_decay=0.1, eps=1e-3, foreach=False)
    w, total, g = (x.clone().t().contiguous().t() if i == turned else x.clone()
                   for i, x in enumerate((given[0], torch.zeros(5, 7), given[1])))  # fmt: skip
    for step in (1, 2):
        expected.grad = given[step]
        own.step()
        g.copy_(given[step])
        adagrad([w], [total], [g], lr, eps=1e-3, weight_decay=0.1)
    torch.testing.assert_close(w, expected.detach())
    torch.testing.assert_close(total, own.state[expected]["sum"])


def test_torch_has_the_ranks_of_a_group_by_number() -> None:
    for ranks in permutations((1, 3, 4)):
        group = Group(ranks, 3, None)
        assert buffers.to_torch_order(group, list(ranks)) == [1, 3, 4]
        assert (group.ranks[group.index], group.in_order) == (3, ranks == (1, 3, 4))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("total", [0, 1, 5, 6])
@pytest.mark.parametrize("dim", [0, 1])
def test_padded_shards_are_joined_without_their_padding(count: int, total: int, dim: int) -> None:
    x = torch.arange(2.0 * total).view((total, 2) if dim == 0 else (2, total))
    shards = [x.narrow(dim, a, b - a) for a, b in buffers.all_bounds(total, count)]
    blocks = [buffers.pad_to(s, dim, shard_size(total, count)) for s in shards]
    assert torch.equal(buffers.join_blocks(blocks, dim, total), x)


@pytest.mark.parametrize("slices", [(3, 0, 4, 2), (5, 4), (9,)])
def test_an_index_out_of_its_slice_is_named_with_its_place(slices: tuple[int, ...]) -> None:
    """Of 4 x 4 indices over 2 x 2 devices, dimension 1 is that of the fields."""
    ends = [*accumulate(slices)]
    of_fields = [slice(ends[f * len(slices) // 4] - slices[f * len(slices) // 4],
                       ends[f * len(slices) // 4]) for f in range(4)]  # fmt: skip
    rng = np.random.default_rng(len(slices))
    for _ in range(20):
        ids = rng.integers(-1, 11, (4, 4))
        for row, column in ((0, 0), (0, 2), (2, 0), (2, 2)):
            mine = torch.tensor(ids[row : row + 2, column : column + 2])
            wrong = [
                (r, c) for r in (row, row + 1) for c in (column, column + 1)
                if not of_fields[c].start <= ids[r, c] < of_fields[c].stop
            ]  # fmt: skip
            if not wrong:
                assert in_slices(mine, 1, slices, 4, (row, column)) is mine
                continue
            r, c = wrong[0]
            low, high = of_fields[c].start, of_fields[c].stop - 1
            place = rf"index {ids[r, c]} at \[{r}, {c}\] is out .* from {low} to {high}$"
            with pytest.raises(IndexError, match=place):
                in_slices(mine, 1, slices, 4, (row, column))


# ---- reductions ----

FLOATS = [np.nan, -np.inf, -3.0, -1e-40, -0.0, 0.0, 1e-40, 2.5, np.inf]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("op", ["max", "min"])
def test_integers_in_the_order_of_floats_have_numpys_extremes(op: str, dtype: str) -> None:
    """Of each two floats, NaN among them: the transport reduces the integers."""
    x = torch.tensor(FLOATS, dtype=getattr(torch, dtype))
    pairs = [side.reshape(-1) for side in torch.meshgrid(x, x, indexing="ij")]
    reduced = getattr(torch, f"{op}imum")(*(reductions._to_ordered(t, op) for t in pairs))
    wanted = getattr(np, f"{op}imum")(*(t.double().numpy() for t in pairs))
    found = reductions._from_ordered(reduced).to(x.dtype).double().numpy()
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_an_all_reduce_of_equal_values(
    op: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum is that of all ranks, a mean or an extreme the value."""

    def transport(x: torch.Tensor, how: object, **_: object) -> None:
        if how == torch.distributed.ReduceOp.SUM:
            x.mul_(ranks)

    monkeypatch.setattr(torch.distributed, "all_reduce", transport)
    mesh, x = Mesh([("d", ranks)]), torch.tensor([1.5, -2.0])
    mesh._groups["d",] = Group(range(ranks), 0, None)
    found = reductions.all_reduce(mesh, x, op, ("d",))
    assert torch.equal(found, x * ranks if op == "sum" else x)


def number_of(program: str, folder: Path) -> int:
    """Return the number that a program prints, in a process that is forked as a rank."""
    (folder / "program.py").write_text(program)
    (output,) = run_ranks(folder / "program.py", 1, [], 60)
    assert output.split()[0].lstrip("-").isdigit(), output
    return int(output.split()[0])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a rule of glibc's allocator")
def test_a_rank_maps_the_pages_of_large_tensors_once(tmp_path: Path) -> None:
    """96 MiB in tensors of 4 are 24,576 pages of 4 KB, of which glibc's own rule may return those
    beyond 8 MiB after each step."""
    program = """
import resource, sys
import numpy, torch
from shardir.backend.torch.shardir_runtime.run import process
process.retain_memory()
def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    before = pages()
    step = [torch.ones(1 << 20) for _ in range(24)]
    del step
    mapped = pages() - before
print(mapped)
"""
    assert number_of(program, tmp_path) <= 100


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc's allocator")
def test_collectives_retain_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would retain about 500 B of each of the last 2,000 collectives, in pieces among tensors
    that are freed and made again: these would need new pages."""
    program = """
import ctypes, os, sys
import torch, torch.distributed as dist
from shardir.backend.torch.shardir_runtime.run import process
process.retain_memory()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
class Mallinfo(ctypes.Structure):
    _fields_ = [(f"field_{i}", ctypes.c_size_t) for i in range(10)]
mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Mallinfo
x = torch.ones(64)
for i in range(400):
    if i == 200:
        before = mallinfo().field_7  # bytes in use
    dist.all_reduce(x)
print(mallinfo().field_7 - before, flush=True)
os._exit(0)  # a thread of the process group may abort an interpreter that is finalized
"""
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    assert number_of(program, tmp_path) <= 50_000


def test_the_memory_of_collectives_is_predicted_with_the_sizes_of_the_runtime() -> None:
    assert (MAX_PACKED, MAX_WIDE) == (buffers.PACKED, reductions.WIDE)


@pytest.mark.parametrize("more", [-1, 0, 1, reductions.WIDE + 3])
def test_short_floats_of_several_ranks_are_summed_in_f32(more: int) -> None:
    """In any number of pieces. 256 + 1 is 256 in bf16, so that 256 + 1 + 1 would be too."""
    n = reductions.WIDE + more
    rows = torch.tensor([[256.0], [1.0]]).expand(2, n).to(torch.bfloat16)
    own = torch.arange(n).remainder(2).to(torch.bfloat16)
    out = torch.empty(n, dtype=torch.bfloat16)
    reductions._reduce_rows(rows, own, torch.distributed.ReduceOp.SUM, out)
    expected = (256 + np.arange(n) % 2 * 2).astype(np.float32)
    assert out.equal(torch.from_numpy(expected).to(torch.bfloat16))
