"""Programs whose values may be computed again, and the choice by a mixed integer program."""

from collections.abc import Iterator
from random import Random

import pytest
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation

from shardir.algebra.mesh import Mesh
from shardir.cost.functions import functions
from shardir.dialects.train import BackwardOp
from shardir.passes.choose_recompute import TOGETHER
from shardir.search.recompute.repetition_choice import choose
from shardir.search.recompute.repetition_policies import StepBlocks
from shardir.search.recompute.repetitions import Simulator
from shardir.tools import bench

laws = bench.load("laws")
random_step = bench.load("random_steps").random_step


LOWERED = (
    "inline-calls,propagate-strategies,insert-redistributions,distributed-autodiff,recompute,"
    "lower-to-spmd,simplify-communication"
)


def any_op(op: Operation) -> bool:
    return True


def steps(module: ModuleOp) -> Iterator[tuple[FuncOp, Mesh]]:
    for f, mesh in functions(module):
        if any(isinstance(op, BackwardOp) for op in f.body.block.ops):
            yield f, mesh


def random_program(random: Random) -> str:
    mesh = laws.random_mesh("h200", random)
    return random_step(mesh, random, random.randint(1, 4))


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


def assert_within_its_gap(simulator: Simulator) -> None:
    """Assert of a budget halfway that the bound is at most the optimum of a mixed-integer program,
    which is at most the choice; and that both keep to it."""
    blocks = StepBlocks(simulator)
    starts = [blocks.full(k) for k in TOGETHER]
    fewest = choose(simulator, 0, starts, blocks.groups()).found.peak
    limit = (fewest + simulator.run(()).peak) // 2
    found = choose(simulator, limit, starts, blocks.groups())
    best = bench.load("recompute_milp").optimum(simulator, limit, 60)
    assert best.groups is not None and best.bound == pytest.approx(best.seconds)
    again = simulator.run(best.groups)
    assert again.peak <= limit and again.seconds == pytest.approx(best.seconds)
    assert found.found.peak <= limit
    assert found.bound <= best.seconds * (1 + 1e-9) <= found.found.seconds * (1 + 2e-9)
