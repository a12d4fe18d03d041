"""retain-gathered against all choices of gathers that are not repeated."""

from itertools import chain, combinations

import pytest
from support.perceptron import BEFORE_RETAINING, perceptron
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

import shardir
from shardir.cost.functions import functions
from shardir.cost.memory import memory_of
from shardir.dialects import dist
from shardir.rewriting.marks import RECOMPUTE
from shardir.rewriting.rewriter import Rewriter
from shardir.tools import bench

communication = bench.load("bytes")


def figures(module: ModuleOp) -> tuple[int, int]:
    """Return the peak of a step, and the bytes that it communicates."""
    ((f, mesh),) = functions(module)
    return memory_of(f, mesh).peak, communication.communicated(module)[1]


def without(module: ModuleOp, chosen: tuple[int, ...]) -> ModuleOp:
    """Return a copy of a program without some of its repeated gathers, by their numbers."""
    copy = module.clone()
    gathers = [op for op in copy.walk() if isinstance(op, dist.AllGatherOp)]
    first: dict[SSAValue, SSAValue] = {
        v: out
        for op in gathers if RECOMPUTE not in op.attributes
        for v, out in zip(op.values, op.outs, strict=True)
    }  # fmt: skip
    repeated = [op for op in gathers if RECOMPUTE in op.attributes]
    for op in (repeated[n] for n in chosen):
        Rewriter.replace(op, [first[v] for v in op.values])
    return copy


@pytest.mark.parametrize("batch", [8, 64, 512, 4096])
def test_no_choice_within_the_peak_gathers_less(batch: int) -> None:
    text, how = perceptron(batch, 8), {"plan": "fsdp"}
    module = shardir.compile(text, BEFORE_RETAINING, **how).module
    peak, every = figures(module)
    numbers = range(sum(
        isinstance(op, dist.AllGatherOp) and RECOMPUTE in op.attributes for op in module.walk()
    ))  # fmt: skip
    choices = chain.from_iterable(combinations(numbers, n) for n in range(len(numbers) + 1))
    each = [figures(without(module, chosen)) for chosen in choices]
    fewest = min(received for most, received in each if most <= peak)
    found = figures(shardir.compile(text, f"{BEFORE_RETAINING},retain-gathered", **how).module)
    assert found == (peak, fewest)
    assert fewest < every
