"""The layouts with which the laws of ops are checked: what they have together."""

from itertools import product

from op_cases import CASES, Case
from support.harness import MESH
from support.op_laws import LAWS

from shardir.algebra.factors import try_op_sharding
from shardir.algebra.layout import Layout
from shardir.testing.op_layouts import WIDE_MESH, splits_of

TRIED = LAWS.layouts


def of_kin(cases: list[str], mesh: object) -> list[tuple[str, tuple[Layout | None, ...]]]:
    """The case and the layouts of each row of these cases on this mesh."""
    return [
        (case, some)
        for case in cases
        for element in TRIED.by_name[case].elements
        for m, some in TRIED.by_kin[case, element]
        if m is mesh
    ]


def test_layouts_of_kin():
    """Over 2x2 each dimension of each value is split over no axis and one, of the largest kin of
    each op over both, and results have no layout in some row."""
    both = {key[0] for key in TRIED.kin if TRIED.most_axes(key) == len(MESH.names)}
    assert both == {kind for kind, _ in TRIED.kin}
    for key, cases in TRIED.kin.items():
        ins, outs = (list(map(len, v)) for v in TRIED.first_signature(cases[0]))
        found = of_kin(cases, MESH)
        for k, rank in enumerate([*ins, *outs]):
            layouts = {some[k] for _, some in found}
            splits = {split for l in layouts if l for split in splits_of(l)}
            assert splits >= {*product(range(rank), range(TRIED.most_axes(key) + 1))}, key
            assert k < len(ins) or None in layouts, key


def test_each_factor_of_each_case_is_split_where_it_is_computed():
    """No operand of aligned layouts moves, and each factor that can be split over an axis is."""
    unlike = [str(case) for case in CASES if not is_split(case)]
    assert not unlike


def is_split(case: Case) -> bool:
    f = TRIED.factors(str(case), case.elements[0])
    found: set[str] = set()
    for row in TRIED.aligned(str(case), case.elements[0]):
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


def test_each_element_type_has_a_layout():
    """Of each op; or of some elementwise one, through which all types pass alike."""
    groups = TRIED.groups_of_types
    wanted = {(groups[str(c)], e) for c in CASES for e in c.elements}
    assert {(groups[case], e) for (case, e), found in TRIED.by_kin.items() if found} == wanted
