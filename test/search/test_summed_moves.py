"""Reductions of addends that the program makes once: the objective against the lowered program."""

from random import Random

import pytest

from shardir.algebra.mesh import Mesh
from shardir.cost.clusters import load
from shardir.syntax.parser import parse
from shardir.tools import bench

declared, laws = bench.load("random_steps").declared, bench.load("program_laws")

MESH = Mesh("m", (("a", 2), ("b", 2)), load("ascend910").part(4))

X, Y = "tensor<64x512xf32>", "tensor<512xf32>"

SPLITS = ["{a}, {}", "{b}, {}", "{a, b}, {}", "{a}, {b}", "{}, {}"]
"""The axes of the dimensions of an operand, of which the first is summed."""


@pytest.mark.parametrize("seed", range(8))
def test_equal_reductions_of_addends_count_once(seed: int) -> None:
    """Of random trees of sums, all in one layout."""
    random = Random(seed)
    layout = random.choice(["{}", "{a}", "{b}"])
    lines, addends = list[str](), list[str]()

    for _ in range(random.randint(3, 5)):
        split = random.choice(SPLITS)
        lines.append(f"nn.reduce <sum> %x dims <0> strategy <@m, (({split}),)> : ({X})")
        addends.append(f"%{len(lines)}")
    while len(addends) > 1:
        x, y = (addends.pop(random.randrange(len(addends))) for _ in range(2))
        lines.append(f"nn.add {x}, {y} strategy <@m, (({layout},), ({layout},))> : ({Y}, {Y})")
        addends.append(f"%{len(lines)}")
    body = "\n".join(f"%{i} = {line} -> {Y}" for i, line in enumerate(lines, 1))
    module = parse(f"""{declared(MESH)}
        func.func @f(%x: {X}) -> {Y} {{
          {body}
          func.return {addends[0]} : {Y}
        }}""")
    _, found = laws.searched(module)
    assert found["objective = lowered"] <= 1 + 1e-9, found
