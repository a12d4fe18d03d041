"""The microbatches that a schedule has in flight: by them a rank's memory is counted."""

from shardir.algebra.schedules import Schedule, named_schedules, schedule
from shardir.dialects.train import SEARCH, PipelineAttr

StageCounts = tuple[int, ...]
"""The microbatches in flight on each stage of a rank."""


def in_flight(schedule: Schedule) -> list[list[StageCounts]]:
    """Return for each rank the microbatches that its stages hold at the same time, from F to the
    end of B or W: of all moments those at which no other one has as many on each stage."""
    found: list[list[StageCounts]] = []
    for rank, order in enumerate(schedule.orders):
        own = [s for s, r in enumerate(schedule.placement) if r == rank]
        now, moments = dict.fromkeys(own, 0), set[StageCounts]()
        for a in order:
            now[a.stage] += {"F": 1, "I": 0}.get(a.kind, -1)
            moments.add(tuple(now.values()))
        found.append([
            m for m in sorted(moments)
            if not any(m != n and all(x <= y for x, y in zip(m, n, strict=True)) for n in moments)
        ])  # fmt: skip
    return found


def named_or_smallest(pipeline: PipelineAttr, microbatches: int) -> tuple[str, Schedule]:
    """Return the schedule that is requested, with its name; in place of one that is to be found the
    named one with the fewest microbatches in flight.

    Raises:
        ShardirError: there is none with these numbers.
    """
    given = pipeline.values["ranks"], microbatches, pipeline.values["chunks"]
    if pipeline.kind != SEARCH:
        return pipeline.kind, schedule(pipeline.kind, *given)
    return min(
        named_schedules(*given).items(),
        key=lambda item: max(sum(c) for counts in in_flight(item[1]) for c in counts),
    )
