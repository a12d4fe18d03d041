"""The split of the ops of a model into stages: the slowest one as fast as it can be, within SLACK,
and of such splits the one that transfers the fewest bytes. Dynamic programming over the cuts, exact
up to MAX_CUTS of them.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from xdsl.ir import Operation

from shardir.dialects.nn.base import Array
from shardir.dialects.nn.types import size_of

SLACK = 0.02
"""The part by which a stage may take longer than the slowest one has to."""

MAX_CUTS = 1024
"""The number of cuts between ops that are considered: those that the fewest bytes cross."""


def balanced(
    ops: Sequence[Operation], seconds: Sequence[float], stages: int
) -> list[Sequence[Operation]]:
    """Return the ops of each stage; nothing where there are fewer ops than stages.

    Args:
        seconds: of each op.
    """
    if len(ops) < stages:
        return []
    spent, bytes_ = np.cumsum([0.0, *seconds]), crossing(ops)
    inner = sorted(range(1, len(ops)), key=lambda i: (bytes_[i], i))[:MAX_CUTS]
    cuts = [0, *sorted(inner), len(ops)]
    chosen = best_cuts(spent[cuts], bytes_[cuts], stages)
    return [ops[cuts[i] : cuts[j]] for i, j in pairwise(chosen)]


def crossing(ops: Sequence[Operation]) -> Array:
    """Return the bytes of the values that ops before each op make and others read, of the ops and
    of their end."""
    at = {op: i for i, op in enumerate(ops)}
    change = [0] * (len(ops) + 1)
    for op, i in at.items():
        for v in op.results:
            last = max((at.get(use.operation, i) for use in v.uses), default=i)
            change[i + 1] += size_of(v)
            change[last + 1] -= size_of(v)
    return np.cumsum(change)


def best_cuts(spent: Array, crossing: Array, stages: int) -> list[int]:
    """Return the cuts at which the stages begin, and the last one: of the splits whose slowest
    stage takes at most SLACK longer than it has to, the one that transfers the fewest bytes.

    Args:
        spent: the seconds of the ops before each cut.
        crossing: the bytes that cross it.
    """
    n = len(spent)
    earlier = np.arange(n)[:, None] < np.arange(n)[None, :]
    seconds = np.where(earlier, spent[None, :] - spent[:, None], np.inf)
    slowest = seconds[0]  # of the best split of what is before each cut
    for _ in range(stages - 1):
        slowest = np.maximum(slowest[:, None], seconds).min(0)
    fits = seconds <= slowest[-1] * (1 + SLACK)
    transferred = np.where(fits[0], 0.0, np.inf)
    begins = list[Array]()
    for _ in range(stages - 1):
        total = np.where(fits, (transferred + crossing)[:, None], np.inf)
        begins.append(total.argmin(0))
        transferred = total.min(0)
    cuts = [n - 1]
    for begin in reversed(begins):
        cuts.append(int(begin[cuts[-1]]))
    return [0, *reversed(cuts)]
