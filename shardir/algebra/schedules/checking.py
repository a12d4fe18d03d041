"""The check that a schedule can run: each part of each microbatch once, and no cycle."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from shardir.algebra.schedules.actions import COMPUTE, Action
from shardir.algebra.schedules.cycles import add_orders, find_cycle, shortened
from shardir.algebra.schedules.schedule import Schedule
from shardir.diagnostics import Failure


def check(schedule: Schedule) -> None:
    """Check that the ranks can run a schedule, whatever its actions take.

    Each stage computes each microbatch: F once, then B once, or I and then W once, on the rank of
    the stage; or all stages F alone. F waits for that of the stage before, B and I for that of the
    stage after. With the orders of the ranks these dependencies are acyclic.

    Raises:
        ShardirError: it is not so; with all errors. A cycle is looked for if there are no others.
    """
    check_actions(schedule)
    if errors := list(_cycle_error(schedule)):
        raise Failure([(None, e) for e in errors])


def check_actions(schedule: Schedule) -> None:
    """Check that a schedule has its actions once, on the ranks of their stages, and those of a
    microbatch on a stage in order; not that ranks do not wait for each other.

    Raises:
        ShardirError: it is not so; with all errors.
    """
    errors = list(_numbers(schedule)) or list(_errors_of_actions(schedule))
    if errors:
        raise Failure([(None, e) for e in errors])


def _numbers(schedule: Schedule) -> Iterable[str]:
    s = schedule
    for what, number in (("stage", s.stages), ("rank", s.ranks), ("microbatch", s.microbatches)):
        if number < 1:
            yield f"expected at least one {what}, got {number}; use 1 or more"
    if len(s.orders) != s.ranks:
        yield f"expected {s.ranks} orders, one for each rank, got {len(s.orders)}; write as many"
    if len(s.placement) != s.stages:
        yield f"expected the ranks of {s.stages} stages, got {len(s.placement)}; write as many"
    for stage, rank in enumerate(s.placement):
        if not 0 <= rank < s.ranks:
            yield f"stage {stage}: expected a rank from 0 to {s.ranks - 1}, got {rank}; use one"


def _errors_of_actions(schedule: Schedule) -> Iterable[str]:
    s = schedule
    at: defaultdict[Action, list[int]] = defaultdict(list)
    for rank, actions in enumerate(s.orders):
        if not actions:
            yield f"rank {rank}: expected actions, got none; place a stage on it"
        for k, a in enumerate(actions):
            inside = 0 <= a.stage < s.stages and a.microbatch in range(s.microbatches)
            if a.kind not in COMPUTE or not inside:
                yield (
                    f"rank {rank}: expected F, I, W or B of stages 0 to {s.stages - 1} and "
                    f"microbatches 0 to {s.microbatches - 1}, got {a}; drop it"
                )
            elif rank != s.placement[a.stage]:
                yield f"rank {rank}: expected {a} on rank {s.placement[a.stage]}; move it there"
            else:
                at[a].append(k)
    for stage in range(s.stages):
        for microbatch in range(s.microbatches):
            yield from _errors_of_part(at, stage, microbatch, s.is_forward)


def _errors_of_part(
    at: Mapping[Action, Sequence[int]], stage: int, microbatch: int, is_forward: bool
) -> Iterable[str]:
    """Yield the errors of a microbatch on a stage, by the positions of its actions."""
    found = {k: at.get(Action(stage, k, microbatch), ()) for k in COMPUTE}
    where = f"stage {stage}, microbatch {microbatch}"
    if len(found["F"]) != 1:
        yield f"{where}: expected F once, got it {_times(found['F'])}; write {stage}F{microbatch}"
    counts = tuple(len(found[k]) for k in "BIW")
    if counts not in ((1, 0, 0), (0, 1, 1)) and not is_forward:
        listed = ", ".join(f"{k} {_times(found[k])}" for k in "BIW")
        yield f"{where}: expected B once, or I and W once each, got {listed}; write one of the two"
    for first, then in ("FB", "FI", "IW"):
        if any(i > j for i in found[first] for j in found[then]):
            yield f"{where}: expected {first} before {then}, got {then} first; exchange them"


def _times(positions: Sequence[int]) -> str:
    return {0: "never", 1: "once"}.get(len(positions), f"{len(positions)} times")


def _cycle_error(schedule: Schedule) -> Iterable[str]:
    after: dict[Action, set[Action]] = {a: set() for o in schedule.orders for a in o}
    for a in after:
        for before in schedule.needs(a):
            after[before].add(a)
    add_orders(after, schedule.orders)
    if cycle := find_cycle(after):
        shown = shortened(cycle, [schedule.placement[a.stage] for a in cycle])
        yield f"expected an order that can run, got a cycle: {shown}; move one of them in its order"
