"""Strategies of ops: their errors, and the devices that numbers stand for."""

from dataclasses import replace

import pytest
from xdsl.dialects.builtin import IntegerAttr, StringAttr, TensorType, f32, i32

from shardir.algebra.factors import Factors
from shardir.algebra.mesh import Axis, Mesh
from shardir.algebra.notation import (
    mesh_of,
    parse_layout,
    parse_strategy,
)
from shardir.algebra.strategy import Strategy
from shardir.diagnostics import ShardirError
from shardir.dialects.nn import EinsumOp, GatherOp

EIGHT = mesh_of("m", "d = 8")
GRID = mesh_of("m", "a = 2, b = 2")
MATMUL = Factors.of([["i", "k"], ["k", "j"]], [["i", "j"]], [(16, 32), (32, 16), (16, 16)])
SOFTMAX = Factors.of([["i", "j"]], [["i", "j"]], [(16, 32)] * 2, replicate=["j"])
MERGED = Factors.of([["a b"]], [["a", "b"]], [(12,), (4, 3)])


@pytest.mark.parametrize(
    "text, factors, mesh, code",
    [
        ("((2, {a}), (1, 1))", MATMUL, GRID, "S1"),
        ("((4, 4), (4, 1))", MATMUL, EIGHT, "S2"),
        ("((3, 1), (1, 1))", MATMUL, EIGHT, "S3"),
        ("((2, 1),)", MATMUL, EIGHT, "S4"),
        ("((2, 1), (1,))", MATMUL, EIGHT, "S4"),
        ("((2, 4), (2, 1))", MATMUL, EIGHT, "S5"),
        ("(({a}, {b}), ({}, {a}))", MATMUL, GRID, "S5"),
        ("((2, 1), (1, 1)) -> ((4, 1),)", MATMUL, EIGHT, "S5"),
        ("((8,),)", MERGED, EIGHT, "S6"),
        ("(({d},),)", MERGED, EIGHT, "S6"),
        ("((2, 2),)", SOFTMAX, EIGHT, "S7"),
        ("(({a}, {b}),)", SOFTMAX, GRID, "S7"),
        ("(({x}, {}), ({}, {}))", MATMUL, GRID, "S8"),
        ("(({a:(1)3}, {}), ({}, {}))", MATMUL, GRID, "S8"),
    ],
)
def test_strategies_that_do_not_fit(text: str, factors: Factors, mesh: Mesh, code: str):
    """[S9], an axis for two factors: test_propagated_layouts.py."""
    with pytest.raises(ShardirError, match=rf"^\[{code}\]"):
        parse_strategy(text).factor_axes(factors, mesh)


def test_numbers_become_axes_major_first():
    """The network of MindSpore's documentation on 8 devices: 2 x 4 x 1."""
    found = parse_strategy("((2, 4), (4, 1))").factor_axes(MATMUL, EIGHT)
    assert found == {"i": (Axis("d", 1, 2),), "k": (Axis("d", 2, 4),)}
    found = parse_strategy("((2, 1), (1, 2))").factor_axes(MATMUL, EIGHT)
    assert found == {"i": (Axis("d", 1, 2),), "j": (Axis("d", 2, 2),)}
    found = parse_strategy("((6,),)").factor_axes(MERGED, mesh_of("m", "d = 12"))
    assert found == {"a": (Axis("d", 1, 2),), "b": (Axis("d", 2, 3),)}


@pytest.mark.parametrize("left", ["bik", "bki", "kbi"])
@pytest.mark.parametrize("right", ["bkj", "bjk", "kjb"])
def test_devices_are_dealt_to_contractions_as_to_matrix_products(left: str, right: str):
    """MindSpore's device matrix of a product is (batch, rows, contracted, columns), whichever of
    its operands is transposed (SetDevMatrixShape in its matmul_info.cc)."""
    sizes, slices = dict(b=4, i=8, k=16, j=32), dict(b=2, i=4, k=2, j=8)
    mesh = mesh_of("m", "d = 128")
    types = [TensorType(f32, [sizes[f] for f in v]) for v in (left, right, "bij")]
    props = {"equation": StringAttr(f"{left},{right}->bij")}
    factors = EinsumOp.rule(types[:2], types[2:], props)
    cuts = tuple(tuple(slices[f] for f in v) for v in (left, right))
    found, taken = Strategy(None, cuts).factor_axes(factors, mesh), mesh.take((2, 4, 2, 8))
    assert taken is not None and found == dict(zip("bikj", taken, strict=True))


@pytest.mark.parametrize("axis", [0, 1])
def test_devices_are_dealt_to_the_indices_of_a_gather_first(axis: int):
    """MindSpore's device matrix is that of the indices, then that of the table (NormalImpl and
    ShardBatchAndAxisImpl in its gather_info.cc)."""
    mesh = mesh_of("m", "d = 64")
    shapes = [(8, 16), (4, 32), (4, 32, 16) if axis == 0 else (8, 4, 32)]
    types = [TensorType(t, s) for t, s in zip((f32, i32, f32), shapes, strict=True)]
    factors = GatherOp.rule(types[:2], types[2:], {"axis": IntegerAttr(axis, 64)})
    found = parse_strategy("((4, 2), (2, 4))").op_sharding(factors, mesh)
    taken = mesh.take((2, 4, 4, 2))
    assert taken is not None
    assert [l.dims for l in found.operands] == [taken[2:], taken[:2]]


def test_two_spellings_of_axes_are_equal():
    found = parse_strategy("(({d:(1)2, d:(2)4}, {}), ({}, {})) -> (({d}, {}),)")
    assert found.factor_axes(MATMUL, EIGHT) == {"i": (Axis("d"),)}


def test_a_strategy_names_the_partial_values_that_an_op_passes_on():
    text = "(({a}, {}), ({a}, {})), partial sum {b}"
    found = parse_strategy(text)
    assert str(found) == text
    add = Factors.of([["i", "j"]] * 2, [["i", "j"]], [(4, 6)] * 3, linear="sum")
    placement = found.op_sharding(add, GRID)
    partial = parse_layout("@m, [{a}, {}], partial sum {b}")
    assert placement.operands == (partial, partial) and placement.results == (partial,)
    with pytest.raises(ShardirError, match=r"^\[S10\]"):
        found.op_sharding(replace(add, linear=""), GRID)
