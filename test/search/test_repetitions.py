"""Repetitions within a budget: the simulated memory is that of the program, and the choice is that
of enumeration and of a mixed-integer program."""

from functools import cache
from itertools import combinations
from random import Random

import pytest
from support.extent import extent
from support.repeated_values import (
    LOWERED,
    any_op,
    assert_within_its_gap,
    chain,
    random_program,
    steps,
)
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation

import shardir
from shardir.algebra.mesh import Mesh
from shardir.analysis.storages import live_ops
from shardir.cost.memory import memory_of
from shardir.cost.seconds import cost_of
from shardir.passes.choose_recompute import write
from shardir.rewriting.marks import RECOMPUTE
from shardir.rewriting.offloading import SavedValues
from shardir.search.recompute import repetition_choice
from shardir.search.recompute.activations import Activations
from shardir.search.recompute.repetition_bound import bound_within
from shardir.search.recompute.repetition_choice import choose
from shardir.search.recompute.repetitions import Simulator
from shardir.tools import bench

programs = bench.load("programs")
ONE_DEVICE = "inline-calls,strip-layouts,distributed-autodiff"

SMALL = {"layers": 1, "batch": 8, "seq": 16, "hidden": 32, "heads": 4, "vocab": 32}


def computes(op: Operation) -> bool:
    return not op.name.startswith("dist.")


def counted(f: FuncOp, mesh: Mesh, marked: list[Operation]) -> tuple[int, float]:
    """The peak of a program in which ops are repeated, and the seconds of the repetitions."""
    copy = f.clone()
    of = dict(zip(f.body.block.ops, copy.body.block.ops, strict=True))
    write(copy, SavedValues(tuple(of[op] for op in marked)), {}, mesh)
    again = [op for op in live_ops(list(copy.body.block.ops)) if RECOMPUTE in op.attributes]
    costs = [cost_of(op, mesh) for op in again]
    return memory_of(copy, mesh).peak, sum(c.seconds for c in costs if c is not None)


def ops_of(activations: Activations, groups: frozenset[int]) -> list[Operation]:
    return [op for n in sorted(groups) for op in activations.groups[n].ops]


ACCUMULATED = programs.gpt(mesh=(2, 2), **SMALL).rstrip() + " accumulate <mean, microbatches = 2>"
"""The step is the end of the text."""


@pytest.mark.parametrize("seed", range(extent(4, 200)))
def test_simulated_memory_and_time_are_those_of_the_program(seed: int):
    random = Random(f"repetitions {seed}")
    text = ACCUMULATED if seed == 0 else random_program(random)
    for f, mesh in steps(shardir.compile(text, LOWERED).module):
        for repeats in (any_op, computes):
            activations = Activations(f, mesh, repeats)
            simulator = Simulator(activations)
            for _ in range(3):
                share = random.random()
                groups = frozenset(n for n in simulator.needed if random.random() < share)
                found = simulator.run(groups)
                peak, seconds = counted(f, mesh, ops_of(activations, groups))
                assert found.peak == peak
                assert found.seconds == pytest.approx(seconds, rel=1e-9)


def small(seed: int, length: int, fewest: int, most: int) -> tuple[FuncOp, Mesh, Simulator]:
    """The step of a random program, of which a few groups can be repeated."""
    random = Random(f"small {seed}")
    while True:
        text = chain(random, length)
        if "parameter" not in text:
            continue
        ((f, mesh),) = steps(shardir.compile(text, ONE_DEVICE).module)
        simulator = Simulator(Activations(f, mesh, any_op))
        if fewest <= len(simulator.needed) <= most:
            return f, mesh, simulator


@cache
def enumerated(seed: int) -> dict[frozenset[int], tuple[int, float]]:
    """The peak and the seconds of the program with each set of repeated groups."""
    f, mesh, simulator = small(seed, 7, 3, 5)
    sets = [frozenset(s) for n in range(6) for s in combinations(simulator.needed, n)]
    return {s: counted(f, mesh, ops_of(simulator.activations, s)) for s in sets}


@pytest.mark.parametrize("heuristic", [False, True])
@pytest.mark.parametrize("seed", range(extent(2, 60)))
def test_the_choice_is_that_of_enumeration(seed: int, heuristic: bool, monkeypatch):
    """Also where not all sets are simulated: then the bound is below the minimum."""
    if heuristic:
        monkeypatch.setattr(repetition_choice, "MAX_EXACT_CHOICES", 0)
    simulator, everything = small(seed, 7, 3, 5)[2], enumerated(seed)
    for limit in sorted({peak for peak, _ in everything.values()}):
        best = min(seconds for peak, seconds in everything.values() if peak <= limit)
        found = choose(simulator, limit, [], [])
        peak, seconds = everything[frozenset(found.found.groups)]
        assert peak <= limit
        assert found.bound <= best * (1 + 1e-9)
        assert seconds == pytest.approx(best, rel=1e-9, abs=1e-15)
    fewest = min(peak for peak, _ in everything.values())
    assert choose(simulator, fewest - 1, [], []).found.peak == fewest


@pytest.mark.parametrize("seed", range(extent(1, 20)))
def test_the_choice_is_within_its_gap_of_a_mixed_integer_program(seed: int):
    """Of programs with more groups than all sets of which are simulated."""
    simulator = small(seed, 22, 11, 16)[2]
    assert len(simulator.needed) > repetition_choice.MAX_EXACT_CHOICES
    assert_within_its_gap(simulator)


@pytest.mark.parametrize("seed", range(extent(2, 30)))
def test_a_bound_is_below_every_set_within_the_limit(seed: int):
    random = Random(f"bound {seed}")
    simulator = small(seed, 16, 8, 14)[2]
    for _ in range(20):
        found = simulator.run([n for n in simulator.needed if random.random() < 0.5])
        assert bound_within(simulator, found.peak)[0] <= found.seconds * (1 + 1e-9)
