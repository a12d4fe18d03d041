"""The waits of a measured call by hand: what a collective takes, and what other ranks take."""

import pytest

import shardir
from shardir.backend.torch.measured import MeasuredCall
from shardir.backend.torch.traces import EXPOSED, SKEW, Differences, differences
from shardir.cost.simulator import COMPUTE, SimulatedEvent, simulate

SUM = """
dist.mesh @m <a = 4>
#one = #dist.local<@m, [{}]>
#sum = #dist.local<@m, [{}], partial sum {a}>
func.func @f(%x: tensor<8xf32, #sum>) -> tensor<8xf32, #one> {
  %y = dist.all_reduce <sum> %x over <a> : (tensor<8xf32, #sum>) -> tensor<8xf32, #one>
  func.return %y : tensor<8xf32, #one>
}
"""

BETWEEN = """
dist.mesh @m <a = 4>
#one = #dist.local<@m, [{}]>
#sum = #dist.local<@m, [{}], partial sum {a}>
func.func @f(%x: tensor<8xf32, #sum>) -> tensor<8xf32, #one> {
  %y = dist.all_reduce <sum> %x over <a> : (tensor<8xf32, #sum>) -> tensor<8xf32, #one>
  %z = nn.exp %y : (tensor<8xf32, #one>) -> tensor<8xf32, #one>
  %u = dist.broadcast %z from 0 over <a> : (tensor<8xf32, #one>) -> tensor<8xf32, #one>
  func.return %u : tensor<8xf32, #one>
}
"""
ALONE = """
dist.mesh @m <a = 4>
#one = #dist.local<@m, [{}]>
func.func @f(%x: tensor<8xf32, #one>) -> tensor<8xf32, #one> {
  %y = nn.exp %x : (tensor<8xf32, #one>) -> tensor<8xf32, #one>
  func.return %y : tensor<8xf32, #one>
}
"""


def of_spans(*spans: tuple[float, float]) -> Differences:
    """Of a call on each rank that is in the all-reduce in a span of it, and ends at 10 s."""
    (simulation,) = simulate(shardir.compile(SUM, "").module)
    (cost,) = simulation.cost.ops
    calls = [
        [
            MeasuredCall(0.0, 10.0, [
                SimulatedEvent(COMPUTE, *span, cost, waits=True),
                SimulatedEvent("links: machine", *span, cost),
            ], [])
        ]
        for span in spans
    ]  # fmt: skip
    return differences(simulation, calls)


@pytest.mark.parametrize(
    ("spans", "exposed", "others"),
    [
        ([(1, 5)] * 4, 4.0, 0.0),
        # the last rank begins at 4 s
        ([(1, 5), (2, 5), (3, 5), (4, 5)], 1.0, (3 + 2 + 1) / 4),
        # two ranks have left at 3 s, and compute when the others get a core
        ([(1, 2), (1, 3), (1, 6), (1, 7)], (1 + 2 + 2 + 2) / 4, (3 + 4) / 4),
        # one rank begins when others wait for a core
        ([(1, 6), (1, 6), (5, 6), (1, 9)], 1.0, (4 + 4 + 4 + 3) / 4),
    ],
)
def test_waits_for_other_ranks_are_apart(
    spans: list[tuple[float, float]], exposed: float, others: float
) -> None:
    found = of_spans(*spans)
    (mine,) = [d for d in found.parts if d.kind == EXPOSED]
    (skew,) = [d for d in found.parts if d.what == SKEW]
    assert mine.measured == pytest.approx(exposed)
    assert skew.measured == pytest.approx(others)
    assert sum(d.measured for d in found.parts) == pytest.approx(10)


@pytest.mark.parametrize(("work", "more"), [(1.5, 0.5), (0.5, -0.5)])
def test_computation_takes_its_work_and_the_rest_is_for_others(work: float, more: float) -> None:
    """Two collectives of 1 s with an op of 1 s between, which takes more or less while others
    compute or wait."""
    (simulation,) = simulate(shardir.compile(BETWEEN, "").module)
    first, product, second = simulation.cost.ops
    call = MeasuredCall(0.0, 3.0, [
        event for begin, cost in enumerate((first, product, second))
        for event in (
            SimulatedEvent(COMPUTE, begin, begin + 1, cost, waits=cost.communicates),
            *[SimulatedEvent("links: machine", begin, begin + 1, cost)] * cost.communicates,
        )
    ], [], {(product.op, 0): work})  # fmt: skip
    found = differences(simulation, [[call]] * 4)
    parts = {d.what: d.measured for d in found.parts}
    assert parts[product.op.name] == found.computed[1] == work
    assert parts[SKEW] == pytest.approx(-more)
    assert found.exposed == pytest.approx((simulation.seconds - product.seconds, 3 - work))
    assert sum(d.measured for d in found.parts) == pytest.approx(3)


def test_where_nothing_communicates_nothing_is_exposed() -> None:
    (simulation,) = simulate(shardir.compile(ALONE, "").module)
    (op,) = simulation.cost.ops
    call = MeasuredCall(0.0, 3.0, [SimulatedEvent(COMPUTE, 1.0, 2.0, op)], [], {(op.op, 0): 1.0})
    found = differences(simulation, [[call]] * 4)
    assert found.exposed == (0.0, 0.0)
    assert found.computed[1] == 1.0
