"""Reopened grants: some steps are not slower than with activations first (a mixture is chosen by
an estimate), and layouts depend neither on the order of ops nor on how often propagation runs."""

import random

import pytest
from harness import apply
from random_layouts import random_layout
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Operation, SSAValue

from shardir.algebra.layout import Layout
from shardir.algebra.propagation import propagate
from shardir.analysis.functions import values
from shardir.cost import report
from shardir.dialects import dist
from shardir.dialects.nn.types import unsharded_type
from shardir.passes import propagate_strategies
from shardir.rewriting.functions import update_signature
from shardir.rewriting.rewriter import set_type
from shardir.syntax.parser import parse
from shardir.tools import bench

communication = bench.load("bytes")

LOWERED = (
    "propagate-strategies", "insert-redistributions", "distributed-autodiff", "lower-to-spmd",
    "simplify-communication", "fuse-communication",
)  # fmt: skip
SEEDS = [0, 5, 12, 17]
"""In 12 and 17 grants are reopened."""


def annotated(seed: int) -> ModuleOp:
    """A training step of a transformer with random layouts on its weights and its batch."""
    draw = random.Random(seed)
    small = dict(batch=4, seq=4, hidden=8, heads=2, vocab=16)
    large = dict(batch=16, seq=64, hidden=256, heads=8, vocab=1024)
    sizes = draw.choice((small, large))
    module = parse(communication.gpt(layers=1, mesh=(2, 2), **sizes))
    (mesh,) = dist.meshes_of(module).values()
    for v in tensors(module):
        if dist.layout_of(v) is not None and draw.random() < 0.7:
            other = random_layout(draw, mesh, len(unsharded_type(v).get_shape()))
            set_type(v, dist.with_layout(unsharded_type(v), other))
    for f in functions(module):
        update_signature(f)
    return module


def functions(module: ModuleOp) -> list[FuncOp]:
    return [f for f in module.body.ops if isinstance(f, FuncOp)]


def tensors(module: ModuleOp) -> list[SSAValue]:
    blocks = [f.body.block for f in functions(module)]
    return [v for b in blocks for v in values(b) if isinstance(v.type, TensorType)]


def layouts(module: ModuleOp) -> dict[str | None, Layout | None]:
    return {v.name_hint: dist.layout_of(v) for v in tensors(module)}


def seconds(module: ModuleOp) -> float:
    (cost,) = report(apply(module, *LOWERED))
    return sum(op.seconds for op in cost.ops)


@pytest.mark.parametrize("seed", SEEDS)
def test_these_steps_are_no_slower_than_with_activations_first(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    reopened = seconds(annotated(seed))
    with monkeypatch.context() as m:
        m.setattr(propagate_strategies, "reopened", propagate)
        first = seconds(annotated(seed))
    assert reopened < first * 0.99 if seed in (12, 17) else reopened <= first * (1 + 1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_ops_does_not_matter(seed: int):
    module, shuffled = annotated(seed), annotated(seed)
    draw = random.Random(seed)
    for f in functions(shuffled):
        shuffle(f, draw)
    apply(module, "propagate-strategies")
    apply(shuffled, "propagate-strategies")
    assert layouts(shuffled) == layouts(module)
    again = module.clone()
    apply(again, "propagate-strategies")
    assert layouts(again) == layouts(module)


def shuffle(f: FuncOp, draw: random.Random) -> None:
    """Put the ops of a function into another order, in which operands still come first."""
    block = f.body.block
    left, placed = list(block.ops), set[Operation]()

    def is_ready(op: Operation) -> bool:
        if isinstance(op, ReturnOp):
            return len(left) == 1
        return all(v.owner is block or v.owner in placed for v in op.operands)

    while left:
        op = draw.choice([op for op in left if is_ready(op)])
        left.remove(op)
        placed.add(op)
        op.detach()
        block.add_op(op)
