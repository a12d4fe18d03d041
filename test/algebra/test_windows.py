"""Windows of a split dimension: the elements of each device's windows, and the halo that moves."""

import random
from types import SimpleNamespace

import pytest
from support.extent import sampled
from support.harness import Arg, collectives, compiled, function, laid_out, layout, parts, problem

from shardir.algebra.mesh import shard_bounds
from shardir.algebra.notation import mesh_of
from shardir.algebra.windows import Windows
from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.backend.torch.shardir_runtime.ops import windows as ops_windows
from shardir.dialects import dist, nn
from shardir.dialects.nn.base import unsharded_type
from shardir.dialects.nn.movement import IntsPerDimAttr

FOUR = mesh_of("m", "d = 4")


def some_windows(draw: random.Random) -> Windows:
    return Windows(
        draw.randrange(0, 20), draw.randrange(0, 9), draw.randrange(1, 7), draw.randrange(1, 7),
        draw.randrange(-8, 8),
    )  # fmt: skip


@pytest.mark.parametrize("seed", sampled(range(60), 12))
def test_the_holders_of_the_elements_of_windows(seed: int):
    """Each element once, in order, with the device that has it."""
    draw = random.Random(seed)
    w, n = some_windows(draw), draw.choice([1, 2, 3, 4, 6])
    owner = {r: k for k in range(n) for r in range(*shard_bounds(w.rows, n, k))}
    maximum = 0
    for k in range(n):
        rows = {
            w.offset + p * w.step + i
            for p in range(*shard_bounds(w.count, n, k))
            for i in range(w.size)
        } & set(owner)
        found = [(r, run.holder) for run in w.needed(n, k) for r in range(run.start, run.stop)]
        assert found == sorted((r, owner[r]) for r in rows)
        maximum = max(maximum, sum(owner[r] != k for r in rows))
    assert w.halo(n) == maximum


@pytest.mark.parametrize("seed", sampled(range(60), 12))
def test_the_runtime_fetches_what_is_needed_and_no_more(seed: int, monkeypatch):
    """All ranks receive the elements that others send them, at most as many as the halo has."""
    draw = random.Random(seed)
    w, n = some_windows(draw), draw.choice([2, 3, 4])
    monkeypatch.setattr(rt.Mesh, "group", lambda mesh, axes: SimpleNamespace(process_group=None))
    numbers = w.rows, w.count, w.size, w.step, w.offset
    meshes = [rt.Mesh([("d", n)], rank) for rank in range(n)]
    plans = [ops_windows._transfers_of(mesh, ("d",), *numbers) for mesh in meshes]
    ops_windows._transfers.clear()
    for k, plan in enumerate(plans):
        for j, other in enumerate(plans):
            given = [(a + plan.rows[0], b + plan.rows[0]) for a, b in plan.given[j]]
            taken = [(a + other.first, b + other.first) for a, b in other.taken[k]]
            assert given == taken
    received = [sum(b - a for runs in p.taken for a, b in runs) for p in plans]
    assert max(received) == w.halo(n)


def conv2d(b, x, w):
    props = {"padding": IntsPerDimAttr((2, 2, 1, 1))}
    return b.value(nn.ConvOp, x, w, props=props)


def test_a_split_convolution_moves_its_halo():
    """Of 16 rows over 4 devices a kernel of 5 rows needs 2 of each neighbour; backward the partial
    values of the cotangent's same rows return to their holders. Nothing is gathered."""
    p = problem([Arg("f64", (2, 3, 16, 6)), Arg("f64", (4, 3, 5, 3))], conv2d, (0, 1))
    text = layout("[{}, {}, {d}, {}]", FOUR)
    module = compiled(laid_out(p.module, FOUR, [text, layout("[{}, {}, {}, {}]", FOUR)]))
    assert not p.errors(module)
    forward, backward = parts(module, "g")
    assert collectives(forward) == {"halo_unfold": 1}
    assert collectives(backward) == {"halo_fold": 1, "all_reduce": 1}
    (halo,) = (op for op in forward if isinstance(op, dist.HaloUnfoldOp))
    windows = halo.windows(halo.values[0], halo.outs[0], FOUR)
    assert windows == Windows(16, 4, 8, 4, -2)
    assert windows.halo(4) == 4
    assert [sum(r.stop - r.start for r in windows.needed(4, k)) for k in range(4)] == [6, 8, 8, 6]


SIZES = [(n, k, s, lo, hi, d) for n in (1, 2, 5, 8, 11) for k, s, lo, hi, d in (
    (3, 1, 1, 1, 1), (2, 2, 0, 0, 1), (3, 2, 1, 0, 1), (2, 1, 0, 3, 3), (5, 3, 4, 4, 1),
    (1, 2, 0, 0, 1), (3, 4, 2, 2, 2),
) if n + lo + hi > d * (k - 1)]  # fmt: skip


@pytest.mark.parametrize("n, k, s, lo, hi, d", sampled(SIZES, 8))
@pytest.mark.parametrize("text", ["[{}, {}, {d}]", "[{}, {}, {e, d}]", "[{d}, {}, {e}]"])
def test_a_convolution_over_any_split_rows(text: str, n, k, s, lo, hi, d):
    """Whatever the size, stride, padding and dilation, empty shards included; forward and
    gradient, and those of the transposed convolution and of the weight's gradient."""
    mesh = mesh_of("m", "d = 3, e = 2")
    props = {
        "stride": IntsPerDimAttr((s,)), "padding": IntsPerDimAttr((lo, hi)),
        "dilation": IntsPerDimAttr((d,)),
    }  # fmt: skip
    positions = (n + lo + hi - d * (k - 1) - 1) // s + 1
    x, w, y = (2, 2, n), (3, 2, k), (2, 3, positions)

    def both(b, x_, w_):
        made = b.value(nn.ConvOp, x_, w_, props=props)
        back = b.value(
            nn.ConvTransposeOp, made, w_, props=props, result=dist.tensor(x_.type.element_type, x)
        )
        again = b.value(
            nn.ConvWeightOp, back, made, props=props, result=dist.tensor(w_.type.element_type, w)
        )
        return made, back, again

    p = problem([Arg("f64", x), Arg("f64", w)], both, (0, 1))
    assert tuple(p.wanted[0].shape) == y
    module = compiled(laid_out(p.module, mesh, [layout(text, mesh), layout("[{}, {}, {}]", mesh)]))
    assert not p.errors(module)
    gathers = [o for o in function(module, "f").body.block.ops if isinstance(o, dist.AllGatherOp)]
    shapes = {unsharded_type(v).get_shape() for o in gathers for v in o.outs}
    assert shapes <= {w}  # where the weight's gradient is reduced, scattered and gathered


@pytest.mark.parametrize("kind", [nn.MaxPoolOp, nn.AvgPoolOp])
def test_a_split_pool_moves_its_halo(kind: type):
    """The rows under a device's windows that others have; backward, partial gradients return."""
    numbers = {"window": (3, 2), "stride": (2, 2), "padding": (1, 1, 0, 0)}
    props = {n: IntsPerDimAttr(v) for n, v in numbers.items()}
    p = problem([Arg("f64", (2, 3, 16, 6))], lambda b, x: b.value(kind, x, props=props), (0,))
    module = compiled(laid_out(p.module, FOUR, [layout("[{}, {}, {d}, {}]", FOUR)]))
    assert not p.errors(module)
    forward, backward = parts(module, "g")
    assert collectives(forward) == {"halo_unfold": 1}
    assert collectives(backward) == {"halo_fold": 1}
    (halo,) = (op for op in forward if isinstance(op, dist.HaloUnfoldOp))
    assert halo.windows(halo.values[0], halo.outs[0], FOUR).halo(4) == 1
