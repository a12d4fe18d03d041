"""The waits of a measured call by hand: what a collective takes, and what other ranks take."""

import pytest

import shardir
from shardir.backend.torch.measured import MeasuredCall
from shardir.backend.torch.traces import SKEW, Differences, differences
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
    assert found.exposed[1] == pytest.approx(exposed)
    (skew,) = [d for d in found.parts if d.what == SKEW]
    assert skew.measured == pytest.approx(others)
    assert sum(d.measured for d in found.parts) == pytest.approx(10)
