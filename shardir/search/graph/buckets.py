"""Buckets: the fastest plan, where collectives in one buffer cost one latency.

    d_w1, d_w2, d_b2    all-reduced over dp: one bucket
    loss                all-reduced over dp and tp: another

A bucket costs its latency however many tensors are in it, if there is a moment at which all of them
are available and none is used yet: a fixed charge, which is not a sum over
pairs. A sum over pairs can have a share of it for each tensor. If the shares of all tensors that
might be in a bucket add up to one at most, the minimum is a bound for every plan. If they are those
of the tensors that a plan has in it, the sum is the plan's cost, and other buckets are expensive.
So the search repeats with the shares of the best plan so far, or with these less one bucket, as
long as a plan is better (slope scaling; Kim and Pardalos, 1999). The gap bounds the distance of the
last one from the minimum.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple, Protocol

from shardir.algebra.estimates import IMPROVEMENT
from shardir.analysis.storages import Span
from shardir.cost.buckets import MAX_BUCKET_BYTES, Bucket, fuse
from shardir.cost.collective_work import CollectiveTimes
from shardir.search.graph.latency_shares import BucketKey, LatencyShares
from shardir.search.graph.transfer_costs import ValueTransfer
from shardir.search.problem.elimination import Solution
from shardir.search.problem.problem import CostProblem

MAX_SCALINGS = 8
"""How many times shares are set by the number of tensors in each bucket: of one plan until they
agree with it, and of plans one after another."""

Solve = Callable[[CostProblem], Solution]

SolveAgain = Callable[[CostProblem, float], Solution]
"""Solves a problem; a solution of the given cost is good enough."""


class BucketPrices(Protocol):
    """The prices of transfers that may be in buckets."""

    def seconds(self, transfer: ValueTransfer, shares: LatencyShares) -> float:
        """Return the estimated time of a transfer with shares of buckets."""
        ...

    def collectives(self, transfer: ValueTransfer) -> "Sequence[LateCollective]":
        """Return the collectives of a transfer that may be in buckets."""
        ...


class LateCollective(NamedTuple):
    """A collective that may be in a bucket.

    Attributes:
        kind: what the collectives of a bucket have in common.
        shared: the bucket of each form.
        bytes: of its operand on one device.
        shrinks: whether it reduces partial values, and its result is smaller on one device.
        gathers: whether it gathers shards.
        first: the number of the position, of those in `Positions`, from which on it may be.
    """

    kind: Hashable
    shared: tuple[BucketKey, ...]
    bytes: int
    values: CollectiveTimes
    shrinks: bool = False
    gathers: bool = False
    first: int = 0


class Positions(NamedTuple):
    """The ops after which fuse-communication may put the steps of a transfer: reductions that free
    memory as soon as the value is `made`; other reductions and the steps before one, gathers, and
    what sends nothing, when it is `reduced`; others from `here` on; each after those before it, and
    at the `last`."""

    made: int
    reduced: int
    here: int
    last: int


class LateTransfer(NamedTuple):
    """A transfer that may be in buckets."""

    transfer: ValueTransfer
    positions: Positions


class BucketProblems(Protocol):
    """The problems of one function, by the shares of buckets."""

    @property
    def smallest_shares(self) -> LatencyShares:
        """Those with which no solution costs more than in its buckets."""
        ...

    def problem_with(self, shares: LatencyShares) -> CostProblem:
        """Return the problem with some shares."""
        ...

    def bucket_transfers(self, choice: Sequence[int]) -> list[LateTransfer]:
        """Return the transfers of a solution that may be in buckets."""
        ...


def solve_with_buckets(
    problems: BucketProblems,
    first: CostProblem,
    prices: BucketPrices,
    solve: Solve,
    again: SolveAgain,
    unpriced: float,
    scalings: int = MAX_SCALINGS,
) -> tuple[Solution, LatencyShares]:
    """Return the best plan that is found, and the shares with which its problem has its cost; of
    equally fast plans (algebra/estimates.py) the first.

    Args:
        first: the problem with the smallest shares.
        solve: solves the first problem.
        again: solves others, of which the bounds are not used.
        unpriced: the part of its cost that the first plan's shares may leave out, above which
            further plans are looked for, and the gap at which these end. Up to twice the gap, after
            one that is not better, only one more is looked for.
        scalings: the largest number of plans after one.
    """
    smallest = problems.smallest_shares

    def priced_fully(found: Solution, shares: LatencyShares) -> tuple[Solution, LatencyShares]:
        """Return a solution of the problem with some shares with its cost in its buckets, and the
        shares that agree with it."""
        chosen = problems.bucket_transfers(found.choice)
        seconds, agreeing = shared_seconds(chosen, prices)
        objective = found.objective + seconds - priced(chosen, prices, shares)
        return replace(found, objective=objective), agreeing

    def is_near(best: Solution, gap: float) -> bool:
        return best.objective - bound <= gap * best.objective

    solved = solve(first)
    bound = solved.bound
    best, shares = priced_fully(solved, smallest)
    if best.objective - solved.objective > unpriced * best.objective:
        remaining = next_shares(shares)
        for _ in range(scalings):
            if not remaining or is_near(best, unpriced):
                break
            trial = remaining.pop(0)
            solved = again(problems.problem_with(trial), bound / (1 - unpriced))
            found, agreeing = priced_fully(solved, trial)
            if found.objective < best.objective * IMPROVEMENT:
                best, shares, remaining = found, agreeing, next_shares(agreeing)
            elif is_near(best, 2 * unpriced):
                del remaining[1:]
    return Solution(best.choice, best.objective, min(bound, best.objective)), shares


def smallest_shares(max_transfers: int, bytes_: int = 0) -> LatencyShares:
    """Return shares with which no plan of so many transfers, of tensors of so many bytes, costs
    more than in its buckets: in each the shares add up to one at most."""
    return LatencyShares(1 / max(max_transfers, 1), bytes=bytes_)


def next_shares(shares: LatencyShares) -> list[LatencyShares]:
    """Return the shares to try after a plan: its own, then its own less each bucket, those of few
    tensors first."""
    own = sorted(shares.own, key=lambda part: (-part[1], str(part)))
    return [shares, *(LatencyShares(shares.default, shares.own - {b}) for b in own)]


def shared_seconds(
    transfers: Sequence[LateTransfer], prices: BucketPrices
) -> tuple[float, LatencyShares]:
    """Return the estimated time of transfers in the buckets of fuse-communication, and the shares
    that agree with these."""
    transfers = sorted(transfers, key=lambda t: t.positions.here)  # as in the program
    numbers: dict[ValueTransfer, int] = {}
    of = [numbers.setdefault(transfer, len(numbers)) for transfer, _ in transfers]
    alone = [prices.seconds(transfer, LatencyShares(inf)) for transfer in numbers]
    collectives = [prices.collectives(transfer) for transfer in numbers]
    total = sum(alone[n] for n in of)
    of_part: list[LateCollective] = []
    parts: list[Bucket] = []
    for n, (_, positions) in zip(of, transfers, strict=True):
        before = frozenset[int]()
        for c in collectives[n]:
            i, after = len(parts), Span(positions[c.first], positions.last)
            limited = c.shrinks or (c.gathers and after.start < positions.here)
            parts.append(Bucket((i,), after, c.bytes, c.values, c.kind, limited, before))
            of_part.append(c)
            before |= {i}
    buckets, tensors = Counter[BucketKey](), Counter[BucketKey]()
    for bucket in fuse(parts, MAX_BUCKET_BYTES):
        total += bucket.values.seconds - sum(parts[i].values.seconds for i in bucket.members)
        form, _ = bucket.values.fastest
        key = of_part[bucket.members[0]].shared[bucket.values.forms.index(form)]
        buckets[key] += 1
        tensors[key] += len(bucket.members)
    own = {key: n / tensors[key] for key, n in buckets.items()}
    return total, LatencyShares(inf, frozenset(own.items()))


def priced(transfers: Sequence[LateTransfer], prices: BucketPrices, shares: LatencyShares) -> float:
    """Return the estimated time of transfers with these shares."""
    counts = Counter(transfer for transfer, _ in transfers)
    return sum(n * prices.seconds(transfer, shares) for transfer, n in counts.items())
