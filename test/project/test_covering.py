"""Covering arrays: every pair is there, and the rows are few."""

import random
from itertools import combinations, product

import pytest
from op_cases import CASES, Case
from support import op_layouts
from support.covering import Covered, covering
from support.harness import MESH, layouts, ordered_subsets
from support.op_layouts import BY_NAME, WIDE_MESH, by_kin, exchanged, kin, signature

from shardir.algebra.factors import try_op_sharding

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
    rows = covering([range(4)] * 4, random.Random(0), [Covered(0, k) for k in (1, 2, 3)])
    assert len(rows) == 16
    assert {(r[0], r[3]) for r in rows} == {*product(range(4), repeat=2)}


def test_pairs_of_parts():
    """Of two pairs of numbers each two of their numbers, in fewer rows than each two pairs."""
    columns = [[*product(range(3), repeat=2)]] * 2
    rows = covering(columns, random.Random(0), [Covered(0, 1, lambda p: [*enumerate(p)])])
    for i, j in product(range(2), repeat=2):
        assert {(x[i], y[j]) for x, y in rows} == {*product(range(3), repeat=2)}
    assert 9 <= len(rows) <= 2 * 9


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
    """Up to the names of the axes each layout of each value, each split of each dimension of each
    value with each op, and each two splits of dimensions of two operands (up to matrices); over 2x3
    each split of each dimension of each value, up to the order of its axes; each case on both
    meshes."""
    for key, cases in kin().items():
        ins, outs = (list(map(len, v)) for v in signature(cases[0], BY_NAME[cases[0]].elements[0]))
        found = of_kin(cases, MESH)
        found += [(*r[:3], *(l and exchanged(l) for l in r[3:])) for r in found]
        for k, rank in enumerate([*ins, *outs], 3):
            assert {r[k] for r in found} >= {*layouts(rank)}, key
            for op in {r[0] for r in found}:
                splits = {x for r in found if r[0] == op and r[k] for x in enumerate(r[k].dims)}
                assert splits == {*product(range(rank), ordered_subsets(MESH.names))}, key
            splits = {
                (d, frozenset(x)) for r in of_kin(cases, WIDE_MESH) for d, x in enumerate(r[k].dims)
            }
            axes = map(frozenset, ordered_subsets(WIDE_MESH.names))
            assert splits == {*product(range(rank), axes)}
        for i, j in combinations(range(len(ins)), 2):
            if max(ins[i], ins[j]) > op_layouts.MATRIX:
                continue
            for d, e in product(range(ins[i]), range(ins[j])):
                together = {(r[3 + i].dims[d], r[3 + j].dims[e]) for r in found}
                assert together == {*product(ordered_subsets(MESH.names), repeat=2)}, key
        for mesh in (MESH, WIDE_MESH):
            assert {r[1] for r in of_kin(cases, mesh)} == {*cases}, key


def test_each_factor_of_each_case_is_split_where_it_is_computed():
    """No operand of aligned layouts moves, and each factor that can be split over an axis is."""
    unlike = [str(case) for case in CASES if not is_split(case)]
    assert not unlike


def is_split(case: Case) -> bool:
    f = op_layouts.factors(str(case), case.elements[0])
    found: set[str] = set()
    for row in op_layouts.aligned(str(case), case.elements[0]):
        chosen = f.axes_of(row, WIDE_MESH)
        placed = try_op_sharding(f, chosen, WIDE_MESH)
        if placed is None or placed.operands != row[: len(f.operands)]:
            return False
        found |= chosen.keys()
    return found >= {
        name
        for name, size in f.sizes
        if size > 1 and name not in f.replicate
        if any(try_op_sharding(f, {name: (a,)}, WIDE_MESH) for a in WIDE_MESH.names)
    }


def test_each_element_type_of_each_op_has_a_layout():
    wanted = {(c.op, e) for c in CASES for e in c.elements}
    assert {(BY_NAME[case].op, e) for (case, e), found in by_kin().items() if found} == wanted
