"""Mutants of algebra: layouts, meshes, collectives, planner, propagation, notations."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "shards are cut by floor division",
        "Shards of an uneven dimension lose its last elements.",
        "shardir/algebra/mesh.py",
        "c = -(-size // parts)",
        "c = size // parts",
        "test/algebra/test_layouts.py::test_shards_hold_each_element_once",
    ),
    Mutant(
        "groups are ordered by rank",
        ("The members of a group over (tp, dp) are in the order of ranks, not of the axes."),
        "shardir/algebra/mesh.py",
        "return tuple(tuple(r for _, r in sorted(m)) for m in members.values())",
        "return tuple(tuple(sorted(r for _, r in m)) for m in members.values())",
        "test/algebra/test_meshes.py::test_groups_partition_the_ranks",
    ),
    Mutant(
        "sub-axes overlap at their ends",
        "Adjacent sub-axes of an axis count as overlapping.",
        "shardir/algebra/mesh.py",
        "return b0 % a1 != 0 and a0 % b1 != 0",
        "return b0 % a1 != 0 or a0 % b1 != 0",
        "test/algebra/test_meshes.py::test_axes_overlap_unless_their_coordinates_are_independent",
    ),
    Mutant(
        "a reduced factor leaves nothing partial",
        "A matmul split along its summed dimension has a complete result.",
        "shardir/algebra/factors.py",
        "reduced = [a for f in lacking for a in chosen.get(f, ())]",
        "reduced = []",
        "test/algebra/test_factors.py::test_a_placement_is_legal_and_splits_what_is_agreed_on",
    ),
    Mutant(
        "partial maxima pass through sums",
        "An op that is linear in all operands passes a partial maximum on.",
        "shardir/algebra/factors.py",
        '(first.reduction == "sum" or factors.linear == "any")',
        "True",
        (
            "test/algebra/test_factors.py::test_a_placement_is_legal_and_splits_what_is_agreed_on"
            "[add]"
        ),
    ),
    Mutant(
        "a merged dimension is split at its minor factor",
        ("The axes of a reshaped dimension split its minor factor before its major one."),
        "shardir/algebra/factors.py",
        "            if left > 1:\n                break\n        return out, not todo",
        "        return out, not todo",
        (
            "test/algebra/test_factors.py::test_compose_is_the_inverse_of_assign "
            "test/algebra/test_factors.py::test_assign_is_the_inverse_of_compose"
        ),
    ),
    Mutant(
        "an all-gather pairs with an all-slice",
        "The transposed collective of an all-gather drops the reduction.",
        "shardir/algebra/collectives/all_devices.py",
        'transposed = "reduce_scatter"',
        'transposed = "all_slice"',
        "test/algebra/test_transitions.py",
    ),
    Mutant(
        "any value can be reduced",
        "Reducing a value that is not partial is legal.",
        "shardir/algebra/transitions.py",
        '    if rest is None:\n        found = f"expected a value',
        '    if rest is None:\n        return layout\n        found = f"expected a value',
        "test/algebra/test_transitions.py",
    ),
    Mutant(
        "an all-gather removes major axes",
        "A dimension over (dp, tp) can be gathered over dp.",
        "shardir/algebra/transitions.py",
        "if axes and have[-len(axes) :] == axes:",
        "if axes and have[: len(axes)] == axes:",
        "test/algebra/test_transitions.py",
    ),
    Mutant(
        "the bound of a reduce-scatter is too high",
        "The lower bound of a plan counts one message too many for each group.",
        "shardir/algebra/bound.py",
        "(lost - stay + max(groups, 1) - 1)",
        "(lost - stay + max(groups, 1))",
        "test/algebra/test_bound.py::test_rings_reach_the_bound",
    ),
    Mutant(
        "complete values never become partial",
        "The lower bound between complete layouts has the factors of gathers and exchanges alone.",
        "shardir/algebra/bound.py",
        "if c.planned and c.communicates]",
        "if c.planned and c.communicates and not c.reduces]",
        "test/algebra/test_bound.py::test_no_moves_are_below_the_bound",
    ),
    Mutant(
        "an all-reduce of partial values counts twice",
        "The lower bound from a partial value has twice the factor of an all-reduce.",
        "shardir/algebra/bound.py",
        "factors.complete if complete else factors.received",
        "factors.complete",
        "test/algebra/test_bound.py::test_no_moves_are_below_the_bound",
    ),
    Mutant(
        "the cuts of crossing levels are lost",
        "Where sub-axes of a layout and levels cross, no move is over a part of an axis.",
        "shardir/algebra/moves.py",
        "if mesh.clash(tuple({*mesh.cut(both, both)})) is None:",
        "if both:",
        "test/algebra/test_every_path.py",
    ),
    Mutant(
        "axes that are left stay in their dimensions",
        "No exchange on the way moves other axes to a dimension that they split evenly.",
        "shardir/algebra/moves.py",
        "    if not any(map(sizes_of, now.dims)):",
        "    if not now.dims:",
        "test/algebra/test_every_path.py",
    ),
    Mutant(
        "an all-reduce receives as much as a reduce-scatter",
        "The bytes of an all-reduce are half of what they are.",
        "shardir/algebra/collectives/all_devices.py",
        "return -(-2 * t.have * (t.n - 1) // t.n)",
        "return -(-t.have * (t.n - 1) // t.n)",
        "test/algebra/test_bound.py::test_rings_reach_the_bound",
    ),
    Mutant(
        "a tree halves the bytes",
        "The tree form of an all-reduce moves each byte once.",
        "shardir/algebra/forms.py",
        'Form("tree", deep * links.latency, 2 * each)',
        'Form("tree", deep * links.latency, each)',
        "test/algebra/test_forms.py::test_forms_by_hand",
    ),
    Mutant(
        "a halo ends one element early",
        "The last element of a window is not fetched from the neighbour.",
        "shardir/algebra/windows.py",
        "high = min(p * w.step + w.offset + w.size, w.rows)",
        "high = min(p * w.step + w.offset + w.size - 1, w.rows)",
        "test/algebra/test_windows.py -k holders",
    ),
    Mutant(
        "closed dimensions are refined",
        "Propagation splits a dimension that is annotated as closed.",
        "shardir/algebra/sharding.py",
        "if d not in open or not axes or axes == new[d]:",
        "if not axes or axes == new[d]:",
        (
            "test/algebra/test_propagation_engine.py::test_closed_dimensions_stay_and_open_ones_a"
            "re_refined"
        ),
    ),
    Mutant(
        "the first proposal wins",
        "A conflict is resolved for the finest split, whatever it costs.",
        "shardir/algebra/propagation/conflicts.py",
        "ranked(found, seconds, lambda",
        "ranked(found, lambda _: 0.0, lambda",
        "test/algebra/test_propagation_engine.py::test_a_conflict_is_resolved_for_the_cheapest",
    ),
    Mutant(
        "rounding decides",
        "Of two estimated times that differ by rounding one is less.",
        "shardir/algebra/estimates.py",
        "if fastest < time * IMPROVEMENT:",
        "if fastest < time:",
        "test/algebra/test_estimates.py::test_times_that_differ_by_rounding_are_equal",
    ),
    Mutant(
        "backward barriers are open",
        "A barrier against backward propagation passes axes backward.",
        "shardir/algebra/propagation/worklist.py",
        "mine, theirs = theirs, mine",
        "pass",
        "test/algebra/test_propagation_engine.py::test_a_barrier_passes_axes_in_its_directions",
    ),
    Mutant(
        "Shardy's priorities are lost",
        "The priority of a dimension is not written.",
        "shardir/algebra/sdy.py",
        'priority = f"p{sharding.priority(i)}" if sharding.priority(i) else ""',
        'priority = ""',
        "test/algebra/test_sdy.py",
    ),
    Mutant(
        "DTensor splits at the minor end",
        "A placement on a later mesh dim does not stride over the parts of the minor axes.",
        "shardir/algebra/placements.py",
        "if dims.index(b) > dims.index(a)",
        "if dims.index(b) < dims.index(a)",
        (
            "test/algebra/test_placements.py::test_placements "
            "test/algebra/test_placements.py::test_the_order_of_a_spec"
        ),
    ),
    Mutant(
        "results of strategies are placed one after another",
        "Of two results of strategies that are used together, the first in the text decides.",
        "shardir/algebra/propagation/results.py",
        "for change in [c for n in together for c in _changes(state, n)]:",
        "for change in (c for n in together for c in _changes(state, n)):",
        "test/algebra/test_propagation_laws.py -k nodes_with_strategies",
    ),
    Mutant(
        "the first user of a result decides",
        "Of equally fast layouts of a result, that of its first user in the text is chosen.",
        "shardir/algebra/propagation/results.py",
        "layout != present, str(layout)",
        'layout != present, ""',
        "test/algebra/test_propagation_laws.py -k nodes_with_strategies",
    ),
]
