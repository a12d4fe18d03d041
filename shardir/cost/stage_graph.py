"""The functions that a step in stages runs for a microbatch, as a graph: which waits for which.

A stage need not read anything of the stage before it: two towers that a third stage joins are a
graph, and not a chain. The times here hold for both.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

from shardir.algebra.mesh import Mesh
from shardir.cost.seconds import cost_of
from shardir.cost.stages import TimedRun
from shardir.dialects.train import StageRun, StepRuns

StageNode = tuple[int, str]
"""A stage, and the kind of the action that runs its function: F, I, B or W."""


def apart(seconds: Mapping[StageNode, float]) -> dict[StageNode, float]:
    """Return the seconds of functions without B of stages that have I and W too: what W takes is
    what B takes more than I, where that is less, so that the two take no longer than B."""
    found = dict(seconds)
    for stage, kind in seconds:
        if kind == "B" and {(stage, "I"), (stage, "W")} <= seconds.keys():
            more = max(found.pop((stage, "B")) - found[stage, "I"], 0.0)
            found[stage, "W"] = min(found[stage, "W"], more)
    return found


class StageGraph(NamedTuple):
    """The functions of a microbatch.

    Attributes:
        seconds: of each, in an order in which they can run.
        before: those that each waits for, with the seconds that what it reads of another rank is in
            transfer.
    """

    seconds: dict[StageNode, float]
    before: Mapping[StageNode, Mapping[StageNode, float]]

    @classmethod
    def of(cls, runs: StepRuns, mesh: Mesh, times: Iterable[Iterable[TimedRun]]) -> Self:
        """Return the graph of a step. `times`: its runs on each rank, of `times_of_step`."""
        known = {t.run.op: t.end - t.begin for timed in times for t in timed}
        timed = {node: known.get(op, 0.0) for node, op in runs.actions.items()}
        seconds = apart(timed)
        nodes = {op: (s, kind if (s, kind) in seconds else "I")
                 for (s, kind), op in runs.actions.items()}  # fmt: skip
        before: dict[StageNode, dict[StageNode, float]] = {node: {} for node in seconds}
        for op, node in nodes.items():
            for read in runs.reads(StageRun(op, 0)):
                for maker in (nodes[run.op] for run in read.runs if run.op in nodes):
                    costs = (cost_of(transfer, mesh) for transfer in read.transfers)
                    delay = sum(cost.seconds for cost in costs if cost is not None)
                    before[node][maker] = max(before[node].get(maker, 0.0), delay)
        return cls(seconds, before)

    @property
    def is_chain(self) -> bool:
        """Whether the forward part of each stage reads something of that of the stage before."""
        stages = [stage for stage, kind in self.seconds if kind == "F"]
        return all(
            (stage - 1, "F") in self.before[stage, "F"] for stage in stages if stage != min(stages)
        )

    def starts(self, placement: tuple[int, ...]) -> dict[StageNode, float]:
        """Return the time at which each can begin at the earliest, if there is one microbatch and
        each stage is on its rank of a placement."""
        found: dict[StageNode, float] = {}
        for node in self.seconds:
            arrivals = (
                found[maker] + self.seconds[maker] + self.delay(maker, node, placement)
                for maker in self.before[node]
            )
            found[node] = max(arrivals, default=0.0)
        return found

    def delay(self, maker: StageNode, node: StageNode, placement: tuple[int, ...]) -> float:
        """Return the seconds between the end of one and the begin of another that reads it."""
        same = placement[maker[0]] == placement[node[0]]
        return 0.0 if same else self.before[node][maker]

    def tails(self, placement: tuple[int, ...]) -> dict[StageNode, float]:
        """Return the seconds from the end of each to that of the last one that waits for it."""
        found = dict.fromkeys(self.seconds, 0.0)
        for node in reversed(self.seconds):
            for maker in self.before[node]:
                after = self.delay(maker, node, placement) + self.seconds[node] + found[node]
                found[maker] = max(found[maker], after)
        return found

    def bound(self, placement: tuple[int, ...], microbatches: int) -> float:
        """Return a time in seconds below which no order of so many microbatches ends: each rank has
        its work after the first of its functions can begin, and before what follows the last one.
        """
        starts, tails = self.starts(placement), self.tails(placement)
        found = max((starts[n] + self.seconds[n] for n in self.seconds), default=0.0)
        ranks: defaultdict[int, list[StageNode]] = defaultdict(list)
        for node in self.seconds:
            ranks[placement[node[0]]].append(node)
        for own in ranks.values():
            work = microbatches * sum(self.seconds[node] for node in own)
            ends = min(starts[node] for node in own), min(tails[node] for node in own)
            found = max(found, sum(ends) + work)
        return found
