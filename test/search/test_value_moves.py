"""Redistributions of what repeats a smaller value: the objective against the lowered program, in
which collectives are before the broadcast."""

from random import Random

import pytest

from shardir.algebra.mesh import Mesh
from shardir.cost.clusters import load
from shardir.syntax.parser import parse
from shardir.tools import bench

declared, laws = bench.load("random_steps").declared, bench.load("program_laws")

MESH = Mesh("m", (("a", 2), ("b", 2), ("c", 2)), load("ascend910").part(8))

OPERANDS = [("64x64", "0, 2", "{a}, {b, c}"), ("64x1x64", "0, 1, 2", "{b}, {}, {a}"),
            ("16x64", "1, 2", "{}, {a, b}"), ("64x64", "0, 2", "{a, b}, {}")]  # fmt: skip
"""A shape, the dimension of the result of each of its own, and the axes of each."""

SPLITS = ["{}, {}, {}", "{a}, {}, {}", "{a, b}, {}, {}", "{}, {a}, {b}", "{}, {}, {a, b}",
          "{b}, {c}, {}", "{}, {b}, {c}"]  # fmt: skip
"""The axes of the dimensions of a result."""


@pytest.mark.parametrize("seed", range(10))
def test_what_is_repeated_moves_before_it_is(seed: int) -> None:
    random = Random(seed)
    shape, dims, split = random.choice(OPERANDS)
    x, y = f"tensor<{shape}xf32, #dist.layout<@m, [{split}]>>", "tensor<64x16x64xf32>"
    users = "\n".join(
        f"%{i} = nn.relu %y strategy <@m, (({random.choice(SPLITS)}),)> : ({y}) -> {y}"
        for i in range(3)
    )
    module = parse(f"""{declared(MESH)}
        func.func @f(%x: {x}) -> {x} {{
          %y = nn.broadcast %x dims <{dims}> strategy <@m, (({split}),)> : ({x}) -> {y}
          {users}
          func.return %x : {x}
        }}""")
    _, found = laws.searched(module)
    assert max(found.values()) <= 1 + 1e-9, found
