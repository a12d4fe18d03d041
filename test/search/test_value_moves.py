"""Redistributions of values that repeat smaller ones, of the partial results of decomposed ops, and
of results that nothing uses: the objective against the lowered program."""

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


def tensor(shape: str, split: str) -> str:
    return f"tensor<{shape}xf32, #dist.layout<@m, [{split}]>>"


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


@pytest.mark.parametrize("want", ["{b}", "{b, a}"])
def test_partial_results_of_a_decomposed_op_move_to_their_users(want: str) -> None:
    """Sums over the batch for the update, of a norm whose features are split too."""
    x, w = tensor("64x64", "{a}, {b}"), tensor("64", "{b}")
    s, y = tensor("64", "{a}"), tensor("64", want)
    made = ["tensor<64x64xf32>", "tensor<64xf32>", "tensor<64xf32>"]
    split = "({a}, {b}), ({b},), ({a}, {b}), ({a},), ({a},)"
    module = parse(f"""{declared(MESH)}
        func.func @f(%x: {x}, %w: {w}, %s: {s}, %v: {y}) -> ({", ".join(made)}) {{
          %dx, %dw, %db = nn.layer_norm_grad %x, %w, %x, %s, %s strategy <@m, ({split})> :
            ({x}, {w}, {x}, {s}, {s}) -> ({", ".join(made)})
          train.update
          %0 = nn.add %v, %dw strategy <@m, (({want},), ({want},))> : ({y}, {made[1]}) -> {made[1]}
          %1 = nn.add %v, %db strategy <@m, (({want},), ({want},))> : ({y}, {made[1]}) -> {made[1]}
          func.return %dx, %0, %1 : {", ".join(made)}
        }}""")
    _, found = laws.searched(module)
    assert found["objective = lowered"] == 1


@pytest.mark.parametrize("features", ["", "b"])
def test_a_result_that_nothing_uses_does_not_move(features: str) -> None:
    """Of a norm that is decomposed where its features are split: the layout of dx is another one
    than it is made in, but nothing uses it."""
    split = f"{{a}}, {{{features}}}"
    x, w, s = tensor("64x64", split), tensor("64", f"{{{features}}}"), tensor("64", "{a}")
    strategy = f"({split}), ({{{features}}},), ({split}), ({{a}},), ({{a}},)"
    module = parse(f"""{declared(MESH)}
        func.func @f(%x: {x}, %w: {w}, %s: {s}) -> tensor<64xf32> {{
          %dx, %dw, %db = nn.layer_norm_grad %x, %w, %x, %s, %s strategy <@m, ({strategy})> :
            ({x}, {w}, {x}, {s}, {s}) -> ({tensor("64x64", "{}, {c}")}, tensor<64xf32>, {w})
          func.return %dw : tensor<64xf32>
        }}""")
    _, found = laws.searched(module)
    assert found["objective = lowered"] == 1
