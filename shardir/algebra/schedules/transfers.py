"""The transfers between ranks that a schedule requires, and the proof that they end.

Each rank runs its list in order. A stage's result goes to the adjacent stage by a send and a
receive if that is on another rank. For each directed pair of ranks there is one channel, which
moves a message at a time, in the order of the sends: the k-th send meets the k-th receive, and
nothing is buffered. A send and a receive start where they stand in the list. The rank goes on at
once, and waits for a received value where it computes with it; if transfers are `blocking`, the
rank goes on when the message has moved.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from shardir.algebra.schedules.actions import COMPUTE, OTHERS, TRANSFERS, Action, Orders
from shardir.algebra.schedules.checking import check
from shardir.algebra.schedules.cycles import add_orders, find_cycle, shortened
from shardir.algebra.schedules.schedule import Schedule
from shardir.diagnostics import Failure


class Message(NamedTuple):
    """A send and the receive that takes its value."""

    send: Action
    receive: Action

    def __str__(self) -> str:
        return f"{self.send}/{self.receive}"


def message_of(action: Action) -> Message:
    """Return the message of a send or a receive."""
    stage, kind, microbatch = action
    direction = kind[-1]
    step = 1 if direction == "F" else -1
    sender = stage if kind.startswith("SEND") else stage - step
    return Message(
        Action(sender, f"SEND_{direction}", microbatch),
        Action(sender + step, f"RECV_{direction}", microbatch),
    )


def sent_by(schedule: Schedule, action: Action) -> Message | None:
    """Return the message with the result of a computing action, or None if there is none: for
    gradients of weights, at the ends of the pipeline, and where the adjacent stage is on the same
    rank."""
    if action.kind == "W":
        return None
    direction = "F" if action.kind == "F" else "B"
    found = message_of(Action(action.stage, f"SEND_{direction}", action.microbatch))
    other = found.receive.stage
    if not 0 <= other < schedule.stages:
        return None
    placement = schedule.placement
    return found if placement[other] != placement[action.stage] else None


def with_transfers(schedule: Schedule) -> Orders:
    """Return the orders with sends and receives: a send directly after what computes its value, its
    receive as early as it is certain.

    The ranks take turns with one action each. A receive is put at the end of the other rank's list
    together with the send, so that the turns are an order in which all messages can move, even
    blocking ones. These are the lists of torch.distributed.pipelining.

    Raises:
        ShardirError: the schedule cannot run.
    """
    check(schedule)
    found: list[list[Action]] = [[] for _ in schedule.orders]
    position = [0] * schedule.ranks
    done: set[Action] = set()
    while any(position[r] < len(o) for r, o in enumerate(schedule.orders)):
        for rank, order in enumerate(schedule.orders):
            if position[rank] == len(order) or not done.issuperset(
                schedule.needs(order[position[rank]])
            ):
                continue
            action = order[position[rank]]
            position[rank] += 1
            done.add(action)
            found[rank].append(action)
            if message := sent_by(schedule, action):
                found[rank].append(message.send)
                found[schedule.placement[message.receive.stage]].append(message.receive)
    return tuple(map(tuple, found))


def check_transfers(orders: Orders, blocking: bool = False) -> Schedule:
    """Check that lists with transfers come to their end, and return the schedule that they run.

    Raises:
        ShardirError: a transfer is missing, is repeated, or stands before what computes its value
            or after what takes it; a channel's receives are in another order than its sends; or
            there is a cycle of actions that wait for each other. With all errors of one of these
            kinds.
    """
    schedule = Schedule.of(tuple(tuple(a for a in o if a.kind in COMPUTE) for o in orders))
    check(schedule)
    for errors in (
        _missing(schedule, orders),
        _misplaced(schedule, orders),
        _out_of_order(schedule, orders),
        _cycle(schedule, orders, blocking),
    ):
        if found := list(errors):
            raise Failure([(None, e) for e in found])
    return schedule


def _missing(schedule: Schedule, orders: Orders) -> Iterable[str]:
    """Yield an error for each send and receive that is missing, repeated, or not expected."""
    placement = schedule.placement
    found = Counter((r, a) for r, o in enumerate(orders) for a in o if a.kind in TRANSFERS)
    messages = {sent_by(schedule, a) for o in schedule.orders for a in o} - {None}
    expected = {(placement[a.stage], a) for message in messages if message for a in message}
    for rank, a in sorted(expected):
        if found[rank, a] != 1:
            times = "never" if not found[rank, a] else f"{found[rank, a]} times"
            yield f"rank {rank}: expected {a} once, got it {times}; write it once"
    for rank, a in sorted(found.keys() - expected):
        yield f"rank {rank}: expected no {a}, which has no other end; drop it"


def _misplaced(schedule: Schedule, orders: Orders) -> Iterable[str]:
    """Yield an error for each send before what computes its value, and each receive after what
    takes it."""
    for rank, order in enumerate(orders):
        at = {a: k for k, a in enumerate(order)}
        for k, a in enumerate(order):
            if a.kind in TRANSFERS:
                computed = _computed(schedule, a)
                sends = a.kind.startswith("SEND")
                if sends != (at[computed] < k):
                    where = "after" if sends else "before"
                    yield f"rank {rank}: expected {a} {where} {computed}; move it there"


def _computed(schedule: Schedule, action: Action) -> Action:
    """Return the action that computes what is sent, or takes what is received."""
    if action.kind[-1] == "F":
        return action._replace(kind="F")
    return schedule.backward(action.stage, action.microbatch)


def _out_of_order(schedule: Schedule, orders: Orders) -> Iterable[str]:
    """Yield an error for each channel on which a receive would take another value."""
    receives = _channels(schedule, orders, "RECV")
    for (sender, receiver), sent in _channels(schedule, orders, "SEND").items():
        for s, r in zip(sent, receives[sender, receiver], strict=True):
            if s != r:
                yield (
                    f"rank {sender} to rank {receiver}: expected receives in the order of the "
                    f"sends, {s.receive} for {s.send}, got {r.receive} first; exchange them"
                )
                break


def _channels(schedule: Schedule, orders: Orders, end: str) -> dict[tuple[int, int], list[Message]]:
    """Return the messages of each directed pair of ranks, in the order of their sends or of their
    receives."""
    found: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    for order in orders:
        for a in order:
            if a.kind.startswith(end):
                message = message_of(a)
                sender, receiver = (schedule.placement[each.stage] for each in message)
                found[sender, receiver].append(message)
    return found


def _cycle(schedule: Schedule, orders: Orders, blocking: bool) -> Iterable[str]:
    """Yield an error if some actions wait for each other.

    A node is an action, or a message: its send and its receive, which happen together. It has an
    edge to each that cannot happen before it.
    """
    lists = [
        [message_of(a) if a.kind in TRANSFERS else a for a in o if a.kind not in OTHERS]
        for o in orders
    ]
    after: dict[Action | Message, set[Action | Message]] = {n: set() for o in lists for n in o}
    if blocking:
        add_orders(after, lists)
    else:
        add_orders(after, [[n for n in o if isinstance(n, Action)] for o in lists])
        add_orders(after, _channels(schedule, orders, "SEND").values())
        for nodes in lists:
            last = None
            for n in nodes:
                if isinstance(n, Action):
                    last = n
                elif last:
                    after[last].add(n)
        for n, successors in after.items():
            if isinstance(n, Message):
                successors.add(_computed(schedule, n.receive))
    if cycle := find_cycle(after):
        ranks = [n if isinstance(n, Message) else schedule.placement[n.stage] for n in cycle]
        yield (
            "expected transfers that end, got a cycle of actions that wait for each other: "
            f"{shortened(cycle, ranks)}; move one of them in its list"
        )
