"""The time of a step in stages: that of the schedule's own simulation, which knows no program."""

from itertools import pairwise

import pytest
from support.extent import extent
from support.staged_steps import ends_of_loop, step_in_stages
from xdsl.context import Context
from xdsl.dialects.func import FuncOp

from shardir.algebra.schedules import PipelineCosts, Schedule, simulate
from shardir.cost.report import StagedCost, report
from shardir.dialects import train
from shardir.pipelines import build
from shardir.syntax.parser import parse

SCHEDULES = (
    "1f1b, ranks = 4", "interleaved, ranks = 2, chunks = 2", "zbv, ranks = 4, chunks = 2",
    "zb-h1, ranks = 4", "gpipe, ranks = 8", "dualpipev, ranks = 2, chunks = 2",
)  # fmt: skip

MASKED = """
dist.mesh @m <d = 2>
func.func private @loss(%x: tensor<8x4xf32> {train.input = #train.init<normal>},
    %v: tensor<4x4xf32> {train.parameter = "v"}, %w: tensor<4x4xf32> {train.parameter = "w"}
) -> tensor<f32> {
  %s = nn.softmax %v axis 1 : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %h = nn.matmul %x, %s : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
  %y = nn.matmul %h, %w {train.stage = 1 : i64}
      : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
  %loss = nn.reduce <mean> %y dims <0, 1> : (tensor<8x4xf32>) -> tensor<f32>
  func.return %loss : tensor<f32>
}
train.step @step of @loss <sgd, lr = 0.1> accumulate <mean, microbatches = 4>
    pipeline <1f1b, ranks = 2>
"""


def costs_of(cost: StagedCost, schedule: Schedule) -> PipelineCosts:
    """The costs of the stages, by what each function and transfer took."""
    seconds: dict[tuple[str, int], float] = {}
    for begin, end, run in (t for runs in cost.ranks for t in runs):
        if (action := run.action) is not None:
            seconds[action.kind, action.stage] = end - begin
    stages = range(schedule.stages)
    moved = [0.0] * (schedule.stages - 1)
    for c in cost.ops:
        if isinstance(op := c.op, train.TransferOp):
            pair = sorted((op.source.value.data, *op.targets.data))
            assert pair[1] == pair[0] + 1
            moved[pair[0]] = c.seconds / schedule.microbatches
    return PipelineCosts(
        tuple(seconds["F", s] for s in stages),
        tuple(seconds.get(("I", s), seconds.get(("B", s), 0.0)) for s in stages),
        tuple(seconds.get(("W", s), 0.0) for s in stages),
        tuple(moved), (0.0,) * schedule.stages,
    )  # fmt: skip


@pytest.mark.parametrize("pipeline", extent(SCHEDULES[:3], SCHEDULES))
def test_the_loop_takes_the_time_of_its_schedule(pipeline: str) -> None:
    cost = step_in_stages(pipeline, 4)
    step = cost.ranks[0][0].run.op.parent_op()
    assert isinstance(step, FuncOp)
    text = train.schedule_of(step)
    assert text is not None
    schedule = Schedule.parse(text)
    wanted = simulate(schedule, costs_of(cost, schedule)).makespan
    assert ends_of_loop(cost) == pytest.approx(wanted, rel=1e-12)
    assert ends_of_loop(cost) < cost.seconds < sum(cost.busy) + ends_of_loop(cost)
    assert cost.svg().count("<title>") == sum(
        t.run.action is not None for runs in cost.ranks for t in runs
    )


def test_a_rank_runs_one_function_at_a_time_and_reads_what_is_there() -> None:
    cost = step_in_stages("1f1b, ranks = 4", 4, skip=True)
    ends = {t.run: t.end for runs in cost.ranks for t in runs}
    for runs in cost.ranks:
        for before, after in pairwise(runs):
            assert before.end <= after.begin
    sent = 0
    for begin, _, run in (t for runs in cost.ranks for t in runs):
        for v in run.op.operands:
            if isinstance(v.owner, train.TransferOp):
                maker = next(r for r in ends if v.owner.x in r.op.results)
                made = ends[maker._replace(microbatch=run.microbatch)]
                assert begin > made
                sent += 1
    assert sent >= 4 * 7  # %first, and between neighbours in both directions


def test_what_is_computed_once_is_there_for_all_microbatches() -> None:
    """A mask, which depends on no input, is made before the loop."""
    module = parse(MASKED)
    for p in build("train"):
        p.apply(Context(), module)
    (cost,) = [c for c in report(module) if isinstance(c, StagedCost)]
    made = [run for runs in cost.ranks for _, _, run in runs if run.action is None]
    assert any("begin" in run.op.callee.string_value() for run in made)
    assert len(cost.ranks[0]) >= 1 + 2 * 4
