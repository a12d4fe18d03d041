"""Orders by priorities: each rank runs the most urgent action that it can (list scheduling)."""

from shardir.algebra.schedules.actions import Action
from shardir.algebra.schedules.filling import Filled, Filling, RunningRanks


def by_priority(filling: Filling, kinds: str, patience: float) -> Filled | None:
    """Return orders in which a rank that is free runs what has arrived, by kinds: "IFW" are I, then
    F, then W. Of F and I those of later stages go first.

    F runs only if the rank has memory left for one microbatch on each of its later stages, since
    without these nothing it holds is ever freed. A rank waits instead of computing W if something
    else arrives within `patience`, as a share of the time of W. None if the memory is too small.
    """
    c, placement = filling.costs, filling.placement
    own = [[s for s, r in enumerate(placement) if r == rank] for rank in range(len(filling.memory))]
    needed = {
        s: sum(c.memory[later] for later in stages if later >= s) for stages in own for s in stages
    }
    count = {kind: [0] * len(placement) for kind in kinds}
    running = RunningRanks(filling)
    for now, rank in running.free():
        ready: list[tuple[int, int, Action]] = []
        soon = None
        for s in own[rank]:
            for kind in "FI":
                action = Action(s, kind, count[kind][s])
                at = running.arrives.get(action)
                if at is None or (kind == "F" and not running.fits(rank, needed[s])):
                    continue
                if at <= now:
                    ready.append((kinds.index(kind), -s, action))
                else:
                    soon = at if soon is None else min(soon, at)
            if count["W"][s] < count["I"][s]:
                ready.append((kinds.index("W"), count["W"][s], Action(s, "W", count["W"][s])))
        action = min(ready)[-1] if ready else None
        if action is None or (
            action.kind == "W"
            and soon is not None
            and soon < now + patience * c.weight[action.stage]
        ):
            running.wake(rank, soon)
            continue
        count[action.kind][action.stage] += 1
        running.run(now, rank, action)
    return running.filled()
