"""The check that a schedule can run: each part of each microbatch once, and no cycle."""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import TypeVar

from shardir.algebra.schedules.schedule import COMPUTE, Action, Schedule
from shardir.diagnostics import Failure

Node = TypeVar("Node", bound=Hashable)


def add_orders(after: dict[Node, set[Node]], orders: Iterable[Sequence[Node]]) -> None:
    """Add an edge from each node of each order to the next one."""
    for order in orders:
        for a, b in pairwise(order):
            after[a].add(b)


def find_cycle(after: Mapping[Node, Iterable[Node]]) -> list[Node]:
    """Return a short cycle of a graph, as nodes with an edge to the next one, the last to the
    first; empty if the graph is acyclic.

    It is the shortest cycle through one node, found in time linear in nodes and edges.
    """
    left = {n: 0 for n in after}
    for successors in after.values():
        for n in successors:
            left[n] += 1
    ready = [n for n, count in left.items() if not count]
    while ready:
        n = ready.pop()
        del left[n]
        for successor in after[n]:
            left[successor] -= 1
            if not left[successor]:
                ready.append(successor)
    if not left:
        return []
    before: dict[Node, Node] = {b: a for a in left for b in after[a] if b in left}
    start, passed = next(iter(left)), set()
    while start not in passed:  # each node that is left has a predecessor
        passed.add(start)
        start = before[start]
    return _shortest_cycle(after, left, start)


def _shortest_cycle(
    after: Mapping[Node, Iterable[Node]], among: Mapping[Node, int], start: Node
) -> list[Node]:
    """Return the shortest cycle through a node, by breadth-first search among some nodes."""
    reached: dict[Node, Node] = {}
    queue = deque([start])
    while start not in reached:
        a = queue.popleft()
        for b in after[a]:
            if b in among and b not in reached:
                reached[b] = a
                queue.append(b)
    cycle = [reached[start]]
    while cycle[-1] != start:
        cycle.append(reached[cycle[-1]])
    return cycle[::-1]


def cycle_text(cycle: Sequence[Node], places: Sequence[Hashable]) -> str:
    """Return `0B0 -> 0F1 -> 1F1 -> ... -> 0B0`: the first and last of successive nodes that have
    one place."""
    shown: list[str] = []
    for _, run in groupby(zip(places, cycle, strict=True), key=lambda pair: pair[0]):
        nodes = [str(n) for _, n in run]
        shown += nodes if len(nodes) < 3 else [nodes[0], nodes[-1]]
    return " -> ".join([*shown, shown[0]])


def check(schedule: Schedule) -> None:
    """Check that the ranks can run a schedule, however long its actions take.

    1. Each stage computes each microbatch on its rank: F once, then B once, or I once and then W
       once; or all stages compute F only.
    2. F depends on F of the stage before; B and I depend on B or I of the stage after. These
       dependencies and the orders of the ranks are acyclic.

    Raises:
        ShardirError: a condition is violated; with all errors of 1, otherwise with a cycle.
    """
    check_actions(schedule)
    if errors := list(_cycle_error(schedule)):
        raise Failure([(None, e) for e in errors])


def check_actions(schedule: Schedule) -> None:
    """Check condition 1 of `check`.

    Raises:
        ShardirError: it is violated; with all errors.
    """
    errors = list(_number_errors(schedule)) or list(_action_errors(schedule))
    if errors:
        raise Failure([(None, e) for e in errors])


def _number_errors(schedule: Schedule) -> Iterable[str]:
    """Yield the errors of numbers of stages, ranks and microbatches."""
    s = schedule
    for what, number in (("stage", s.stages), ("rank", s.ranks), ("microbatch", s.microbatches)):
        if number < 1:
            yield f"expected at least one {what}, got {number}; use 1 or more"
    if len(s.orders) != s.ranks:
        yield (
            f"expected an order for each of {s.ranks} ranks, got {len(s.orders)}; add the missing "
            "ones or drop the others"
        )
    if len(s.placement) != s.stages:
        yield (
            f"expected a rank for each of {s.stages} stages, got {len(s.placement)}; add the "
            "missing ones or drop the others"
        )
    for stage, rank in enumerate(s.placement):
        if not 0 <= rank < s.ranks:
            yield f"stage {stage}: expected a rank from 0 to {s.ranks - 1}, got {rank}; use one"


def _action_errors(schedule: Schedule) -> Iterable[str]:
    """Yield the errors of actions: unknown, misplaced, missing, repeated or out of order."""
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
            yield from _microbatch_errors(at, stage, microbatch, s.is_forward)


def _microbatch_errors(
    at: Mapping[Action, Sequence[int]], stage: int, microbatch: int, is_forward: bool
) -> Iterable[str]:
    """Yield the errors of a microbatch on a stage, from the positions `at` of actions."""
    by_kind = {k: at.get(Action(stage, k, microbatch), ()) for k in COMPUTE}
    where = f"stage {stage}, microbatch {microbatch}"
    if len(by_kind["F"]) != 1:
        yield f"{where}: expected F once, got it {_times(by_kind['F'])}; write {stage}F{microbatch}"
    counts = tuple(len(by_kind[k]) for k in "BIW")
    if counts not in ((1, 0, 0), (0, 1, 1)) and not is_forward:
        listed = ", ".join(f"{k} {_times(by_kind[k])}" for k in "BIW")
        yield f"{where}: expected B once, or I and W once each, got {listed}; write one of the two"
    for first, then in ("FB", "FI", "IW"):
        if any(i > j for i in by_kind[first] for j in by_kind[then]):
            yield f"{where}: expected {first} before {then}, got {then} first; exchange them"


def _times(positions: Sequence[int]) -> str:
    return {0: "never", 1: "once"}.get(len(positions), f"{len(positions)} times")


def _cycle_error(schedule: Schedule) -> Iterable[str]:
    """Yield the error of condition 2 of `check`, if it is violated."""
    after: dict[Action, set[Action]] = {a: set() for o in schedule.orders for a in o}
    for a in after:
        for before in schedule.needs(a):
            after[before].add(a)
    add_orders(after, schedule.orders)
    if cycle := find_cycle(after):
        shown = cycle_text(cycle, [schedule.placement[a.stage] for a in cycle])
        yield f"expected an order that can run, got a cycle: {shown}; move one of them in its order"
