"""The starts of collectives, and which of them computation hides enough."""

from math import ceil

import pytest
from xdsl.ir import Operation

import shardir
from shardir.algebra.mesh import Mesh
from shardir.cost.functions import functions
from shardir.cost.overlap import Costs, StartSchedule, Timeline, hideable_collectives, startable_ops

PRODUCT, SENDING = 0.128, 0.032
"""The seconds of a product of 4 x 4, and of the bytes of a collective of that size."""
FULL = "tensor<4x4xf32, #dist.local<@m, [{}, {}]>>"
GATHER = ("dist.all_gather %x dim 0", "tensor<2x4xf32, #dist.local<@m, [{b}, {}]>>", 1)
REDUCE = (
    "dist.all_reduce <sum> %x", "tensor<4x4xf32, #dist.local<@m, [{}, {}], partial sum {b}>>", 2
)  # fmt: skip
"""The collective, the type of its operand, and how often its bytes are sent."""


def beside(
    kind: tuple[str, str, int], products: int, latency: float
) -> tuple[list[Operation], Timeline]:
    """Return a function of a collective and products, of which an addition takes the results."""
    op, operand, _ = kind
    levels = f"b = 2 {{bandwidth = 1e3, latency = {latency}}}"
    lines = [f"%g = {op} over <b> : ({operand}) -> {FULL}"]
    lines += [f"%p{i} = nn.matmul %w, %w : ({FULL}, {FULL}) -> {FULL}" for i in range(products)]
    lines.append(f"%s = nn.add %g, %p{products - 1} : ({FULL}, {FULL}) -> {FULL}")
    text = (
        f"dist.cluster @c <levels [{levels}], flops {{f32 = 1e3}}>\n"
        f"dist.mesh @m <b = 2> on @c\nfunc.func @f(%x: {operand}, %w: {FULL}) -> {FULL} {{\n"
        + "".join(f"  {line}\n" for line in lines) + f"  func.return %s : {FULL}\n}}"
    )  # fmt: skip
    ((f, mesh),) = functions(shardir.compile(text, "").module)
    assert isinstance(mesh, Mesh)
    ops = list(f.body.block.ops)
    return ops, Timeline(ops, Costs(ops, mesh))


@pytest.mark.parametrize("part", [0.01, 0.04, 0.049, 0.051, 0.1, 0.9])
@pytest.mark.parametrize("products", [1, 3])
def test_a_twentieth_has_to_be_hidden(products: int, part: float) -> None:
    latency = products * PRODUCT / part - SENDING
    ops, timeline = beside(GATHER, products, latency)
    found = hideable_collectives(ops, startable_ops(ops, timeline.mesh), timeline)
    assert len(found) == (part > 0.05)


@pytest.mark.parametrize("products", [1, 2, 3, 6])
@pytest.mark.parametrize("latency", [0.01, 0.2, 0.5])
def test_what_grows_starts_late_and_what_does_not_at_once(products: int, latency: float) -> None:
    """An all-gather starts before the last products that take as long as it does, so that its
    result is not held longer; an all-reduce where its operand is available."""
    for kind in (GATHER, REDUCE):
        ops, timeline = beside(kind, products, latency)
        found = hideable_collectives(ops, startable_ops(ops, timeline.mesh), timeline)
        schedule = StartSchedule(ops, timeline, found)
        (start,) = schedule.starts.values()
        late = max(0, products - ceil((latency + SENDING) / PRODUCT))
        assert start == (late if kind is GATHER else 0)
        assert all(map(schedule.hides, schedule.in_order()))
