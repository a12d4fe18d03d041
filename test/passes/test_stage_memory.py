"""The split of a model into stages: between blocks, by the seconds of a mesh's layouts, and within
memory."""

import re
from functools import partial

import pytest
from support.extent import long_form
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp

from shardir.algebra.cluster import Cluster, Level
from shardir.algebra.mesh import Mesh
from shardir.algebra.schedules import schedule
from shardir.analysis.functions import mesh_of
from shardir.analysis.in_flight import in_flight
from shardir.cost.stages import memory_of_ranks, times_of_step
from shardir.diagnostics import Failure
from shardir.dialects import train
from shardir.pipelines import build
from shardir.search.meshes.declared_mesh import declare
from shardir.search.stages.stage_costs import unit_costs
from shardir.search.stages.stages import Segments, candidate_cuts
from shardir.syntax.parser import parse

WIDTH, ROWS = 32, 64


def program(blocks: int, pipeline: str, tp: int = 2, head: int = 1) -> ModuleOp:
    """Blocks of a product, an activation, a product and a residual connection, split over tp as
    Megatron does; and at the end `head` products more."""
    act, inner = f"tensor<{ROWS}x{WIDTH}xf32>", f"tensor<{ROWS}x{4 * WIDTH}xf32>"
    rows, columns = f"{WIDTH}x{4 * WIDTH}", f"{4 * WIDTH}x{WIDTH}"
    args, body, x = [f"%x: {act} {{train.input = #train.init<normal>}}"], [], "%x"
    for i in range(blocks):
        for name, shape, dims in (("u", rows, "{}, {tp}"), ("d", columns, "{tp}, {}")):
            t = f"tensor<{shape}xf32, #dist.layout<@m, [{dims}]>>"
            args.append(f'%{name}{i}: {t} {{train.parameter = "{name}{i}"}}')
        u, d = (f"tensor<{s}xf32, #dist.layout<@m, [{dims}]>>" for s, dims in (
            (rows, "{}, {tp}"), (columns, "{tp}, {}")))  # fmt: skip
        body += [
            f"%h{i} = nn.matmul {x}, %u{i} : ({act}, {u}) -> {inner}",
            f"%a{i} = nn.tanh %h{i} : ({inner}) -> {inner}",
            f"%y{i} = nn.matmul %a{i}, %d{i} : ({inner}, {d}) -> {act}",
            f"%r{i} = nn.tanh %y{i} : ({act}) -> {act}",
            f"%x{i} = nn.add %r{i}, {x} : ({act}, {act}) -> {act}",
        ]
        x = f"%x{i}"
    square = f"tensor<{WIDTH}x{WIDTH}xf32>"
    for i in range(head):
        args.append(f'%w{i}: {square} {{train.parameter = "w{i}"}}')
        body.append(f"%o{i} = nn.matmul {x}, %w{i} : ({act}, {square}) -> {act}")
        x = f"%o{i}"
    lines = "\n  ".join(body)
    return parse(f"""
dist.mesh @m <tp = {tp}>
func.func private @loss({", ".join(args)}) -> tensor<f32> {{
  {lines}
  %loss = nn.reduce <mean> {x} dims <0, 1> : ({act}) -> tensor<f32>
  func.return %loss : tensor<f32>
}}
train.step @step of @loss <adamw, lr = 0.1> accumulate <mean, microbatches = 4>
    pipeline <{pipeline}>
""")


def ran(module: ModuleOp, pipeline: str) -> ModuleOp:
    for p in build(pipeline):
        p.apply(Context(), module)
    return module


def stages(module: ModuleOp) -> list[list[str]]:
    """The results of the ops of each stage."""
    found: dict[int, list[str]] = {}
    for op in next(f for f in module.body.ops if isinstance(f, FuncOp)).body.block.ops:
        if (stage := train.stage_of(op)) is not None:
            found.setdefault(stage, []).append(op.results[0].name_hint or "")
    return [found[stage] for stage in sorted(found)]


def step_of(module: ModuleOp) -> FuncOp:
    return next(f for f in module.body.ops if isinstance(f, FuncOp) and train.schedule_of(f))


def peaks(module: ModuleOp) -> list[int]:
    step = step_of(module)
    mesh = mesh_of(step, module)
    assert mesh is not None
    return [use.peak for use in memory_of_ranks(step, mesh)]


def test_stages_begin_where_blocks_do() -> None:
    for ranks in (2, 4):
        found = stages(ran(program(4, f"1f1b, ranks = {ranks}"), "assign-stages"))
        each = 4 // ranks
        for stage, names in enumerate(found):
            blocks = {name[1:] for name in names if name[0] in "hayrx"}
            assert blocks == {str(i) for i in range(stage * each, (stage + 1) * each)}
    many = stages(ran(program(4, "1f1b, ranks = 8"), "assign-stages"))
    assert len(many) == 8, "blocks are cut where stages are more"


def test_first_stages_are_shorter_for_a_schedule_that_is_searched_for() -> None:
    """On links that take next to no time; with a named schedule stages are even."""

    def blocks(pipeline: str) -> list[int]:
        module = program(12, pipeline)
        levels = (Level("node", 2, 1e15, 1e-12), Level("rack", 2, 1e15, 1e-12))
        declare(module, Mesh("m", (("tp", 2),), Cluster(levels, flops=(("f32", 1e9),))))
        return [
            sum(name[0] == "x" for name in names)
            for names in stages(ran(module, "assign-stages"))
        ]  # fmt: skip

    assert blocks("zbv, ranks = 2, chunks = 2") == [3, 3, 3, 3]
    assert blocks("search, ranks = 2, chunks = 2") == [2, 2, 4, 4]


def test_seconds_are_those_of_the_layouts() -> None:
    """Of the functions that are made for the stages, forward and backward."""
    module = program(3, "1f1b, ranks = 4")
    f = next(f for f in module.body.ops if isinstance(f, FuncOp))
    ops = [op for op in f.body.block.ops if op.results]
    costs, _ = unit_costs(module, f, "step", ops, False)
    ran(module, "train")
    step = step_of(module)
    mesh = mesh_of(step, module)
    assert mesh is not None
    runs = {t for runs in times_of_step(step, mesh).ranks for t in runs if t.run.microbatch == 1}
    assert sum(costs.seconds) == pytest.approx(sum(end - begin for begin, end, _ in runs), rel=0.05)


@pytest.mark.parametrize(
    ("name", "ranks", "chunks"), [("1f1b", 4, 1), ("gpipe", 2, 1), ("zbv", 2, 2)]
)
def test_the_need_of_a_split_is_near_the_memory_of_its_step(
    name: str, ranks: int, chunks: int
) -> None:
    pipeline = f"{name}, ranks = {ranks}, chunks = {chunks}"
    module = program(4, pipeline)
    f = next(f for f in module.body.ops if isinstance(f, FuncOp))
    ops = [op for op in f.body.block.ops if op.results]
    costs, _ = unit_costs(module, f, "step", ops, False)
    cuts = candidate_cuts(ops, ranks * chunks, chunks)
    segments = Segments.of(costs, cuts)
    split = stages(ran(program(4, pipeline), "assign-stages"))
    at = [0]
    for names in split:
        at.append(at[-1] + len(names))
    bounds = [cuts.index(i) for i in at]
    s = schedule(name, ranks, 4, chunks)
    for rank, (peak, counts) in enumerate(
        zip(peaks(ran(program(4, pipeline), "train")), in_flight(s), strict=True)
    ):
        own = [(bounds[k], bounds[k + 1]) for k, r in enumerate(s.placement) if r == rank]
        assert 0.95 * peak < segments.need(counts, own) < 1.15 * peak


def test_a_split_keeps_to_the_memory() -> None:
    """The last stage of the balanced split has the most products."""
    made = partial(program, 6, "1f1b, ranks = 3", head=12)
    free = peaks(ran(made(), "train"))
    balanced = stages(ran(made(), "assign-stages"))
    limit = int(max(free) * 0.9)
    split = stages(ran(made(), f"assign-stages{{memory={limit}}}"))
    assert len(split[-1]) < len(balanced[-1])
    assert max(peaks(ran(made(), f"train{{memory={limit}}}"))) <= limit
    with pytest.raises(Failure, match=r"expected stages within 1000 B on a device, got") as e:
        ran(made(), "assign-stages{memory=1000}")
    fewest = int(re.findall(r"got (\d+) B", str(e.value))[0])
    ran(made(), f"assign-stages{{memory={fewest}}}")
    with pytest.raises(Failure, match=f"got {fewest} B"):
        ran(made(), f"assign-stages{{memory={fewest - 1}}}")


@long_form
def test_a_search_keeps_each_rank_to_the_memory() -> None:
    """The limit is of what a rank has of the stages, not of the step in one stage; where the
    fastest layouts need more, others are chosen."""

    def made() -> ModuleOp:
        return parse(re.sub(r", #dist.layout<[^>]*>", "", str(program(6, "1f1b, ranks = 3"))))

    free = peaks(ran(made(), "auto"))
    limit = int(max(free) * 0.95)
    assert sum(free) > 2 * limit
    assert max(peaks(ran(made(), f"auto{{memory={limit}}}"))) <= limit
