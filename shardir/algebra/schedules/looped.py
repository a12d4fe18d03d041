"""The orders of schedules with stages placed in a loop: stage s is on rank s modulo the ranks.

Each function returns the orders of `ranks` ranks with `chunks` stages each. They are those of
torch.distributed.pipelining, where it has the schedule.
"""

from shardir.algebra.schedules.actions import Action, Orders


def breadth_first(ranks: int, microbatches: int, chunks: int) -> Orders:
    """Each rank runs all microbatches through a stage before its next stage (Lamy-Poirier 2022);
    with the last microbatch first in the backward part."""
    m = range(microbatches)
    return tuple(
        (
            *(Action(s, "F", k) for s in stages for k in m),
            *(Action(s, "B", k) for s in reversed(stages) for k in reversed(m)),
        )
        for stages in (range(rank, ranks * chunks, ranks) for rank in range(ranks))
    )


def gpipe(ranks: int, microbatches: int, chunks: int) -> Orders:
    """All forward parts, then all backward parts (Huang et al. 2018)."""
    return tuple(
        tuple(Action(rank, kind, k) for kind in "FB" for k in range(microbatches))
        for rank in range(ranks)
    )


def one_forward_one_backward(ranks: int, microbatches: int, chunks: int) -> Orders:
    """A rank at distance d from the last one begins with d forward parts, and then takes turns
    (PipeDream-Flush, Narayanan et al. 2020)."""
    return _in_turns(ranks, microbatches, chunks, ahead=1, split=False)


def interleaved(ranks: int, microbatches: int, chunks: int) -> Orders:
    """As 1F1B, in rounds of microbatches through all chunks, with 2 d forward parts before the
    turns (Narayanan et al. 2021). With one chunk it is the eager 1F1B of Zhuang et al. (2022)."""
    return _in_turns(ranks, microbatches, chunks, ahead=2, split=False)


def zero_bubble(ranks: int, microbatches: int, chunks: int) -> Orders:
    """As 1F1B, with W of rank r delayed by r microbatches, into what would be the bubble (Qi et
    al. 2023). With one chunk it is ZB-H1."""
    return _in_turns(ranks, microbatches, chunks, ahead=1, split=True)


def per_round(ranks: int, microbatches: int) -> tuple[int, int]:
    """Return how many microbatches are in a round of an interleaved schedule, and the rest, which
    is 0 where the schedule exists."""
    return divmod(microbatches, max(1, microbatches // ranks))


def _in_turns(ranks: int, microbatches: int, chunks: int, ahead: int, split: bool) -> Orders:
    """Return orders of F and B (or of F, I and W, if `split`) in turns, after `ahead` forward parts
    for each rank between this one and the last."""
    in_round = per_round(ranks, microbatches)[0]
    count = microbatches * chunks

    def nth(k: int, kind: str, rank: int) -> Action:
        """The k-th action of a kind on a rank."""
        chunk = k // in_round % chunks
        if kind != "F":
            chunk = chunks - 1 - chunk
        turn = k // (in_round * chunks) * in_round + k % in_round
        return Action(chunk * ranks + rank, kind, turn)

    def order(rank: int) -> tuple[Action, ...]:
        first = min(count, (chunks - 1) * in_round + ahead * (ranks - 1 - rank))
        delay = min(rank, count)
        found = [nth(k, "F", rank) for k in range(first)]
        for k in range(count):
            if first + k < count:
                found.append(nth(first + k, "F", rank))
            found.append(nth(k, "I" if split else "B", rank))
            if split and k >= delay:
                found.append(nth(k - delay, "W", rank))
        if split:
            found += [nth(k, "W", rank) for k in range(count - delay, count)]
        return tuple(found)

    return tuple(map(order, range(ranks)))
