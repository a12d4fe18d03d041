"""Copies that several users of a value share: the objective against the lowered program."""

from itertools import product
from random import Random

import pytest

from shardir.algebra.mesh import Mesh
from shardir.cost.clusters import load
from shardir.syntax.parser import parse
from shardir.tools import bench

declared, laws = bench.load("random_steps").declared, bench.load("program_laws")

MESH = Mesh("m", (("a", 2), ("b", 2), ("c", 2)), load("ascend910").part(8))

SPLITS = [("{}", "{}"), *product(("{a}", "{b, c}"), ("{}",)), ("{b}", "{c}"), ("{}", "{a, c}")]
"""The axes of two dimensions."""


@pytest.mark.parametrize("seed", range(18))
def test_equal_first_moves_are_made_once(seed: int) -> None:
    random = Random(seed)
    t = "tensor<64x64xf32, #dist.layout<@m, [%s, %s]>>"
    (w, *uses), x = random.choices(SPLITS, k=6), t % ("{}", "{}")
    ops = "\n".join(
        f"%{i} = nn.matmul %x, %w strategy <@m, (({{}}, {rows}), ({rows}, {columns}))> : "
        f"({x}, {t % w}) -> tensor<64x64xf32>"
        for i, (rows, columns) in enumerate(uses)
    )
    module = parse(f"""{declared(MESH)}
        func.func @f(%x: {x}, %w: {t % w}) -> tensor<64x64xf32> {{
          {ops}
          func.return %0 : tensor<64x64xf32>
        }}""")
    _, found = laws.searched(module)
    assert found.pop("bound <= fused") <= 1 + 1e-9 and max(found.values()) <= 1 + 1e-9
