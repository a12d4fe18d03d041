"""The events of a rank, prepared once for all steps."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .order import Event, StepValue
from .tables import StagePart, StageTables


class LoopResult(NamedTuple):
    """A result of a run: whether it is sent or read later, the sums that it is added to, and the
    totals that collect it."""

    value: StepValue
    is_read: bool
    sums: list[str]
    collected: list[str]


class LoopRun(NamedTuple):
    """A run of a part on a microbatch, with the transfers before and after it. No later run of the
    rank reads the values `drops`, nor the results `unread`."""

    part: StagePart
    microbatch: int
    before: list[Event]
    reads: Sequence[StepValue]
    drops: list[StepValue]
    results: list[LoopResult]
    after: list[Event]
    unread: list[StepValue]


class RankLoop:
    """The runs and transfers of a rank: before the loop, in it, at its end, where states arrive,
    and after it."""

    def __init__(self, tables: StageTables, rank: int):
        order = tables.order()
        loop = order.loop(rank)
        self.before, self.after = list(order.before_loop(rank)), list(order.after_loop(rank))
        self.states = tables.kept_states(rank)
        reads = [*(run.reads for run in loop.runs), [*self.states.values()]]
        last = {value: i for i, values in enumerate(reads) for value in values}
        sums, collected = _by_addend(tables.sums), _by_addend(tables.collected)
        self.runs: list[LoopRun] = []
        for i, run in enumerate(loop.runs):
            before, after = list(loop.before_run(i)), list(loop.after_run(i))
            read_later = {*last, *(e.of.value for e in after)}
            results = [
                LoopResult(value, value in read_later, sums[value.name], collected[value.name])
                for value in run.makes
            ]
            drops = [x for x in {*run.reads} if x.microbatch is not None and last[x] == i]
            unread = [value for value in run.makes if value not in last]
            part, k = run.name
            self.runs.append(LoopRun(part, k, before, run.reads, drops, results, after, unread))
        self.end = list(loop.end())
        self.sums = [name for run in loop.runs for x in run.makes for name in sums[x.name]]
        names = {value.name for value in last if value.microbatch is not None}
        self.slices = {name: x for name, x in tables.slices.items() if name in names}
        """The arguments whose microbatches this rank reads, by the names of the microbatches."""


def _by_addend(totals: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the totals of each addend."""
    names: dict[str, list[str]] = defaultdict(list)
    for total, addend in totals.items():
        names[addend].append(total)
    return names
