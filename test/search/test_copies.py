"""Copies that several users of a value share: the objective against the lowered program."""

from collections.abc import Sequence
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


X = "tensor<64x64xf32, #dist.layout<@m, [{}, {}]>>"


def violated(before: str, operands: Sequence[str], seed: int) -> list[str]:
    """Return the claims that do not hold of matmuls after an op: of `%x`, and an operand in random
    layouts with each of so many others, whose layouts are annotated."""
    random, t = Random(seed), "tensor<64x64xf32, #dist.layout<@m, [%s, %s]>>"
    types = {v: t % random.choice(SPLITS) for v in dict.fromkeys(operands)}
    ops = "\n".join(
        f"%{i} = nn.matmul %x, %{v} strategy <@m, (({{}}, {rows}), ({rows}, {columns}))> : "
        f"({X}, {types[v]}) -> tensor<64x64xf32>"
        for i, v in enumerate(operands) for rows, columns in [random.choice(SPLITS)]
    )  # fmt: skip
    module = parse(f"""{declared(MESH)}
        func.func @f(%x: {X}, {", ".join(f"%{v}: {t}" for v, t in types.items())}) -> {X} {{
          {before}
          {ops}
          func.return %x : {X}
        }}""")
    _, found = laws.searched(module)
    return [claim for claim, value in found.items() if value > 1 + 1e-9]


@pytest.mark.parametrize("seed", range(18))
def test_equal_first_moves_are_made_once(seed: int) -> None:
    assert not violated("", "wwwww", seed)


@pytest.mark.parametrize(("operands", "seed"), [("wwwvv", 4), ("wwwvv", 13), ("wwwwv", 10)])
def test_copies_that_only_updates_share_are_in_buckets(operands: str, seed: int) -> None:
    assert not violated("train.update", operands, seed)


@pytest.mark.parametrize("seed", [11, 31])
def test_gathers_of_slices_wait_for_others(seed: int) -> None:
    assert not violated("train.update", "wwvvu", seed)
