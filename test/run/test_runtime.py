# ruff: noqa: E402 (torch may not be installed)
"""The runtime of emitted programs: collectives on real Gloo ranks, shards, and random numbers."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from support.extent import extent
from support.forked import run_ranks

torch = pytest.importorskip("torch")

from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.backend.torch.shardir_runtime.ops import random as torch_random
from shardir.dialects import random as numpy_random


@pytest.mark.parametrize(
    ("mesh", "backend"),
    extent(
        [("d=3", "gloo"), ("dp=2,tp=2", "shm")],
        [*product(("d=2", "dp=2,tp=2", "d=3", "d=8"), ("gloo", "shm"))],
    ),
)
def test_collectives_equal_slices_of_the_global_array(mesh, backend, tmp_path):
    """Every collective, type, uneven and empty shard, order of axes and sub-axis in one run."""
    world = int(np.prod([int(axis.split("=")[1]) for axis in mesh.split(",")]))
    program = Path(__file__).parent / "collectives_rank.py"
    compared = world == 2  # of more ranks some send messages, and others do not
    given = [mesh, tmp_path / "store", backend]
    for rank, out in enumerate(run_ranks(program, world, given, 100, compared)):
        assert f"rank {rank}: all passed" in out, out


def test_bounds():
    assert [rt.bounds(10, 4, k) for k in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [rt.bounds(5, 4, k) for k in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert rt.bounds(0, 4, 2) == (0, 0)


def test_one_rank_never_communicates():
    mesh = rt.Mesh([("dp", 1), ("tp", 1)])  # no process group exists: any message would fail
    x, axes = torch.ones(4, 2), ("dp", "tp")
    for out in [
        rt.all_reduce(mesh, x, "mean", axes),
        *rt.all_reduce(mesh, [x, x], "sum", axes),
        rt.all_gather(mesh, x, 1, axes, total=2),
        rt.reduce_scatter(mesh, x, "max", 0, axes),
        rt.all_to_all(mesh, x, 0, 1, axes),
        rt.all_slice(mesh, x, 0, axes),
        rt.broadcast(mesh, x, 0, axes),
        rt.gather(mesh, x, 0, 0, axes),
        rt.scatter(mesh, x, 0, 0, axes),
        rt.permute(mesh, x, [(0, 0)], axes),
        rt.gather_global(mesh, x, [axes, ()], ("sum", axes), [4, 2]),
    ]:
        assert torch.equal(out, x)
    assert torch.equal(rt.permute(mesh, x, [], axes), torch.zeros(4, 2))
    rt.send(mesh, x, 0, 0, axes)
    assert torch.equal(rt.recv(mesh, (4, 2), torch.float32, 0, 0, axes), x)


def test_a_mean_of_integers_is_refused():
    mesh = rt.Mesh([("d", 2)])
    mesh._groups["d",] = rt.Group([0, 1], 0, None)
    with pytest.raises(TypeError, match=r"for a mean, got torch\.int64"):
        rt.all_reduce(mesh, torch.ones(2, dtype=torch.int64), "mean", ("d",))


# ---- random numbers --------------------------------------------------------------------------

KINDS = {
    "normal": ("normal", {"mean": 0.1, "std": 0.02}, "float32"),
    "normal in f64": ("normal", {"mean": 0.0, "std": 1.0}, "float64"),
    "normal in f16": ("normal", {"mean": 0.0, "std": 1.0}, "float16"),
    "uniform": ("uniform", {"low": -1.0, "high": 2.0}, "float32"),
    "uniform in f64": ("uniform", {"low": -1.0, "high": 2.0}, "float64"),
    "integers": ("integers", {"low": -3, "high": 1000}, "int64"),
    "integers in i32": ("integers", {"low": 0, "high": 10}, "int32"),
    "booleans": ("integers", {"low": 0, "high": 2}, "bool"),
    "constant": ("constant", {"value": 1.5}, "float32"),
    "values": ("values", {"data": list(range(30 * 70 * 11))}, "int64"),
}


@pytest.mark.parametrize("name", KINDS)
def test_any_part_has_the_same_bits_in_torch_and_numpy(name):
    kind, params, dtype = KINDS[name]
    shape, of_torch, of_numpy = (30, 70, 11), getattr(torch, dtype), np.dtype(dtype)
    full = numpy_random.fill(kind, params, shape, None, "0/w", of_numpy)
    assert full.dtype == of_numpy
    for slices in [
        [(0, 30), (0, 70), (0, 11)],
        [(7, 30), (33, 69), (2, 11)],
        [(3, 3), (0, 70), (1, 2)],
    ]:
        want = full[tuple(np.s_[a:b] for a, b in slices)]
        ours = torch_random.fill(kind, params, shape, slices, "0/w", of_torch)
        assert ours.numpy().tobytes() == want.tobytes()
        again = numpy_random.fill(kind, params, shape, slices, "0/w", of_numpy)
        assert again.tobytes() == want.tobytes()


def test_samples_have_their_distributions():
    normal = numpy_random.fill("normal", {"mean": 0, "std": 1}, (200_000,), None, "k", np.float64)
    moments = [(normal**power).mean() for power in (1, 2, 3, 4)]
    np.testing.assert_allclose(moments, [0, 1, 0, 3], atol=0.05)
    assert abs(np.corrcoef(normal[:-1], normal[1:])[0, 1]) < 0.01
    inside = [(np.abs(normal) < width).mean() for width in (1, 2, 3)]
    np.testing.assert_allclose(inside, [0.6827, 0.9545, 0.9973], atol=0.004)
    integers = numpy_random.fill("integers", {"low": 2, "high": 5}, (9000,), None, "k", np.int64)
    assert np.bincount(integers)[:2].sum() == 0
    assert np.bincount(integers)[2:].min() > 2800
    other = numpy_random.fill("normal", {"mean": 0, "std": 1}, (200_000,), None, "l", np.float64)
    assert abs(np.corrcoef(normal, other)[0, 1]) < 0.01


def test_scalars_extremes_and_bf16():
    scalar = torch_random.fill("normal", {"mean": 0, "std": 1}, (), [], "k")
    twin = numpy_random.fill("normal", {"mean": 0, "std": 1}, (), None, "k")
    assert scalar.item() == twin.item()
    bits = np.array([0, 2**64 - 1, 2**32 - 1, 2**64 - 2**32], dtype=np.uint64)
    extremes = numpy_random._normal(bits)
    assert np.isfinite(extremes).all()
    assert np.abs(extremes).max() < 7
    assert torch_random._normal(torch.tensor(bits.view(np.int64))).tolist() == extremes.tolist()
    small = torch_random.fill(
        "normal", {"mean": 0, "std": 1}, (64,), [(0, 64)], "k", torch.bfloat16
    )
    large = torch_random.fill("normal", {"mean": 0, "std": 1}, (64,), [(0, 64)], "k")
    assert torch.equal(small, large.bfloat16())
