"""docs/examples/make_pangu.py: the parameters of the published configurations, and its program
against the example that is written out."""

from importlib import import_module
from math import prod
from pathlib import Path

import pytest
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp

from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import Role, arguments
from shardir.passes import PASSES
from shardir.syntax.parser import parse

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
make_pangu = import_module("make_pangu")
pangu, SIZES = make_pangu.pangu, make_pangu.SIZES


def loss(module: ModuleOp) -> FuncOp:
    (f,) = [op for op in module.body.ops if isinstance(op, FuncOp)]
    return f


def published(layers: int, d: int) -> int:
    """Return the number of parameters: per layer four products of the attention, two of the MLP
    with biases, two norms; words, positions, queries; the norm before the query layer."""
    layer = 4 * d * d + 2 * d * 4 * d + 4 * d + d + 2 * 2 * d
    return layers * layer + 40_000 * d + 2 * 1024 * d + 2 * d


@pytest.mark.parametrize(
    ("size", "billions", "within"),
    # 40 layers of 5,120 have 12.8 billion parameters; with the query layer as one more they would
    # have 13.1, as published, but the others 2.7 and 210, not 2.6 and 207.
    [("2.6B", 2.6, 0.01), ("13.1B", 13.1, 0.025), ("207B", 207.0, 0.001)],
)
def test_parameters_are_those_published(size: str, billions: float, within: float):
    f = loss(parse(pangu(**SIZES[size])))
    count = sum(
        prod(unsharded_type(v).get_shape())
        for v, argument in zip(f.body.block.args, arguments(f), strict=True)
        if argument.role is Role.PARAMETER
    )
    assert count == published(SIZES[size]["layers"], SIZES[size]["width"])
    assert count / 1e9 == pytest.approx(billions, rel=within)


def test_in_small_it_is_the_example():
    """Op by op, except the example's layouts."""
    example = parse((EXAMPLES / "pangu_alpha.ir").read_text())
    PASSES["strip-layouts"]()().apply(Context(), example)
    made = parse(pangu(layers=2, width=8, heads=2, seq=6, vocab=12, batch=4))
    assert loss(made).body.is_structurally_equivalent(loss(example).body)
