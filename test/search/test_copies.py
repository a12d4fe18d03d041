"""Copies that several users of a value share: the objective against the lowered program."""

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

import pytest
from xdsl.dialects.builtin import ModuleOp

from shardir.algebra.mesh import Mesh
from shardir.cost.clusters import load
from shardir.rewriting.functions import bodies
from shardir.search.candidates import CandidateSource
from shardir.search.cost_graph import CostGraph
from shardir.search.plan import fastest_plan
from shardir.search.solver import solve
from shardir.search.value_layouts import tied_values
from shardir.syntax.parser import parse
from shardir.tools import bench

declared, laws = bench.load("random_steps").declared, bench.load("program_laws")

MESH = Mesh("m", (("a", 2), ("b", 2), ("c", 2)), load("ascend910").part(8))

SPLITS = [("{}", "{}"), *product(("{a}", "{b, c}"), ("{}",)), ("{b}", "{c}"), ("{}", "{a, c}")]
"""The axes of two dimensions."""


X = "tensor<64x64xf32, #dist.layout<@m, [{}, {}]>>"

UNLAID = "tensor<64x64xf32>"


def matmuls(before: str, operands: Sequence[str], seed: int) -> ModuleOp:
    """Return matmuls after an op: of `%x`, and an operand in random layouts with each of so many
    others, whose layouts are annotated, unless it is the op's."""
    random, t = Random(seed), "tensor<64x64xf32, #dist.layout<@m, [%s, %s]>>"
    types = {v: t % random.choice(SPLITS) for v in dict.fromkeys(operands)}
    types = {v: UNLAID if f"%{v} =" in before else t for v, t in types.items()}
    given = [f"%{v}: {t}" for v, t in {"x": X, **types}.items() if t != UNLAID]
    ops = "\n".join(
        f"%{i} = nn.matmul %x, %{v} strategy <@m, (({{}}, {rows}), ({rows}, {columns}))> : "
        f"({X}, {types[v]}) -> {UNLAID}"
        for i, v in enumerate(operands) for rows, columns in [random.choice(SPLITS)]
    )  # fmt: skip
    return parse(f"""{declared(MESH)}
        func.func @f({", ".join(given)}) -> {X} {{
          {before}
          {ops}
          func.return %x : {X}
        }}""")


def violated(*given: Any) -> list[str]:
    """Return the claims that do not hold of matmuls."""
    _, found = laws.searched(matmuls(*given))
    return [claim for claim, value in found.items() if value > 1 + 1e-9]


@pytest.mark.parametrize("seed", range(18))
def test_equal_first_moves_are_made_once(seed: int) -> None:
    assert not violated("", "wwwww", seed)


@pytest.mark.parametrize("seed", range(18))
def test_the_sum_has_what_five_users_of_an_annotated_value_share(seed: int) -> None:
    ((f, block),) = bodies(matmuls("", "wwwww", seed))
    graph = CostGraph(block, CandidateSource(MESH), tied_values(f, block))
    plan = fastest_plan(graph, solve, lambda problem, _: solve(problem), 1e-3)
    assert graph.shared_seconds(plan.solution.choice) == 0


@pytest.mark.parametrize("seed", [3, 11])
def test_moves_that_users_of_a_result_share_are_made_once(seed: int) -> None:
    made = f"%r = nn.relu %x strategy <@m, (({{}}, {{b, c}}),)> : ({X}) -> {UNLAID}"
    assert not violated(made, "rrrr", seed)


@pytest.mark.parametrize(
    ("operands", "seed"), [("wwwvv", 4), ("wwwvv", 13), ("wwwwv", 10), ("wwwwv", 27)]
)
def test_copies_that_only_updates_share_are_in_buckets(operands: str, seed: int) -> None:
    assert not violated("train.update", operands, seed)


@pytest.mark.parametrize("seed", [11, 31])
def test_gathers_of_slices_wait_for_others(seed: int) -> None:
    assert not violated("train.update", "wwvvu", seed)
