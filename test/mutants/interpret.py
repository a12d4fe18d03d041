"""Mutants of interpret: numpy semantics of programs, and the check of equivalence."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "shards are gathered along dimension 0",
        "An all-gather concatenates along the first dimension.",
        "shardir/interpret/collectives.py",
        "_all_gather",
        "[np.concatenate(group, axis=op.dim.value.data)] * len(group)",
        "[np.concatenate(group)] * len(group)",
        "test/interpret/test_collectives.py::test_its_layout_is_what_numpy_makes",
    ),
    Mutant(
        "all ranks hold the addend",
        "replicated_to_partial leaves the value on every rank.",
        "shardir/interpret/collectives.py",
        "_replicated_to_partial",
        "return [group[0], *(np.zeros_like(x) for x in group[1:])]",
        "return group",
        "test/interpret/test_collectives.py::test_its_layout_is_what_numpy_makes",
    ),
    Mutant(
        "an all-to-all sends its last shard first",
        "An all-to-all concatenates in the reverse order of the group.",
        "shardir/interpret/collectives.py",
        "_all_to_all",
        "n, k) for x in group]",
        "n, k) for x in group[::-1]]",
        "test/interpret/test_collectives.py::test_its_layout_is_what_numpy_makes",
    ),
    Mutant(
        "gradients are not compared",
        "The check of equivalence accepts any gradient.",
        "shardir/interpret/equivalence.py",
        "_check_request",
        "SLOPE_TOLERANCE * max(size, abs(slope), MIN_SCALE)",
        "np.inf",
        "test/interpret/test_equivalence.py::test_a_wrong_gradient_is_found",
    ),
    Mutant(
        "a tenth is within the tolerance",
        "The check of equivalence accepts a relative difference of a tenth.",
        "shardir/interpret/equivalence.py",
        "compare",
        "TOLERANCE.get(element, 1e-4) * scale",
        "0.1 * scale",
        "test/interpret/test_equivalence.py -k tolerance",
    ),
    Mutant(
        "one rank has all maxima",
        "A partial maximum is the value itself on one rank.",
        "shardir/interpret/values.py",
        "partial_value",
        "return np.where(turn == holder % n, x, other)",
        "return np.where(k == holder % n, x, other)",
        "test/interpret/test_values.py",
    ),
    Mutant(
        "a share has one sign",
        "The shares of a sum are the same multiple of all elements.",
        "shardir/interpret/values.py",
        "partial_value",
        "turn = (k + sum(np.indices(x.shape, sparse=True), np.zeros(x.shape, np.int64))) % n",
        "turn = np.full(x.shape, k)",
        "test/interpret/test_values.py",
    ),
]
