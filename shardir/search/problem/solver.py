"""The minimum of a sum of costs, or a solution that is proven to be close to it.

1. Bucket elimination (elimination.py), if none of its tables has more than `cap` entries.
2. Otherwise variables of one or two neighbours are eliminated first: their tables are again of one
   variable or of two (Scholz and Eckstein 2002).
3. Costs are moved between the others, so that the sum of their minima is a bound (relaxation.py).
4. Repeated layers are solved as one: a problem with a variable for each group of equal ones has the
   solutions in which these have equal values. Its costs are those that were moved.
5. The bound rules out values, again and again, until the tables fit, or until the best solution is
   within the gap. The solutions to compare with are that of 4, and others from mini-buckets, and
   from elimination among the values nearest to the bound.
6. If the bound stalls before, the result is the best solution so far, with the best bound.
"""

from collections.abc import Callable, Sequence
from math import inf

import numpy as np

from shardir.search.problem.elimination import Elimination, Solution, eliminate, fits
from shardir.search.problem.problem import CostProblem
from shardir.search.problem.relaxation import Margins, Relaxation

MAX_TABLE_ENTRIES = 1 << 24
"""The entries of the largest table: 128 MiB."""

MAX_FILTER_ENTRIES = 1 << 16
"""The entries of the largest table while values are ruled out."""

DEFAULT_GAP = 5e-3
"""The gap at which the solver stops: an eighth of the error of the time model, which is about 4%.
With a tenth of it the programs of 60 random steps take as long, and those of GPT and BERT on six
clusters at most 0.1% less."""

PAIR_NEIGHBOURS = 2
"""The neighbours of a variable whose elimination leaves a table of a pair, at most."""

MAX_NARROWINGS = 16
"""How many times values are ruled out."""

SWEEPS = 20
"""The sweeps of messages before values are ruled out."""

FOLDED_SWEEPS = 5
"""Those before values of layers that are solved as one are: messages have moved their costs."""

MIN_REPETITION = 2
"""The number of variables for each group of equal ones from which on layers are solved as one."""

STALLED_ROUNDS = 3
"""The number of narrowings in which the gap must shrink to less than MIN_PROGRESS of itself."""

MIN_PROGRESS = 0.9

MIN_GAP_PART = 1e-6
"""The smallest part of the gap in which solutions near to the bound are looked for."""

ReportBounds = Callable[[float, float], object]
"""Receives the objective and the bound after each narrowing."""


def ignore(objective: float, bound: float) -> None:
    """Ignore the progress."""


def solve(
    problem: CostProblem,
    cap: int = MAX_TABLE_ENTRIES,
    gap: float = DEFAULT_GAP,
    progress: ReportBounds = ignore,
    bounds: bool = True,
    sweeps: int = SWEEPS,
    enough: float = -inf,
) -> Solution:
    """Return the minimum; or, where its tables would have more than `cap` entries, a solution that
    is proven to be within `gap` of it, or the best one found.

    Args:
        bounds: whether the bound matters too: without, it is no larger than the gap needs. The
            solution is the same.
        sweeps: of messages before values are ruled out for the first time.
        enough: the cost of a solution at which no better one is looked for.
    """
    if _fits(problem, cap):
        return eliminate(problem, cap)
    elimination = Elimination(problem)
    elimination.run(cap, PAIR_NEIGHBOURS)
    rest, number_of = elimination.rest()
    found = narrow(rest, cap, gap, progress, bounds, sweeps, enough)
    choice = elimination.choice({v: found.choice[i] for v, i in number_of.items()})
    objective = problem.cost(choice)
    return Solution(choice, objective, min(found.bound, objective))


def narrow(
    problem: CostProblem, cap: int, gap: float, progress: ReportBounds, bounds: bool, sweeps: int,
    enough: float,
) -> Solution:  # fmt: skip
    """Return a solution of a problem whose tables do not fit, by ruling out values until they do,
    or until the gap is reached or a solution costs no more than is `enough`."""
    allowed = [np.arange(len(u)) for u in problem.unary]
    relaxation = Relaxation(problem, [int(u.argmin()) for u in problem.unary])
    relaxation.run(sweeps)
    repeats = len(relaxation.groups) * MIN_REPETITION <= len(allowed)
    if repeats:
        folded = solve(relaxation.folded(), cap, gap, bounds=False, sweeps=FOLDED_SWEEPS)
        relaxation.offer(relaxation.unfolded(folded.choice))
    filter_cap, bound, part = min(cap, MAX_FILTER_ENTRIES), -inf, 1 / len(allowed)
    gaps: list[float] = []

    def close() -> float:
        return relaxation.objective - gap * abs(relaxation.objective)

    def is_close() -> bool:
        return bound >= close() or relaxation.objective <= enough

    for narrowing in range(MAX_NARROWINGS):
        if narrowing:
            relaxation.run(SWEEPS, inf if bounds else close())
        margins = relaxation.margins()
        bound = max(bound, margins.bound)
        looks = narrowing or not repeats  # else the solution of the layers is to compare with
        if looks and not is_close():
            rough = eliminate(relaxation.reparametrised(), filter_cap)
            relaxation.offer(rough.choice)
            bound = max(bound, rough.bound)
        if looks and not is_close():
            part = search_near_bound(relaxation, margins, 2 * part, filter_cap)
        progress(relaxation.objective, bound)
        gaps.append(relaxation.objective - bound)
        stalled = len(gaps) > STALLED_ROUNDS and gaps[-1] > MIN_PROGRESS * gaps[-1 - STALLED_ROUNDS]
        if stalled or is_close():
            break
        keep = relaxation.allowed(margins)
        allowed = [a[k] for a, k in zip(allowed, keep, strict=True)]
        relaxation = relaxation.restricted(keep)
        if _fits(relaxation.problem, cap):
            found = eliminate(relaxation.problem, cap)
            return _of(problem, allowed, found.choice, found.bound)
    return _of(problem, allowed, relaxation.choice, bound)


def search_near_bound(relaxation: Relaxation, margins: Margins, part: float, cap: int) -> float:
    """Offer the best solution among the values whose margins are at most a part of the gap, and
    those of the best solution so far. The part is halved until the tables fit; return it."""
    while True:
        keep = relaxation.allowed(margins, part)
        if part < MIN_GAP_PART or fits([len(k) for k in keep], relaxation.problem.pairs, cap):
            break
        part /= 2
    found = eliminate(relaxation.problem.restricted(keep), cap)
    relaxation.offer([int(k[x]) for k, x in zip(keep, found.choice, strict=True)])
    return part


def _fits(problem: CostProblem, cap: int) -> bool:
    return fits([len(u) for u in problem.unary], problem.pairs, cap)


def _of(
    problem: CostProblem, allowed: Sequence[np.ndarray], choice: Sequence[int], bound: float
) -> Solution:
    """Return a solution of a restricted problem as one of the problem."""
    full = [int(a[x]) for a, x in zip(allowed, choice, strict=True)]
    objective = problem.cost(full)
    return Solution(full, objective, min(bound, objective))
