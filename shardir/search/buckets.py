"""What moves together pays a latency once: the plan of least cost where buckets have a price.

    d_w1, d_w2, d_b2    all-reduced over dp: one bucket
    loss                all-reduced over dp and tp: another

A bucket costs its latency however many tensors are in it: a fixed charge, which no sum over pairs
says. What such a sum can say is a part of it for each tensor. Where the parts of all that might be
in a bucket are no more than one, it is a bound for every plan. Where they are those of the tensors
that a plan has in it, it is what that plan costs, and makes it hard for those that would need other
buckets. So plans follow each other as long as the next one is better: by the buckets of the one
before (slope scaling; Kim and Pardalos, 1999), or by these without one of them. How far the last
one may be from the least, its gap says.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from math import inf

from xdsl.dialects.builtin import TensorType

from shardir.algebra.layout import Layout
from shardir.search.elimination import Solution
from shardir.search.memory import Solve
from shardir.search.problem import CostProblem
from shardir.search.ways import Bucket, LatencyShares

MAX_SCALINGS = 8
"""How often parts are set by how many tensors are in the buckets: of a plan, and of several."""

MAX_UNPRICED = 2e-3
"""What part of its cost the first plan's parts may leave unsaid."""

Move = tuple[TensorType, Layout, Layout]
"""A redistribution of a tensor, from one layout to another."""

MovePrice = Callable[[Move, LatencyShares], tuple[float, dict[Bucket, float]]]
"""The seconds of a move, and the latencies of the buckets in which it is."""


def least(
    problem: Callable[[LatencyShares], CostProblem],
    moves: Callable[[Sequence[int]], list[Move]],
    many: int,
    ways: MovePrice,
    solve: Solve,
    scalings: int = MAX_SCALINGS,
) -> tuple[Solution, LatencyShares]:
    """The best plan that is found, and the shares that say its cost.

    Args:
        problem: by the shares.
        moves: what a solution redistributes that may go into buckets.
        many: how many moves there may be.
        scalings: how many plans are looked for behind the first, at most.
    """

    def follow(shares: LatencyShares) -> tuple[Solution, LatencyShares, float]:
        """The plan of least cost by these shares, with what it really costs; the shares that say
        so; and how much of it the former did not say."""
        found = solve(problem(shares))
        chosen = moves(found.choice)
        seconds, settled = settle(chosen, ways)
        unsaid = seconds - taken(chosen, ways, shares)[0]
        return Solution(found.choice, found.objective + unsaid, found.bound), settled, unsaid

    best, shares, unsaid = follow(LatencyShares(1 / max(many, 1)))
    bound = best.bound
    left = after(shares) if unsaid > MAX_UNPRICED * best.objective else []
    for _ in range(scalings):
        if not left:
            break
        found, settled, _ = follow(left.pop(0))
        if found.objective < best.objective:
            best, shares, left = found, settled, after(settled)
    return Solution(best.choice, best.objective, min(bound, best.objective)), shares


def after(shares: LatencyShares) -> list[LatencyShares]:
    """What to look for next to a plan: with its buckets, and without each of them, first those that
    few tensors share."""
    known = sorted(shares.known, key=lambda part: (-part[1], str(part)))
    return [shares, *(LatencyShares(shares.usual, shares.known - {b}) for b in known)]


def settle(moves: Sequence[Move], ways: MovePrice) -> tuple[float, LatencyShares]:
    """What moves take together, and shares by which they take it."""
    shares = LatencyShares(1 / max(len(moves), 1))
    best = inf, shares
    for _ in range(MAX_SCALINGS):
        seconds, tensors, latencies = taken(moves, ways, shares)
        seconds += sum(l * (1 - shares.of(b) * tensors[b]) for b, l in latencies.items())
        if seconds >= best[0]:
            break
        shares = LatencyShares(inf, frozenset((b, 1 / n) for b, n in tensors.items()))
        best = seconds, shares
    return best


def taken(
    moves: Sequence[Move], ways: MovePrice, shares: LatencyShares
) -> tuple[float, Counter[Bucket], dict[Bucket, float]]:
    """What moves take by the shares; how many are in each bucket, and its latency."""
    total, tensors, latencies = 0.0, Counter[Bucket](), dict[Bucket, float]()
    for move, n in Counter(moves).items():
        seconds, buckets = ways(move, shares)
        total += n * seconds
        tensors.update(dict.fromkeys(buckets, n))
        latencies.update(buckets)
    return total, tensors, latencies
