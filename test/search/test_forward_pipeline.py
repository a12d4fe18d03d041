"""The schedule of a forward part alone, and the bound of a graph of stages: against all orders."""

from itertools import permutations, product

import pytest
from support.extent import extent
from xdsl.context import Context
from xdsl.dialects.func import FuncOp

from shardir.algebra.schedules import Action, Schedule, check_actions, placements
from shardir.cost.report import StagedCost, report
from shardir.cost.stages import times_of_step
from shardir.diagnostics import ShardirError
from shardir.dialects import train
from shardir.pipelines import build
from shardir.syntax.parser import parse

TOWERS = """
dist.mesh @m <d = 1>
func.func private @model(
    %x: tensor<64x64xf32>, %z: tensor<64x64xf32>,
    %u: tensor<64x512xf32> {{train.parameter = "u"}},
    %v: tensor<64x2048xf32> {{train.parameter = "v"}},
    %w: tensor<512x{width}xf32> {{train.parameter = "w"}}
) -> tensor<f32> {{
  %a = nn.matmul %x, %u : (tensor<64x64xf32>, tensor<64x512xf32>) -> tensor<64x512xf32>
  %b = nn.matmul %z, %v {{train.stage = 1 : i64}}
      : (tensor<64x64xf32>, tensor<64x2048xf32>) -> tensor<64x2048xf32>
  %s = nn.reduce <sum> %b dims <0, 1> : (tensor<64x2048xf32>) -> tensor<f32>
  %c = nn.matmul %a, %w {{train.stage = 2 : i64}}
      : (tensor<64x512xf32>, tensor<512x{width}xf32>) -> tensor<64x{width}xf32>
  %r = nn.reduce <sum> %c dims <0, 1> : (tensor<64x{width}xf32>) -> tensor<f32>
  %both = nn.mul %r, %s {{train.stage = 3 : i64}} : (tensor<f32>, tensor<f32>) -> tensor<f32>
  func.return %both : tensor<f32>
}}
train.forward @f of @model accumulate <mean, microbatches = {count}> pipeline <{pipeline}>
"""
"""Stage 0 and 1 are independent; 2 reads 0; 3 reads 1 and 2."""


def _lowered(width: int, count: int, pipeline: str) -> StagedCost:
    module = parse(TOWERS.format(width=width, count=count, pipeline=pipeline))
    for p in build("train"):
        p.apply(Context(), module)
    (cost,) = (c for c in report(module, None) if isinstance(c, StagedCost))
    return cost


def _step(cost: StagedCost) -> FuncOp:
    """Return the function that a cost is of."""
    step = cost.ranks[0][0].run.op.parent_op()
    assert isinstance(step, FuncOp)
    return step


def _all_orders(placement: tuple[int, ...], count: int) -> list[Schedule]:
    """Return all orders of two ranks with two stages each."""
    ranks = []
    for rank in range(2):
        pairs = [(s, k) for s in range(4) if placement[s] == rank for k in range(count)]
        ranks.append([
            tuple(Action(s, "F", k) for s, k in order) for order in permutations(pairs)
            if all(order.index((s, k)) < order.index((s, k + 1))
                   for s, k in pairs if k + 1 < count)
        ])  # fmt: skip
    return [Schedule(4, 2, count, placement, orders) for orders in product(*ranks)]


@pytest.mark.parametrize(("width", "count"), extent([(64, 2)], [(64, 2), (512, 2), (2048, 3)]))
def test_the_schedule_that_is_found_is_the_fastest_of_all(
    width: int, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _lowered(width, count, "search, ranks = 2, chunks = 2")
    assert "split-stages: @f: from " in capsys.readouterr().err
    fastest = float("inf")
    for placement in placements(2, 2):
        kind = "looped-bfs" if placement == (0, 1, 0, 1) else "zbv"
        cost = _lowered(width, count, f"{kind}, ranks = 2, chunks = 2")
        step, mesh = _step(cost), cost.mesh
        for schedule in _all_orders(placement, count):
            check_actions(schedule)
            train.set_schedule(step, schedule)
            try:
                train.proven_order(step)
            except ShardirError:
                continue
            timed = [t for runs in times_of_step(step, mesh).ranks for t in runs]
            end = max(t.end for t in timed if t.run.action is not None)
            assert end >= cost.bound * (1 - 1e-12), schedule.csv()
            fastest = min(fastest, end)
    assert found.loop == pytest.approx(fastest, rel=1e-12)


def test_a_bound_does_not_take_a_graph_for_a_chain() -> None:
    """With one stage on each rank the order is given, and the slowest rank, of stage 1, does not
    wait for stage 0: the bound is reached."""
    cost = _lowered(64, 8, "gpipe, ranks = 4")
    assert max(range(4), key=cost.busy.__getitem__) == 1
    assert cost.ranks[1][0].begin == 0.0
    assert cost.bound == pytest.approx(cost.loop, rel=1e-12)
