"""Mutants of search: strategies for the minimum cost."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "the default gap is 0.2",
        "A solution within a fifth of the bound counts as the best.",
        "shardir/search/solver.py",
        "GAP = 5e-4",
        "GAP = 0.2",
        "test/search/test_elimination.py",
    ),
    Mutant(
        "a recompute span ends one op late",
        (
            "A recomputed value is counted as freed while its first use in the backward part "
            "reads it."
        ),
        "shardir/search/live_bytes.py",
        "Span(last + 1, first - 1)",
        "Span(last + 1, first)",
        "test/search/test_search_memory.py",
    ),
    Mutant(
        "a recompute span begins one op early",
        "A recomputed value is counted as freed while its last use in the forward part reads it.",
        "shardir/search/live_bytes.py",
        "Span(last + 1, first - 1)",
        "Span(last, first - 1)",
        "test/search/test_search_memory.py",
    ),
    Mutant(
        "eliminated variables take their worst value",
        "The values of eliminated variables are the most expensive ones.",
        "shardir/search/elimination.py",
        "for f in bucket]).argmin())",
        "for f in bucket]).argmax())",
        "test/search/test_elimination.py -k minimum_of_all",
    ),
    Mutant(
        "the relaxation excludes the optimum",
        "Values whose bound is the best known cost are ruled out with some that are better.",
        "shardir/search/relaxation.py",
        "keep = bound + more <= limit",
        "keep = bound + 2 * more <= limit",
        "test/search/test_elimination.py",
    ),
    Mutant(
        "a folded layer costs once",
        "Repeated layers are solved as one, whose redistributions cost as much as those of one.",
        "shardir/search/relaxation.py",
        "found.add(*kind.groups, kind.count * kind.table)",
        "found.add(*kind.groups, kind.table)",
        "test/search/test_elimination.py -k folded",
    ),
    Mutant(
        "a bound omits the price of the limit",
        "The bound with a price for memory does not subtract the price of the limit.",
        "shardir/search/memory_limit.py",
        "found.bound - float(price.sum())",
        "found.bound",
        "test/search/test_search_memory.py -k limit",
    ),
    Mutant(
        "prices of a limit are half",
        "The prices of memory are not those of the linear program.",
        "shardir/search/prices.py",
        "np.maximum(-dual[:rows], 0.0)",
        "np.maximum(-dual[:rows], 0.0) / 2",
        "test/search/test_search_memory.py -k prices",
    ),
    Mutant(
        "adjusted plans exceed the limit",
        "A plan that keeps to the limit is changed beyond it where that is faster.",
        "shardir/search/adjust.py",
        "self._added_bytes(now, change)).max() <= self.limit",
        "self._added_bytes(now, change)).max() <= 2 * self.limit",
        "test/search/test_search_memory.py -k adjusted",
    ),
    Mutant(
        "nothing is reopened",
        "Layouts that are refused to parameters stay refused, whatever they cost.",
        "shardir/search/reopening.py",
        "return [v for v, i in self.variable.items() if self._is_other(v)[found.choice[i]]]",
        "return []",
        "test/search/test_reopening.py",
    ),
    Mutant(
        "reopening omits cotangents",
        "The redistributions and reductions of cotangents are not counted.",
        "shardir/search/reopening.py",
        "return there + self._seconds(value, cotangent, layout.complete, value.is_bundled)",
        "return there",
        "test/search/test_reopening.py",
    ),
    Mutant(
        "pairs are transposed",
        "A table of costs is added with its variables exchanged.",
        "shardir/search/problem.py",
        "i, j, table = j, i, table.T",
        "i, j, table = j, i, table",
        "test/search/test_elimination.py",
    ),
    Mutant(
        "shares of a bucket are omitted",
        "The latency of a bucket that tensors share is not counted in full.",
        "shardir/search/buckets.py",
        "(own[key] - shares.of(key))",
        "0",
        "test/search/test_buckets.py",
    ),
]
