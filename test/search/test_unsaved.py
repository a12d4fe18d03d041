"""Values that may be computed again, as the search counts them: programs need no more than that."""

from collections.abc import Iterator
from random import Random

import pytest
from support.extent import extent
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation

import shardir
from shardir.algebra.mesh import Mesh
from shardir.cost.functions import ONE_DEVICE, functions
from shardir.cost.memory import memory_of
from shardir.dialects.train import BackwardOp
from shardir.passes.choose_recompute import write
from shardir.rewriting.offloading import SavedValues
from shardir.search.graph.candidates import CandidateSource
from shardir.search.graph.cost_graph import CostGraph
from shardir.search.graph.graph_bytes import live_bytes
from shardir.search.graph.live_bytes import storages_of
from shardir.search.graph.value_layouts import tied_values
from shardir.search.problem.memory import live
from shardir.tools import bench

programs, laws = bench.load("programs"), bench.load("laws")
random_step = bench.load("random_steps").random_step

ONE = "inline-calls,strip-layouts,distributed-autodiff"
SMALL = {"batch": 8, "seq": 16, "hidden": 32, "heads": 4, "vocab": 32}


def steps(text: str) -> Iterator[FuncOp]:
    """The training steps of a program on one device."""
    for f, _ in functions(shardir.compile(text, ONE).module):
        if any(isinstance(op, BackwardOp) for op in f.body.block.ops):
            yield f


def counting(f: FuncOp) -> CostGraph:
    block = f.body.block
    source = CandidateSource(Mesh("m", (("d", 1),)))
    return CostGraph(block, source, tied_values(f, block), counts_memory=True)


def with_needs(graph: CostGraph, ops: set[Operation]) -> set[Operation]:
    """The ops, with those that they need to be computed again."""
    todo = [*ops]
    while todo:
        for op in graph.unsaved.needs[todo.pop()]:
            if op not in ops:
                ops.add(op)
                todo.append(op)
    return ops


def choice_of(graph: CostGraph, again: set[Operation]) -> list[int]:
    choice = [0] * len(graph.problem.unary)
    for op, i in graph.op_variable.items():
        choice[i] = next(
            k for k, c in enumerate(graph.candidates[op]) if c.times == 1 + (op in again)
        )
    return choice


def program_peak(f: FuncOp, again: set[Operation]) -> int:
    """The peak of a program that computes ops again, with the views of what they make."""
    block, copy = f.body.block, f.clone()
    storages = storages_of(block, tied_values(f, block))
    members = (m for op in again for v in op.results for m in storages.members(v))
    again = again | {m.owner for m in members if isinstance(m.owner, Operation)}
    of = dict(zip(f.body.block.ops, copy.body.block.ops, strict=True))
    write(copy, SavedValues(tuple(of[op] for op in again)), {}, ONE_DEVICE)
    return memory_of(copy, ONE_DEVICE).peak


@pytest.mark.parametrize("seed", range(extent(2, 200)))
def test_a_program_that_computes_values_again_needs_at_most_what_is_counted(seed: int):
    random = Random(f"unsaved {seed}")
    text = random_step(laws.random_mesh("h200", random), random, random.randint(2, 5))
    if seed == 0:
        text = programs.gpt(layers=3, mesh=(2, 2), **SMALL)
    for f in steps(text):
        graph = counting(f)
        held, repeated = live_bytes(graph), graph.unsaved.repeated
        for share in (0.0, 0.5, 1.0):
            again = with_needs(graph, {op for op in repeated if random.random() < share})
            choice = choice_of(graph, again)
            assert program_peak(f, again) <= live(held, choice).max()
            most = graph.problem.cost(choice)
            assert most < 1.01 * graph.problem.cost(choice_of(graph, set())) * 2, (
                "nothing is forbidden"
            )


def test_a_gpt_that_keeps_the_inputs_of_layers_is_counted_as_much_smaller():
    """All that may be computed again is: the counted peak falls as that of the program does."""
    (f,) = steps(programs.gpt(layers=6, mesh=(2, 2), **SMALL | {"batch": 64}))
    graph = counting(f)
    held, everything = live_bytes(graph), set(graph.unsaved.repeated)
    assert with_needs(graph, set(everything)) == everything
    before, after = (live(held, choice_of(graph, s)).max() for s in (set(), everything))
    assert after < 0.55 * before
    assert after <= 1.25 * program_peak(f, everything)


def test_what_is_computed_again_needs_what_the_backward_part_does_not_read():
    """Of an op alone, whose operand is neither kept nor computed again, the cost is prohibitive."""
    (f,) = steps(programs.gpt(layers=3, mesh=(2, 2), **SMALL))
    graph = counting(f)
    op = next(op for op, needs in graph.unsaved.needs.items() if needs)
    base = graph.problem.cost(choice_of(graph, set()))
    assert graph.problem.cost(choice_of(graph, {op})) > 1.5 * base
    assert graph.problem.cost(choice_of(graph, with_needs(graph, {op}))) < 1.2 * base
