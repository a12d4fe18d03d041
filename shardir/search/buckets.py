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
from collections.abc import Callable, Sequence
from itertools import dropwhile
from math import inf
from typing import NamedTuple

from xdsl.ir import Block, Operation

from shardir.algebra.estimates import IMPROVEMENT
from shardir.analysis.storages import Span
from shardir.dialects.nn import ConvertOp
from shardir.dialects.train import UpdateOp
from shardir.search.elimination import Solution
from shardir.search.problem import CostProblem
from shardir.search.transfer_costs import BucketKey, LatencyShares, ValueTransfer

MAX_SCALINGS = 8
"""How many times shares are set by the number of tensors in each bucket: of one plan until they
agree with it, and of plans one after another."""

MAX_UNPRICED = 2e-3
"""The part of its cost that the first plan's shares may leave out; above it, further plans are
looked for."""

Solve = Callable[[CostProblem], Solution]

BucketPrice = Callable[[ValueTransfer, LatencyShares], tuple[float, dict[BucketKey, float]]]
"""The estimated time of a transfer with shares of buckets, and the latencies of its buckets, in
seconds."""


class LateTransfer(NamedTuple):
    """A transfer that may be in buckets, and the first and the last op after which it may be."""

    transfer: ValueTransfer
    after: Span


def after_update(block: Block) -> Callable[[Sequence[Operation]], bool]:
    """Return a predicate of ops: that there are some, all after the mark train.update of a training
    step, or casts that only such ops use. Values that are redistributed for them are put into
    buckets by fuse-communication, which moves casts to their first uses."""
    ops = set(dropwhile(lambda op: not isinstance(op, UpdateOp), block.ops))
    for op in reversed(list(block.ops)):
        users = [use.operation for use in op.out.uses] if isinstance(op, ConvertOp) else []
        if users and ops.issuperset(users):
            ops.add(op)
    return lambda users: bool(users) and ops.issuperset(users)


def solve_with_buckets(
    problem: Callable[[LatencyShares], CostProblem],
    transfers: Callable[[Sequence[int]], list[LateTransfer]],
    max_transfers: int,
    price: BucketPrice,
    solve: Solve,
    scalings: int = MAX_SCALINGS,
) -> tuple[Solution, LatencyShares]:
    """Return the best plan that is found, and the shares with which its problem has its cost; of
    equally fast plans (algebra/estimates.py) the first.

    Args:
        problem: returns the problem with some shares.
        transfers: returns a solution's transfers that may be in buckets.
        max_transfers: the largest number of such transfers.
        scalings: the largest number of plans after the first.
    """

    def plan(shares: LatencyShares) -> tuple[Solution, LatencyShares, float]:
        """Return the fastest plan by these shares, with its full cost; the shares that agree with
        it; and the part of the cost that the former left out."""
        found = solve(problem(shares))
        chosen = transfers(found.choice)
        seconds, agreeing = shared_seconds(chosen, price)
        missing = seconds - priced(chosen, price, shares)[0]
        return Solution(found.choice, found.objective + missing, found.bound), agreeing, missing

    best, shares, missing = plan(LatencyShares(1 / max(max_transfers, 1)))
    bound = best.bound
    remaining = next_shares(shares) if missing > MAX_UNPRICED * best.objective else []
    for _ in range(scalings):
        if not remaining:
            break
        found, agreeing, _ = plan(remaining.pop(0))
        if found.objective < best.objective * IMPROVEMENT:
            best, shares, remaining = found, agreeing, next_shares(agreeing)
    return Solution(best.choice, best.objective, min(bound, best.objective)), shares


def next_shares(shares: LatencyShares) -> list[LatencyShares]:
    """Return the shares to try after a plan: its own, then its own less each bucket, those of few
    tensors first."""
    own = sorted(shares.own, key=lambda part: (-part[1], str(part)))
    return [shares, *(LatencyShares(shares.default, shares.own - {b}) for b in own)]


def shared_seconds(
    transfers: Sequence[LateTransfer], price: BucketPrice
) -> tuple[float, LatencyShares]:
    """Return the estimated time of transfers that share buckets, and the shares that agree with
    it."""
    few, all_in = LatencyShares(1 / max(len(transfers), 1)), LatencyShares(0.0)
    best, shares = _agreeing(transfers, price, few)
    buckets = priced(transfers, price, all_in)[1]
    after: dict[tuple, list[Span]] = {}
    for key, b in buckets.items():
        after.setdefault(key[:-1], []).extend(b.after)
    keys = dict.fromkeys((*buckets, *priced(transfers, price, few)[1]))
    forms = Counter(key[:-1] for key in keys)
    for key in keys:
        kind = key[:-1]
        if forms[kind] > 1 and kind in after:  # all collectives of a kind in one form
            others = {part for part in shares.own if part[0][:-1] != kind}
            one = key, buffers(after[kind]) / len(after[kind])
            trial = _agreeing(transfers, price, LatencyShares(inf, frozenset({*others, one})))
            if trial[0] < best * IMPROVEMENT:
                best, shares = trial
    return best, shares


def _agreeing(
    transfers: Sequence[LateTransfer], price: BucketPrice, shares: LatencyShares
) -> tuple[float, LatencyShares]:
    """Return the time of transfers that are put into buckets by some shares, then by the shares
    that agree with these buckets, and so on; and the last shares."""
    best = inf, shares
    for _ in range(MAX_SCALINGS):
        seconds, buckets = priced(transfers, price, shares)
        own = {key: buffers(b.after) / len(b.after) for key, b in buckets.items()}
        seconds += sum(
            b.latency * len(b.after) * (own[key] - shares.of(key)) for key, b in buckets.items()
        )
        if seconds >= best[0] * IMPROVEMENT:
            break
        shares = LatencyShares(inf, frozenset(own.items()))
        best = seconds, shares
    return best


class LateCollectives(NamedTuple):
    """The collectives of one kind: the latency of each buffer, and the ops after which each of them
    may be."""

    latency: float
    after: list[Span]


def priced(
    transfers: Sequence[LateTransfer], price: BucketPrice, shares: LatencyShares
) -> tuple[float, dict[BucketKey, LateCollectives]]:
    """Return the time of transfers with these shares, and the collectives in each bucket."""
    total, found = 0.0, dict[BucketKey, LateCollectives]()
    prices = {t: price(t, shares) for t in dict.fromkeys(t for t, _ in transfers)}
    for transfer, after in transfers:
        seconds, latencies = prices[transfer]
        total += seconds
        for key, latency in latencies.items():
            found.setdefault(key, LateCollectives(latency, [])).after.append(after)
    return total, found


def buffers(spans: Sequence[Span]) -> int:
    """Return the number of buffers for collectives of one kind: the smallest number of moments such
    that each span has one of them."""
    count, last = 0, -inf
    for start, end in sorted(spans, key=lambda span: span.end):
        if start > last:
            count, last = count + 1, end
    return count
