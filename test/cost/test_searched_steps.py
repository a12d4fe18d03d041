"""Steps whose schedule is searched for: as fast as any named one by the times of the step itself,
within memory, and read by torch."""

from pathlib import Path

import pytest
import torch.distributed.pipelining.schedules as theirs
from support.extent import extent
from support.staged_steps import ends_of_loop, step_in_stages
from support.torch_schedules import StageOfNone, our_actions, validates
from xdsl.dialects.func import FuncOp

from shardir.algebra.schedules import NAMES, Schedule, check
from shardir.cost.report import StagedCost
from shardir.diagnostics import ShardirError
from shardir.dialects import train

MICROBATCHES = 8


def schedule_of(cost: StagedCost) -> Schedule:
    step = cost.ranks[0][0].run.op.parent_op()
    assert isinstance(step, FuncOp)
    text = train.schedule_of(step)
    assert text is not None
    return Schedule.parse(text)


def named(ranks: int, chunks: int) -> list[StagedCost]:
    """The costs of the step with each named schedule."""
    found = []
    for name, record in NAMES.items():
        if record.chunks in (None, chunks):
            pipeline = f"{name}, ranks = {ranks}, chunks = {chunks}"
            found.append(step_in_stages(pipeline, MICROBATCHES))
    return found


@pytest.mark.parametrize(("ranks", "chunks"), extent([(2, 2)], [(4, 1), (2, 2), (4, 2), (8, 1)]))
def test_no_named_schedule_is_faster(
    ranks: int, chunks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    others = named(ranks, chunks)
    cost = step_in_stages(f"search, ranks = {ranks}, chunks = {chunks}", MICROBATCHES)
    assert ends_of_loop(cost) <= min(map(ends_of_loop, others)) * (1 + 1e-9)
    assert cost.bound <= ends_of_loop(cost) * (1 + 1e-9)
    assert all(c.bound <= ends_of_loop(c) * (1 + 1e-9) for c in others)
    check(schedule_of(cost))
    assert validates(schedule_of(cost))
    line = capsys.readouterr().err
    assert line.startswith("split-stages: @step: from ")
    assert f": {ends_of_loop(cost):.3g} s" in line


def test_a_searched_schedule_keeps_to_the_memory() -> None:
    """The memory is that of the model of the step that is made, not of the search."""
    fastest = step_in_stages("search, ranks = 2", MICROBATCHES)
    smallest = min(max(m.peak for m in c.memories) for c in named(2, 1))
    free = max(m.peak for m in fastest.memories)
    assert smallest < free
    for limit in extent([smallest], [smallest, (smallest + free) // 2]):
        cost = step_in_stages("search, ranks = 2", MICROBATCHES, options=f"{{memory={limit}}}")
        assert max(m.peak for m in cost.memories) <= limit
        assert ends_of_loop(cost) >= ends_of_loop(fastest) * (1 - 1e-9)
    with pytest.raises(ShardirError, match=r"expected a schedule within 1000 B on a device, got"):
        step_in_stages("search, ranks = 2", MICROBATCHES, options="{memory=1000}")


def test_torch_reads_the_file_of_a_schedule(tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    options = f'{{save_schedule="{file}"}}'
    cost = step_in_stages("search, ranks = 2, chunks = 2", 4, options=options)
    found = schedule_of(cost)
    runtime = theirs._PipelineScheduleRuntime([StageOfNone(2, 4, 0), StageOfNone(2, 4, 2)], 4)
    runtime._load_csv(str(file), format="compute_only")
    read = [our_actions(runtime.pipeline_order[rank]) for rank in range(2)]
    assert tuple(read) == found.orders
    again = step_in_stages("gpipe, ranks = 2, chunks = 1", 4)
    assert schedule_of(again) != found
