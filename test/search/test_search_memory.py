"""Plans that keep to a device's memory, against all plans of small problems and against what the
programs of plans hold."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from extent import extent
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp

from shardir.analysis.functions import mesh_of
from shardir.analysis.storages import Span
from shardir.cost import memory_of
from shardir.diagnostics import Failure
from shardir.interpret.equivalence import check_pass
from shardir.passes import PASSES
from shardir.passes.load_strategies import LoadStrategies
from shardir.passes.save_strategies import SaveStrategies
from shardir.passes.search_strategies import SearchStrategies
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import RECOMPUTE, found_by_search
from shardir.search.elimination import MAX_TABLE_ENTRIES, solve
from shardir.search.memory import Held, TightError, peak, solve_within
from shardir.search.problem import Problem
from shardir.tools import bench

search = bench.load("search")


def random_held(problem: Problem, rng: np.random.Generator, moments: int) -> list[Held]:
    """What values hold for some time; and some pairs, at one moment."""
    found = []
    for v, u in enumerate(problem.unary):
        start, end = sorted(int(i) for i in rng.integers(0, moments, 2))
        found.append(Held((v,), rng.integers(0, 50, len(u)).astype(float), Span(start, end)))
    for (i, j), t in problem.pairs.items():
        at = int(rng.integers(0, moments))
        found.append(Held((i, j), rng.integers(0, 20, t.shape).astype(float), Span(at, at)))
    return found


def random_problem(rng: np.random.Generator) -> Problem:
    problem = Problem()
    for _ in range(6):
        problem.variable(rng.integers(0, 20, 3).astype(float))
    for _ in range(7):
        i, j = (int(k) for k in rng.choice(6, 2, replace=False))
        problem.add(i, j, rng.integers(0, 20, (3, 3)).astype(float))
    return problem


@pytest.mark.parametrize("seed", range(40))
def test_of_all_plans_that_keep_to_the_limit_none_costs_less_than_the_bound(seed: int):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng)
    held = random_held(problem, rng, 5)
    plans = {c: peak(held, list(c)).bytes for c in product(range(3), repeat=6)}
    low, high = min(plans.values()), plans[tuple(solve(problem, MAX_TABLE_ENTRIES).choice)]
    limit = int(rng.integers(low, max(high, low + 1)))
    best = min(problem.cost(c) for c, used in plans.items() if used <= limit)
    try:
        found = solve_within(problem, held, limit, solve)
    except TightError as e:
        assert e.needed > limit
        return
    assert plans[tuple(found.choice)] <= limit
    assert found.bound <= best + 1e-9 and best <= found.objective == problem.cost(found.choice)


def test_most_plans_are_found():
    """Of 40 limits between what the smallest and the quickest plan hold; and what the quickest
    holds changes nothing."""
    found = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng)
        held = random_held(problem, rng, 5)
        quickest = solve(problem, MAX_TABLE_ENTRIES)
        limit = peak(held, quickest.choice).bytes
        assert solve_within(problem, held, limit, solve).objective == quickest.objective
        least = min(peak(held, list(c)).bytes for c in product(range(3), repeat=6))
        try:
            solve_within(problem, held, (limit + least) // 2, solve)
            found += 1
        except TightError:
            continue
    assert found >= 30


def test_what_holds_most_is_when_most_lives():
    held = [
        Held((0,), np.array([5.0, 1.0]), Span(-1, 9)),
        Held((1,), np.array([7.0]), Span(2, 4)),
        Held((0, 1), np.array([[2.0], [20.0]]), Span(4, 4)),
        Held((2,), np.array([3.0]), Span(5, 9)),
    ]
    assert peak(held, [0, 0, 0]) == (14, 4)
    assert peak(held, [1, 0, 0]) == (28, 4)


SMALL = {"batch": 8, "seq": 16, "hidden": 32, "heads": 4, "vocab": 32}


def planned(memory: int, layers: int = 2) -> ModuleOp:
    text = search.STATED.sub("", search.gpt(layers=layers, mesh=(2, 4), **SMALL))
    module = search.applied(text, "distributed-autodiff")
    SearchStrategies(memory=memory).apply(Context(), module)
    return module


REST = (
    "insert-redistributions", "recompute", "lower-to-spmd", "simplify-communication",
    "fuse-communication",
)  # fmt: skip


def holds(module: ModuleOp) -> int:
    """The bytes of a device while the program runs."""
    for name in REST:
        PASSES[name]()().apply(Context(), module)
    ((f, _),) = bodies(module)
    mesh = mesh_of(f, module)
    assert mesh is not None
    return memory_of(f, mesh).peak


def seconds_of(module: ModuleOp) -> float:
    ((f, _),) = bodies(module)
    return found_by_search(f)["objective"]


def assert_loads_alike(module: ModuleOp, file: Path) -> None:
    """A plan that is saved and loaded is the same, with what is done again."""
    SaveStrategies(file=str(file)).apply(Context(), module)
    text = search.STATED.sub("", search.gpt(layers=2, mesh=(2, 4), **SMALL))
    loaded = search.applied(text, "distributed-autodiff")
    LoadStrategies(file=str(file)).apply(Context(), loaded)
    assert str(loaded) == str(module)


def test_a_program_keeps_to_the_memory_and_takes_longer(tmp_path: Path):
    free = planned(0)
    quickest, most = seconds_of(free), holds(free)
    times = [quickest]
    for part in extent((1.0, 0.9), (1.0, 0.9, 0.5)):
        limit = int(most * part)
        module = planned(limit)
        again = [op for op in module.walk() if RECOMPUTE in op.attributes]
        assert bool(again) == (part < 1)
        assert_loads_alike(module, tmp_path / "plan.txt")
        before = module.clone()
        times.append(seconds_of(module))
        assert holds(module) <= limit
        check_pass(before, module, "plan")
    assert times[1] == quickest and times == sorted(times) and times[-1] > quickest


def test_what_does_not_fit_is_refused():
    with pytest.raises(Failure, match=r"no plan of @step .* keeps to 1000 B .* need \d+ B"):
        planned(1000, layers=1)
