"""Redistributions of a program in a search: presets, whose parameters are gathered for their uses,
in the mode auto."""

from math import isclose

import pytest
from support.extent import extent
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp

from shardir.analysis.functions import mesh_of
from shardir.cost import memory_of
from shardir.dialects.dist import RedistributeOp, layout_of
from shardir.passes.apply_plan import ApplyPlan
from shardir.passes.search_strategies import SearchStrategies
from shardir.pipelines import build
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import found_by_search
from shardir.search.plans.preset_entries import PRESETS
from shardir.syntax.parser import parse
from shardir.tools import bench

search, programs = bench.load("search"), bench.load("programs")
laws = bench.load("program_laws")

SMALL = {"batch": 4, "seq": 8, "hidden": 16, "heads": 4, "vocab": 16}
EVERY = [*PRESETS, "2d", "megatron(tp) * fsdp(dp)", "megatron+sequence(tp) * fsdp(dp)"]


def planned(plan: str, text: str = "") -> ModuleOp:
    """A step with a plan, differentiated: of a GPT, if it is of no other program."""
    text = text or search.gpt(layers=1, mesh=(2, 2), **SMALL)
    module = parse(search.LAYOUT.sub("", text))
    ApplyPlan(plan=plan).apply(Context(), module)
    return applied(module, "distributed-autodiff")


def applied(module: ModuleOp, pipeline: str) -> ModuleOp:
    for p in build(pipeline):
        p.apply(Context(), module)
    return module


def redistributions(module: ModuleOp) -> list[tuple[str, str]]:
    """The layouts of each redistribution and of its operand."""
    ((_, block),) = bodies(module)
    ops = [op for op in block.ops if isinstance(op, RedistributeOp)]
    return [(str(layout_of(op.value)), str(layout_of(op.out))) for op in ops]


@pytest.mark.parametrize("plan", extent(["2d"], EVERY))
def test_the_objective_of_a_preset_is_the_time_of_its_program(plan: str) -> None:
    """With what the preset gathers, for the forward part and again for the backward part."""
    module = planned(plan)
    ((_, block),) = bodies(module)
    annotated = [layout_of(v) for v in block.args if layout_of(v) is not None]
    pinned = redistributions(module)
    SearchStrategies().apply(Context(), module)
    ((f, block),) = bodies(module)
    counted = found_by_search(f)["objective"]
    assert redistributions(module) == pinned
    assert [layout_of(v) for v in block.args][: len(annotated)] == annotated
    assert isclose(laws.lowered_seconds(module), counted, rel_tol=1e-9)


def test_gathered_parameters_are_not_saved_within_a_limit_of_memory() -> None:
    """The program keeps to the memory, and gathers are made again, marked or not."""
    text = programs.mlp(layers=extent(1, 2), batch=16, dim=32, hidden=64, mesh=(2, 2))
    free = planned("zero3", text)
    SearchStrategies().apply(Context(), free)
    most = program_bytes(free)
    module = planned("zero3", text)
    SearchStrategies(memory=most - 1).apply(Context(), module)
    assert program_bytes(module) < most
    ((f, _),) = bodies(module)
    counted = found_by_search(f)["objective"]
    assert isclose(laws.lowered_seconds(module), counted, rel_tol=1e-9)


def program_bytes(module: ModuleOp) -> int:
    lowered = applied(module.clone(), "lower-plan")
    ((f, _),) = bodies(lowered)
    mesh = mesh_of(f, lowered)
    assert mesh is not None
    return memory_of(f, mesh).peak
