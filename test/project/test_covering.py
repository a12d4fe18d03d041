"""Covering arrays: every pair is there, and the rows are few."""

import random
from itertools import combinations, product

import laws
import pytest
from covering import covering
from harness import MESH, layouts, ordered_subsets
from laws import BY_NAME, WIDE_MESH, by_kin, exchanged, kin, signature

SIZES = [(3, 3, 3, 3), (2, 3, 4, 5), (7, 1, 6), (11, 11, 11), (1, 1), (5,), (9, 2, 2, 2, 2, 2)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_pair_is_in_a_row(sizes: tuple[int, ...]):
    columns = [range(n) for n in sizes]
    rows = covering(columns, random.Random(0))
    for i, j in combinations(range(len(sizes)), 2):
        assert {(r[i], r[j]) for r in rows} == {*product(columns[i], columns[j])}
    if len(sizes) > 1:
        largest, second, *_ = sorted(sizes, reverse=True)
        assert largest * second <= len(rows) <= 2 * largest * second


def test_pairs_of_some_columns_only():
    rows = covering([range(4)] * 4, random.Random(0), [(0, 1), (0, 2), (0, 3)])
    assert len(rows) == 16
    assert {(r[0], r[3]) for r in rows} == {*product(range(4), repeat=2)}


def test_an_equivalent_row_counts():
    """Of two rows that differ in the signs of all values one is enough."""
    signs = [-2, -1, 0, 1, 2]
    rows = covering([signs] * 3, random.Random(0), equivalent=lambda r: tuple(-x for x in r))
    assert len(rows) < 25
    both = {*rows, *(tuple(-x for x in r) for r in rows)}
    for i, j in combinations(range(3), 2):
        assert {(r[i], r[j]) for r in both} == {*product(signs, repeat=2)}


# ---- the covering arrays of the laws of ops ----


def of_kin(cases: list[str], mesh: object) -> list[tuple]:
    """The op, the element type and the layouts of each row of these cases on this mesh."""
    return [
        (BY_NAME[case].op.name, case, element, *some)
        for case in cases
        for element in BY_NAME[case].elements
        for m, some in by_kin()[case, element]
        if m is mesh
    ]


def test_layouts_of_kin():
    """Each op with each layout of each value, and each two layouts of two operands (up to
    matrices), up to the names of the axes; over 2x3 each split of each dimension of each value;
    each case on both meshes."""
    for key, cases in kin().items():
        ins, outs = (list(map(len, v)) for v in signature(cases[0], BY_NAME[cases[0]].elements[0]))
        found = of_kin(cases, MESH)
        found += [(*r[:3], *(l and exchanged(l) for l in r[3:])) for r in found]
        for k, rank in enumerate([*ins, *outs], 3):
            for op in {r[0] for r in found}:
                assert {r[k] for r in found if r[0] == op} >= {*layouts(rank)}, key
            splits = {(d, x) for r in of_kin(cases, WIDE_MESH) for d, x in enumerate(r[k].dims)}
            assert splits == {(d, x) for d in range(rank) for x in ordered_subsets(WIDE_MESH.names)}
        for i, j in combinations(range(len(ins)), 2):
            wanted = {*product(layouts(ins[i]), layouts(ins[j]))}
            if len(wanted) <= laws.PAIRS:
                assert {(r[3 + i], r[3 + j]) for r in found} >= wanted, key
        for mesh in (MESH, WIDE_MESH):
            assert {r[1] for r in of_kin(cases, mesh)} == {*cases}, key


def test_each_element_type_of_each_case_has_a_layout():
    assert all(by_kin().values())
