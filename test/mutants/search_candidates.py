"""Mutants of search: the candidates of ops, and their layouts."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "results of a decomposed op are complete",
        "The search has no reductions of the partial results of decomposed ops.",
        "shardir/search/candidates.py",
        "tuple(builder.layout(v) for v in results)",
        "tuple(builder.layout(v).complete for v in results)",
        "test/search/test_value_moves.py -k decomposed",
    ),
    Mutant(
        "an only axis is not divided",
        "Candidates split no two factors over sub-axes of an only axis.",
        "shardir/search/candidates.py",
        "    if len(axes) != 1:\n        return (axes,)",
        "    if axes:\n        return (axes,)",
        "test/search/test_divisions.py",
    ),
    Mutant(
        "dimensions are split evenly only",
        "Candidates split no dimension that no axis divides.",
        "shardir/search/candidates.py",
        "return few and all(",
        "return not few and all(",
        "test/search/test_uneven.py",
    ),
    Mutant(
        "candidates are dominated whatever they need",
        "A candidate is left out for one that needs its operands in other layouts, at no cost.",
        "shardir/search/domination.py",
        "total += _between(mesh, t, mine, theirs, is_fixed)",
        "pass",
        "test/search/test_candidates.py",
    ),
    Mutant(
        "axes are in the order of the mesh alone",
        "No candidate has the order of axes of an annotated layout.",
        "shardir/search/candidates.py",
        "for each in (split, ordered):",
        "for each in (split,):",
        "test/search/test_candidates.py -k annotated",
    ),
    Mutant(
        "decomposed ops have what unused results need",
        "The search has ops of a decomposition that only results without uses need.",
        "shardir/search/candidates.py",
        "zip(results, _used(op), strict=True) if is_used]",
        "zip(results, _used(op), strict=True)]",
        "test/search/test_candidates.py -k used",
    ),
    Mutant(
        "candidates are those of other used results",
        "Ops of one signature have the same candidates, whichever of their results are used.",
        "shardir/search/candidates.py",
        "types, _used(op), tuple(",
        "types, tuple(",
        "test/search/test_candidates.py -k used",
    ),
    Mutant(
        "results without uses move to their layouts",
        "The search has redistributions of results that nothing uses.",
        "shardir/search/cost_graph.py",
        "if not (users := self._users.get(v, [])):",
        "if (users := self._users.get(v, [])) is None:",
        "test/search/test_value_moves.py -k uses",
    ),
    Mutant(
        "what repeats a constant that costs is not split",
        "All devices compute what costs nothing of constants, whatever these cost.",
        "shardir/search/cost_graph.py",
        "if is_constant and not any(l.complete.used for c in candidates for l in c.results):",
        "if is_constant:",
        "test/search/test_search.py -k no_argument",
    ),
]
