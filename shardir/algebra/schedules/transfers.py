"""The transfers between ranks that a schedule requires, and the proof that they end.

1. Each rank runs its list in order.
2. The result of a stage goes to an adjacent stage on another rank by a send and a receive.
3. Each directed pair of ranks has one channel, which moves one message at a time without a buffer:
   the k-th send meets the k-th receive.
4. A send or receive starts where it stands in the list. The rank goes on at once, and waits for a
   received value before it computes with it. If transfers are `blocking`, the rank goes on once
   the message has moved.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from shardir.algebra.schedules.checking import add_orders, check, cycle_text, find_cycle
from shardir.algebra.schedules.schedule import COMPUTE, OTHERS, TRANSFERS, Action, Orders, Schedule
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
    """Return the message with the result of a computation.

    None for gradients of weights, at the ends of the pipeline, and if the adjacent stage is on the
    same rank.
    """
    if action.kind == "W":
        return None
    direction = "F" if action.kind == "F" else "B"
    message = message_of(Action(action.stage, f"SEND_{direction}", action.microbatch))
    other = message.receive.stage
    if not 0 <= other < schedule.stages:
        return None
    placement = schedule.placement
    return message if placement[other] != placement[action.stage] else None


def with_transfers(schedule: Schedule) -> Orders:
    """Return the orders with sends and receives, as torch.distributed.pipelining adds them.

    The ranks take turns with one action each. A send follows its computation directly, and its
    receive is appended to the other rank's list at that turn. So all messages can move in the order
    of turns, even if transfers are blocking.

    Raises:
        ShardirError: the schedule cannot run.
    """
    check(schedule)
    orders: list[list[Action]] = [[] for _ in schedule.orders]
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
            orders[rank].append(action)
            if message := sent_by(schedule, action):
                orders[rank].append(message.send)
                orders[schedule.placement[message.receive.stage]].append(message.receive)
    return tuple(map(tuple, orders))


def check_transfers(orders: Orders, blocking: bool = False) -> Schedule:
    """Check that lists with transfers end, and return the schedule that they run.

    Raises:
        ShardirError: with all errors of the first of these kinds: a transfer is missing, repeated
            or unexpected; a send precedes the computation of its value, or a receive follows the
            use of its value; the receives of a channel are in another order than its sends;
            actions wait for each other in a cycle.
    """
    schedule = Schedule.of(tuple(tuple(a for a in o if a.kind in COMPUTE) for o in orders))
    check(schedule)
    for errors in (
        _missing(schedule, orders),
        _misplaced(schedule, orders),
        _out_of_order(schedule, orders),
        _cycle(schedule, orders, blocking),
    ):
        if messages := list(errors):
            raise Failure([(None, e) for e in messages])
    return schedule


def _missing(schedule: Schedule, orders: Orders) -> Iterable[str]:
    """Yield an error for each send and receive that is missing, repeated or unexpected."""
    placement = schedule.placement
    counts = Counter((r, a) for r, o in enumerate(orders) for a in o if a.kind in TRANSFERS)
    messages = {sent_by(schedule, a) for o in schedule.orders for a in o} - {None}
    expected = {(placement[a.stage], a) for message in messages if message for a in message}
    for rank, a in sorted(expected):
        if counts[rank, a] != 1:
            times = "never" if not counts[rank, a] else f"{counts[rank, a]} times"
            yield f"rank {rank}: expected {a} once, got it {times}; write it once"
    for rank, a in sorted(counts.keys() - expected):
        yield f"rank {rank}: expected no {a}, which has no other end; drop it"


def _misplaced(schedule: Schedule, orders: Orders) -> Iterable[str]:
    """Yield an error for each send before the computation of its value, and each receive after the
    use of its value."""
    for rank, order in enumerate(orders):
        at = {a: k for k, a in enumerate(order)}
        for k, a in enumerate(order):
            if a.kind in TRANSFERS:
                computation = _computation_of(schedule, a)
                sends = a.kind.startswith("SEND")
                if sends != (at[computation] < k):
                    where = "after" if sends else "before"
                    yield f"rank {rank}: expected {a} {where} {computation}; move it there"


def _computation_of(schedule: Schedule, action: Action) -> Action:
    """Return the action that computes a sent value, or uses a received value."""
    if action.kind[-1] == "F":
        return action._replace(kind="F")
    return schedule.backward(action.stage, action.microbatch)


def _out_of_order(schedule: Schedule, orders: Orders) -> Iterable[str]:
    """Yield an error for each channel whose receives are not in the order of its sends."""
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
    """Return the messages of each channel, in the order of their sends or receives (`end`)."""
    channels: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    for order in orders:
        for a in order:
            if a.kind.startswith(end):
                message = message_of(a)
                sender, receiver = (schedule.placement[half.stage] for half in message)
                channels[sender, receiver].append(message)
    return channels


def _cycle(schedule: Schedule, orders: Orders, blocking: bool) -> Iterable[str]:
    """Yield an error if actions wait for each other in a cycle.

    A node is a computation, or a message, whose send and receive happen together. It has an edge to
    each node that cannot happen before it.
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
                successors.add(_computation_of(schedule, n.receive))
    if cycle := find_cycle(after):
        ranks = [n if isinstance(n, Message) else schedule.placement[n.stage] for n in cycle]
        yield (
            "expected transfers that end, got a cycle of actions that wait for each other: "
            f"{cycle_text(cycle, ranks)}; move one of them in its list"
        )
