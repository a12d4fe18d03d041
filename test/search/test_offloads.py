"""Host memory within a budget: simulated memory and time are those of the program, and the choice
is that of enumeration and of a mixed-integer program."""

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
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp

import shardir
from shardir.algebra.mesh import Mesh
from shardir.cost.memory import memory_of
from shardir.cost.report import cost_of_function
from shardir.dialects import dist
from shardir.passes.choose_recompute import write
from shardir.rewriting.copying import copied
from shardir.rewriting.registry import run_pipeline
from shardir.search.recompute import repetition_choice
from shardir.search.recompute.activations import Activations
from shardir.search.recompute.offloads import LinkEvent, exposed
from shardir.search.recompute.repetition_bound import bound_within
from shardir.search.recompute.repetition_choice import choose
from shardir.search.recompute.repetitions import Simulator, saved_values

CLUSTER = (
    "dist.cluster @c <levels [node = 1 {{bandwidth = 1e+9, latency = 1e-18}}], memory = 100000000 "
    "{{bandwidth = 3e+10}}, flops {{f32 = 7e+9}}, interference = {interference}, "
    "host {{bandwidth = 2.5e+9, latency = 1e-18}}>\ndist.mesh @m <d = 1> on @c\n"
)
"""A device whose link to the host has no latency; with an interference of 1 it hides nothing."""

SCALARS = 24
"""The bytes of what updates read beside tensors, which the host may have instead."""


def step(
    seed: int, length: int, fewest: int, most: int, interference: float = 1.0
) -> tuple[FuncOp, Mesh, Simulator]:
    """The step of a random program with a few choices, which has states."""
    random, cluster = Random(f"offload {seed}"), CLUSTER.format(interference=interference)
    optimizer = random.choice(("momentum, lr = 0.1, momentum = 0.9", "sgd, lr = 0.1"))
    while True:
        text = cluster + chain(random, length).replace("sgd, lr = 0.1", optimizer)
        if "parameter" not in text:
            continue
        ((f, mesh),) = steps(shardir.compile(text, LOWERED).module)
        simulator = Simulator(Activations(f, mesh, any_op), hosted=True)
        if fewest <= len(simulator.choices) <= most and simulator.offloads:
            return f, mesh, simulator


def program(
    f: FuncOp, mesh: Mesh, simulator: Simulator, chosen: frozenset[int], pipeline: str = ""
) -> FuncOp:
    """The function with a set of choices, in a module of its own, after more passes."""
    given = f.parent_op()
    assert isinstance(given, ModuleOp)
    module = copied(given)
    copy = next(g for g, _ in steps(module) if g.sym_name == f.sym_name)
    ops = dict(zip(f.body.block.ops, copy.body.block.ops, strict=True))
    write(copy, saved_values(simulator, simulator.run(chosen)).on(ops), {}, mesh)
    module.verify()
    if pipeline:
        run_pipeline(pipeline, Context(), module)
    return copy


@pytest.mark.parametrize("seed", range(extent(6, 150)))
def test_simulated_memory_is_that_of_the_program(seed: int):
    random = Random(f"offloads {seed}")
    text = random_program(random)
    for f, mesh in steps(shardir.compile(text, LOWERED).module):
        simulator = Simulator(Activations(f, mesh, any_op), hosted=True)
        for _ in range(3):
            share = random.random()
            chosen = frozenset(n for n in simulator.choices if random.random() < share)
            copy, found = program(f, mesh, simulator, chosen), simulator.run(chosen)
            scalars = SCALARS if any(simulator.offloads[c].update for c in found.hosted) else 0
            assert 0 <= found.peak - memory_of(copy, mesh).peak <= scalars


@pytest.mark.parametrize("seed", range(extent(6, 100)))
def test_time_is_between_that_of_the_link_and_that_without_overlap(seed: int):
    random = Random(f"times {seed}")
    interference = random.choice((0.0, 0.0, 0.3, 1.0))
    f, mesh, simulator = step(seed, 9, 6, 20, interference)
    base = cost_of_function(f, mesh).seconds
    for _ in range(4):
        chosen = frozenset(n for n in simulator.choices if random.random() < 0.4)
        found = simulator.run(chosen)
        copy = program(f, mesh, simulator, chosen)
        serial = cost_of_function(copy, mesh).seconds - base
        overlapped = program(f, mesh, simulator, chosen, "overlap-communication")
        after = cost_of_function(overlapped, mesh).seconds - base
        links = sum(simulator.offloads[c].seconds for c in found.hosted)
        alone = sum(map(simulator.seconds, (*found.groups, *found.hosted)))
        lower = max(alone, links - base)
        for seconds in (found.seconds, after):
            assert lower * (1 - 1e-9) - 1e-15 <= seconds <= serial * (1 + 1e-9) + 1e-15
        if interference == 1.0:
            assert found.seconds == pytest.approx(serial, rel=1e-9, abs=1e-15)


def test_copies_wait_for_the_link():
    """Two copies of 2 s each, needed after 3 s: the second ends at 4 s, one late."""
    out = [LinkEvent(0.0, 2.0, float("inf")), LinkEvent(0.0, 2.0, 3.0)]
    assert exposed(out) == 1.0
    assert exposed([*out, LinkEvent(5.0, 1.0, 6.5, 0)]) == 1.0
    assert exposed([*out, LinkEvent(5.0, 3.0, 6.5, 0)]) == 2.5


def test_a_copy_to_the_host_is_waited_for_where_it_has_ended():
    """So its operand is freed there, and not where the copy back starts."""
    f, mesh, simulator = step(3, 12, 8, 30, 0.0)
    chosen = max(
        (frozenset([c]) for c, o in simulator.offloads.items() if o.group is not None),
        key=lambda s: sum(simulator.bytes(c) for c in s),
    )
    copy = program(f, mesh, simulator, chosen, "overlap-communication")
    ops = list(copy.body.block.ops)
    out, back = (op for op in ops if isinstance(op, dist.CopyOp))
    (wait,) = (use.operation for use in out.outs[0].uses)
    assert dist.is_started(out) and ops.index(out) < ops.index(wait) < ops.index(back) - 1
    assert memory_of(copy, mesh).peak < memory_of(f, mesh).peak


@cache
def enumerated(seed: int) -> dict[frozenset[int], tuple[int, float]]:
    """The peak and the additional seconds of the program with each set of choices."""
    f, mesh, simulator = step(seed, 5, 4, 7)
    base, choices = cost_of_function(f, mesh).seconds, simulator.choices
    found = {}
    for s in (frozenset(s) for n in range(len(choices) + 1) for s in combinations(choices, n)):
        copy = program(f, mesh, simulator, s)
        found[s] = memory_of(copy, mesh).peak, cost_of_function(copy, mesh).seconds - base
    return found


@pytest.mark.parametrize("heuristic", [False, True])
@pytest.mark.parametrize("seed", range(extent(3, 40)))
def test_the_choice_is_that_of_enumeration(seed: int, heuristic: bool, monkeypatch):
    """Also where not all sets are simulated: then the bound is below the minimum."""
    if heuristic:
        monkeypatch.setattr(repetition_choice, "MAX_EXACT_CHOICES", 0)
    simulator, everything = step(seed, 5, 4, 7)[2], enumerated(seed)
    for limit in sorted({peak for peak, _ in everything.values()}):
        best = min(seconds for peak, seconds in everything.values() if peak <= limit)
        found = choose(simulator, limit, [], [])
        peak, seconds = everything[frozenset((*found.found.groups, *found.found.hosted))]
        assert peak == found.found.peak <= limit
        assert found.bound <= best * (1 + 1e-9) + 1e-15
        assert seconds == pytest.approx(best, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("seed", range(extent(2, 20)))
def test_the_choice_is_within_its_gap_of_a_mixed_integer_program(seed: int):
    """Of programs with more choices than all sets of which are simulated."""
    simulator = step(seed, 12, 14, 24)[2]
    assert len(simulator.choices) > repetition_choice.MAX_EXACT_CHOICES
    assert_within_its_gap(simulator)


@pytest.mark.parametrize("interference", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(extent(3, 40)))
def test_a_bound_is_below_every_set_within_the_limit(seed: int, interference: float):
    """Computation hides copies here: a bound counts those seconds that exceed it."""
    simulator = step(seed, 5, 4, 8, interference)[2]
    choices = simulator.choices
    sets = (s for n in range(len(choices) + 1) for s in combinations(choices, n))
    every = [simulator.run(s) for s in sets]
    for limit in sorted({found.peak for found in every}):
        best = min(found.seconds for found in every if found.peak <= limit)
        assert bound_within(simulator, limit)[0] <= best * (1 + 1e-9) + 1e-15
