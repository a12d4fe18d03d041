"""Credits of operands: the bound against the lowered program, whose gathers are fused."""

import pytest

from shardir import compile
from shardir.algebra.mesh import Mesh
from shardir.cost import report
from shardir.cost.clusters import load
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import found_by_search
from shardir.syntax.parser import parse
from shardir.tools import bench

declared, laws = bench.load("random_steps").declared, bench.load("program_laws")


MESH = Mesh("m", (("a", 2),), load("gloo").part(2))

T = "tensor<8x8xf32, #dist.layout<@m, [%s]>>"

Y = T % "{}, {}"


def bound_objective_and_seconds(x: str, w: str, ops: str) -> tuple[float, float, float]:
    """Return the bound and the objective of ops on values of two layouts, and the seconds of the
    lowered program, in which gathers are fused."""
    module = parse(f"""{declared(MESH)}
        func.func @f(%x: {T % x}, %w: {T % w}) -> {Y} {{
          {ops}
          func.return %y : {Y}
        }}""")
    plan = compile(module, laws.SEARCH).module
    ((f, _),) = bodies(plan)
    found = found_by_search(f)
    seconds = sum(f.seconds for f in report(compile(plan, laws.AFTERWARDS).module))
    return found["bound"], found["objective"], seconds


@pytest.mark.parametrize(
    ("x", "w", "fused"),
    [("{}, {a}", "{}, {a}", True), ("{}, {a}", "{a}, {}", False), ("{}, {a}", "{}, {}", False)],
)
def test_the_bound_has_one_latency_of_operands_that_are_gathered_together(
    x: str, w: str, fused: bool
) -> None:
    bound, objective, seconds = bound_objective_and_seconds(
        x, w,
        f"%y = nn.matmul %x, %w strategy <@m, (({{}}, {{}}), ({{}}, {{}}))> : "
        f"({T % x}, {T % w}) -> {Y}",
    )  # fmt: skip
    assert 0.9 * seconds < bound <= seconds * (1 + 1e-9)
    assert (seconds < objective * (1 - 1e-9)) == fused


@pytest.mark.parametrize(("w", "fused"), [("{}, {a}", True), ("{a}, {}", False)])
def test_what_waits_for_its_first_user_shares_the_latency_of_other_operands(
    w: str, fused: bool
) -> None:
    x, strategy = "{}, {a}", "strategy <@m, (({}, {}), ({}, {}))>"
    bound, objective, seconds = bound_objective_and_seconds(
        x, w,
        f"""
        %v = nn.square %x strategy <@m, (({{}}, {{a}}))> : ({T % x}) -> {Y}
        %z = nn.matmul %v, %w {strategy} : ({Y}, {T % w}) -> {Y}
        %y = nn.matmul %v, %z {strategy} : ({Y}, {Y}) -> {Y}
        """,
    )  # fmt: skip
    assert 0.9 * seconds < bound <= seconds * (1 + 1e-9)
    assert (seconds < objective * (1 - 1e-9)) == fused
