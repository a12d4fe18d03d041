"""The functions that a step in stages runs for one microbatch, as a graph of dependences.

Stages form a chain if each reads a value of the stage before it. Two towers that a third stage
joins form a graph. The times here hold for both.
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


def split_backward_seconds(seconds: Mapping[StageNode, float]) -> dict[StageNode, float]:
    """Return the seconds of functions, with B replaced by I and W on stages that have all three.

    W then takes at most B less I, so that I and W together take no longer than B.
    """
    split = dict(seconds)
    for stage, kind in seconds:
        if kind == "B" and {(stage, "I"), (stage, "W")} <= seconds.keys():
            rest = max(split.pop((stage, "B")) - split[stage, "I"], 0.0)
            split[stage, "W"] = min(split[stage, "W"], rest)
    return split


class StageGraph(NamedTuple):
    """The functions of a microbatch.

    Attributes:
        seconds: of each function, in an order in which they can run.
        before: of each function its predecessors, with the seconds of the transfer between them.
    """

    seconds: dict[StageNode, float]
    before: Mapping[StageNode, Mapping[StageNode, float]]

    @classmethod
    def of(cls, runs: StepRuns, mesh: Mesh, times: Iterable[Iterable[TimedRun]]) -> Self:
        """Return the graph of a step. `times`: its runs on each rank, from `times_of_step`."""
        known = {t.run.op: t.end - t.begin for timed in times for t in timed}
        timed = {node: known.get(op, 0.0) for node, op in runs.actions.items()}
        seconds = split_backward_seconds(timed)
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
        """Whether each stage's forward part reads a value of the forward part one stage before."""
        stages = [stage for stage, kind in self.seconds if kind == "F"]
        return all(
            (stage - 1, "F") in self.before[stage, "F"] for stage in stages if stage != min(stages)
        )

    def starts(self, placement: tuple[int, ...]) -> dict[StageNode, float]:
        """Return the earliest begin of each function, in seconds, for one microbatch.

        Args:
            placement: the rank of each stage.
        """
        starts: dict[StageNode, float] = {}
        for node in self.seconds:
            arrivals = (
                starts[maker] + self.seconds[maker] + self.delay(maker, node, placement)
                for maker in self.before[node]
            )
            starts[node] = max(arrivals, default=0.0)
        return starts

    def delay(self, maker: StageNode, node: StageNode, placement: tuple[int, ...]) -> float:
        """Return the seconds of the transfer between two functions; 0 on one rank."""
        same = placement[maker[0]] == placement[node[0]]
        return 0.0 if same else self.before[node][maker]

    def tails(self, placement: tuple[int, ...]) -> dict[StageNode, float]:
        """Return the seconds from the end of each function to the end of its last descendant."""
        tails = dict.fromkeys(self.seconds, 0.0)
        for node in reversed(self.seconds):
            for maker in self.before[node]:
                after = self.delay(maker, node, placement) + self.seconds[node] + tails[node]
                tails[maker] = max(tails[maker], after)
        return tails

    def bound(self, placement: tuple[int, ...], microbatches: int) -> float:
        """Return a lower bound, in seconds, on any order of the microbatches' functions.

        It is the larger of the critical path of one microbatch and, over ranks, of: the earliest
        begin of the rank's functions, their work, and the shortest tail after them.
        """
        starts, tails = self.starts(placement), self.tails(placement)
        bound = max((starts[n] + self.seconds[n] for n in self.seconds), default=0.0)
        ranks: defaultdict[int, list[StageNode]] = defaultdict(list)
        for node in self.seconds:
            ranks[placement[node[0]]].append(node)
        for own in ranks.values():
            work = microbatches * sum(self.seconds[node] for node in own)
            ends = min(starts[node] for node in own), min(tails[node] for node in own)
            bound = max(bound, sum(ends) + work)
        return bound
