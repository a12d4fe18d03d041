"""Repetitions within a budget: the simulated memory is that of the program, and the choice is that
of enumeration and of a mixed-integer program."""

from collections.abc import Iterator
from functools import cache
from itertools import combinations
from random import Random

import pytest
from extent import extent
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation

import shardir
from shardir.algebra.mesh import Mesh
from shardir.analysis.storages import live_ops
from shardir.cost.functions import functions
from shardir.cost.memory import memory_of
from shardir.cost.seconds import cost_of
from shardir.dialects.train import BackwardOp
from shardir.passes.choose_recompute import TOGETHER, write
from shardir.rewriting.marks import RECOMPUTE
from shardir.rewriting.offloading import SavedValues
from shardir.search import repetition_choice
from shardir.search.activations import Activations
from shardir.search.repetition_bound import bound_within
from shardir.search.repetition_choice import choose
from shardir.search.repetition_policies import StepBlocks
from shardir.search.repetitions import Simulator
from shardir.tools import bench

programs, laws = bench.load("programs"), bench.load("laws")
random_step, optimum = bench.load("random_steps").random_step, bench.load("recompute_milp").optimum

LOWERED = (
    "inline-calls,propagate-strategies,insert-redistributions,distributed-autodiff,recompute,"
    "lower-to-spmd,simplify-communication"
)
ONE_DEVICE = "inline-calls,strip-layouts,distributed-autodiff"

SMALL = {"layers": 1, "batch": 8, "seq": 16, "hidden": 32, "heads": 4, "vocab": 32}


def any_op(op: Operation) -> bool:
    return True


def computes(op: Operation) -> bool:
    return not op.name.startswith("dist.")


def steps(module: ModuleOp) -> Iterator[tuple[FuncOp, Mesh]]:
    for f, mesh in functions(module):
        if any(isinstance(op, BackwardOp) for op in f.body.block.ops):
            yield f, mesh


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


def random_program(random: Random) -> str:
    mesh = laws.random_mesh("h200", random)
    return random_step(mesh, random, random.randint(1, 4))


ACCUMULATED = programs.gpt(mesh=(2, 2), **SMALL).rstrip() + " accumulate <mean, microbatches = 2>"
"""The step is the end of the text."""


@pytest.mark.parametrize("seed", range(extent(8, 200)))
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


def chain(random: Random, length: int) -> str:
    """A step on one device: ops of several sizes, each of some value before."""
    values, args, lines = [("x", 4)], [], []
    for i in range(length):
        (x, n), (y, m) = random.choice(values[-2:]), random.choice(values)
        kind = random.choice(("tanh", "exp", "gelu", "mul", "matmul", "matmul"))
        if kind == "mul" and n == m:
            lines.append(f"%v{i} = nn.mul %{x}, %{y} : ({t(n)}, {t(n)}) -> {t(n)}")
        elif kind in ("mul", "matmul"):
            wide = random.choice((2, 4, 8, 16))
            args.append(f"%w{i}: tensor<{n}x{wide}xf32> {{train.parameter = \"w{i}\", "
                        "train.init = #train.init<normal, std = 0.5>}")  # fmt: skip
            lines.append(
                f"%v{i} = nn.matmul %{x}, %w{i} : ({t(n)}, tensor<{n}x{wide}xf32>) -> {t(wide)}"
            )
            n = wide
        else:
            lines.append(f"%v{i} = nn.{kind} %{x} : ({t(n)}) -> {t(n)}")
        values.append((f"v{i}", n))
    (x, n), body = values[-1], "\n  ".join(lines)
    args.insert(0, f"%x: {t(4)} {{train.input = #train.init<normal>}}")
    return f"""func.func private @loss({", ".join(args)}) -> tensor<f32> {{
  {body}
  %loss = nn.reduce <mean> %{x} dims <0, 1> : ({t(n)}) -> tensor<f32>
  func.return %loss : tensor<f32>
}}
train.step @step of @loss <sgd, lr = 0.1>
"""


def t(n: int) -> str:
    return f"tensor<64x{n}xf32>"


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
@pytest.mark.parametrize("seed", range(extent(5, 60)))
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


def assert_within_its_gap(simulator: Simulator) -> None:
    """Assert of a budget halfway that the bound is at most the optimum of a mixed-integer program,
    which is at most the choice; and that both keep to it."""
    blocks = StepBlocks(simulator)
    starts = [blocks.full(k) for k in TOGETHER]
    fewest = choose(simulator, 0, starts, blocks.groups()).found.peak
    limit = (fewest + simulator.run(()).peak) // 2
    found = choose(simulator, limit, starts, blocks.groups())
    best = optimum(simulator, limit, 60)
    assert best.groups is not None and best.bound == pytest.approx(best.seconds)
    again = simulator.run(best.groups)
    assert again.peak <= limit and again.seconds == pytest.approx(best.seconds)
    assert found.found.peak <= limit
    assert found.bound <= best.seconds * (1 + 1e-9) <= found.found.seconds * (1 + 2e-9)


@pytest.mark.parametrize("seed", range(extent(2, 20)))
def test_the_choice_is_within_its_gap_of_a_mixed_integer_program(seed: int):
    """Of programs with more groups than all sets of which are simulated."""
    simulator = small(seed, 22, 11, 16)[2]
    assert len(simulator.needed) > repetition_choice.MAX_EXACT_CHOICES
    assert_within_its_gap(simulator)


@pytest.mark.parametrize("seed", range(extent(3, 30)))
def test_a_bound_is_below_every_set_within_the_limit(seed: int):
    random = Random(f"bound {seed}")
    simulator = small(seed, 16, 8, 14)[2]
    for _ in range(20):
        found = simulator.run([n for n in simulator.needed if random.random() < 0.5])
        assert bound_within(simulator, found.peak)[0] <= found.seconds * (1 + 1e-9)
