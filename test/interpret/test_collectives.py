"""Each collective has a record, an op, numpy and text in torch; and what its record says is what
numpy does on all ranks."""

import numpy as np
import pytest
from xdsl.dialects.builtin import f64
from xdsl.ir import Block

from shardir.algebra.collectives import COLLECTIVES, AxisState, Collective, CollectiveStep, between
from shardir.algebra.layout import Layout, Shape, replicated
from shardir.algebra.notation import mesh_of
from shardir.backend.torch.ops.dist import TORCH_DIST
from shardir.dialects import dist
from shardir.interpret.collectives import NUMPY, Parts, run_collective
from shardir.interpret.values import assemble, split

MESH = mesh_of("m", "a = 2, b = 3, c = 2")
AXES = (MESH.names[1], MESH.names[0])
EVEN, UNEVEN = (12, 6), (5, 7)
PAIRS = (0, 1, 1, 0, 2, 5, 5, 3)
FEWER_DIMS = [c for c in COLLECTIVES.values() if not c.name.startswith("halo")]


def test_each_record_has_an_op_numpy_and_text_and_nothing_else_has() -> None:
    assert set(dist.OPS) == set(NUMPY) == set(COLLECTIVES)
    besides = {dist.SendOp, dist.RecvOp, dist.WaitOp, *dist.RING_PRODUCTS}
    assert set(TORCH_DIST) == {*dist.OPS.values(), *besides}
    assert all(op.name == f"dist.{name}" for name, op in dist.OPS.items())


def test_each_change_of_states_is_of_one_planned_collective() -> None:
    states = [(c.start, c.end) for c in COLLECTIVES.values() if c.start and c.planned]
    assert len(states) == len(set(states))
    assert between(AxisState.PARTIAL, AxisState.SHARDED).name == "reduce_scatter"


def step_of(record: Collective, first: int = 0) -> tuple[Layout, CollectiveStep]:
    """A step over AXES along the dimension `first`, with the layout before it."""
    plain, both = replicated("m", 2), record.start is record.end is AxisState.SHARDED
    second = 1 - first
    dim, concat = first, second if both else -1
    before = plain
    if record.start is AxisState.SHARDED or record.start is None:
        before = plain.with_dim(concat if both else first, AXES)
    elif record.start is AxisState.PARTIAL:
        before = plain.with_partial(AXES)
    if record.name == "reinterpret":  # between values of one global shape
        return plain, CollectiveStep(record.name, (), plain.with_partial(AXES, "any"))
    pairs = PAIRS if record.name == "permute" else ()
    after = plain.with_dim(second, AXES)
    step = CollectiveStep(record.name, AXES, after, dim, concat, "sum", 1, pairs)
    layout = record.after(MESH, before, step)
    return before, CollectiveStep(record.name, AXES, layout, dim, concat, "sum", 1, pairs)


def run(step: CollectiveStep, before: Layout, shape: Shape, parts: Parts) -> Parts:
    types = [dist.local(f64, shape, layout, MESH) for layout in (before, step.layout)]
    op = dist.step_op(step, Block(arg_types=types[:1]).args[0], types[1])
    return run_collective(op, [parts], MESH)[0]


KEEPING = [c for c in FEWER_DIMS if c.keeps_value]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [EVEN, UNEVEN])
@pytest.mark.parametrize("record", KEEPING, ids=lambda c: c.name)
def test_its_layout_is_what_numpy_makes(record: Collective, shape: Shape, dim: int) -> None:
    """The parts that come out are those of the same value in the layout that follows."""
    before, step = step_of(record, first=dim)
    value = np.arange(np.prod(shape), dtype=float).reshape(shape)
    after = run(step, before, shape, split(value, before, MESH))
    np.testing.assert_array_equal(assemble(after, step.layout, MESH, shape), value)
    for rank, part in enumerate(after):
        held = step.layout.slices(MESH, shape, rank)
        assert part.shape == tuple(s.stop - s.start for s in held)


TRANSPOSED = [c for c in FEWER_DIMS if c.transposed]


@pytest.mark.parametrize("record", TRANSPOSED, ids=lambda c: c.name)
def test_the_transposed_one_is_the_adjoint(record: Collective) -> None:
    """<f(x), y> = <x, g(y)>, over what all ranks hold."""
    other = COLLECTIVES[record.transposed]
    assert other.transposed == record.name
    before, step = step_of(record)
    back = record.transpose(step, before)
    assert back.record is other
    rng = np.random.default_rng(0)
    x, y = (
        [rng.standard_normal(layout.local_shape(MESH, EVEN)) for _ in range(MESH.size)]
        for layout in (before, step.layout)
    )
    fx, gy = run(step, before, EVEN, x), run(back, step.layout, EVEN, y)
    left, right = (
        sum(float((a * b).sum()) for a, b in zip(u, v, strict=True)) for u, v in ((fx, y), (x, gy))
    )
    assert left == pytest.approx(right, rel=1e-12)
    assert abs(left) > 1e-3


def test_all_but_two_have_a_transposed_one() -> None:
    """An exchange may copy a piece to several devices; of a broadcast it is a reduction to the
    root."""
    missing = {name for name, c in COLLECTIVES.items() if not c.transposed}
    assert missing <= {"exchange", "broadcast"}
