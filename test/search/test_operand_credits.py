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


@pytest.mark.parametrize(
    ("x", "w", "fused"),
    [("{}, {a}", "{}, {a}", True), ("{}, {a}", "{a}, {}", False), ("{}, {a}", "{}, {}", False)],
)
def test_the_bound_has_one_latency_of_operands_that_are_gathered_together(
    x: str, w: str, fused: bool
) -> None:
    mesh = Mesh("m", (("a", 2),), load("gloo").part(2))
    t = "tensor<8x8xf32, #dist.layout<@m, [{}]>>"
    x, w, y = map(t.replace("[{}]", "[%s]").__mod__, (x, w, "{}, {}"))
    module = parse(f"""{declared(mesh)}
        func.func @f(%x: {x}, %w: {w}) -> {y} {{
          %y = nn.matmul %x, %w strategy <@m, (({{}}, {{}}), ({{}}, {{}}))> : ({x}, {w}) -> {y}
          func.return %y : {y}
        }}""")
    plan = compile(module, laws.SEARCH).module
    ((f, _),) = bodies(plan)
    found = found_by_search(f)
    seconds = sum(f.seconds for f in report(compile(plan, laws.AFTERWARDS).module))
    assert 0.9 * seconds < found["bound"] <= seconds * (1 + 1e-9)
    assert (seconds < found["objective"] * (1 - 1e-9)) == fused
