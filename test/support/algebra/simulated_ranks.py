"""Ranks that run lists of actions with transfers, to see whether they come to their end."""

from collections import defaultdict

from shardir.algebra.schedules import Action, Orders, Schedule

ENDS, WAITS, WRONG = "ends", "waits", "wrong value"


class SimulatedRanks:
    """Ranks with a channel for each directed pair, without buffers.

    A channel gives the value of the k-th send to the k-th receive, whichever they are.
    """

    def __init__(self, schedule: Schedule, orders: Orders, blocking: bool):
        self.stages, self.blocking = schedule.stages, blocking
        self.rank_of = schedule.placement
        self.split = {(a.stage, a.microbatch) for o in orders for a in o if a.kind == "I"}
        self.left = [list(o) for o in orders]
        self.values: list[set[str]] = [set() for _ in orders]
        """The values that each rank has computed or received, as F0.1: of microbatch 0, stage 1."""
        self.started: set[Action] = set()
        self.sends: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
        self.receives: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
        self.awaited: list[set[str]] = [set() for _ in orders]
        self.wrong = False

    def run(self) -> str:
        moved = True
        while moved and not self.wrong:
            moved = any([self.step(rank) for rank in range(len(self.left))])
            moved |= any([self.move(channel) for channel in list(self.sends)])
        if self.wrong:
            return WRONG
        waits = any(self.left) or any(self.sends.values()) or any(self.receives.values())
        return WAITS if waits else ENDS

    def step(self, rank: int) -> bool:
        """Run or start the next action of a rank, if it can be."""
        if not self.left[rank]:
            return False
        a = self.left[rank][0]
        if a.kind in "FIWB":
            if self.awaited[rank] & self.needed(a):
                return False
            self.wrong |= not self.needed(a) <= self.values[rank]
            self.values[rank].add(name("G" if a.kind in "IB" else a.kind, a.stage, a))
        elif a not in self.started:
            self.start(rank, a)
            return True
        elif self.blocking and self.waits(rank, a):
            return False
        self.left[rank].pop(0)
        return True

    def needed(self, a: Action) -> set[str]:
        if a.kind == "F":
            return {name("F", a.stage - 1, a)} if a.stage else set()
        if a.kind == "W":
            return {name("G", a.stage, a)}
        last = a.stage == self.stages - 1
        after = set() if last else {name("G", a.stage + 1, a)}
        return {name("F", a.stage, a), *after}

    def start(self, rank: int, a: Action) -> None:
        step = 1 if a.kind.endswith("F") else -1
        other = a.stage + (step if a.kind.startswith("SEND") else -step)
        value = "F" if step == 1 else "G"
        self.started.add(a)
        if not 0 <= other < self.stages:
            self.wrong = True
        elif a.kind.startswith("SEND"):
            self.wrong |= name(value, a.stage, a) not in self.values[rank]
            self.sends[rank, self.rank_of[other]].append(a)
        else:
            self.awaited[rank].add(name(value, other, a))
            self.receives[self.rank_of[other], rank].append(a)

    def waits(self, rank: int, a: Action) -> bool:
        return any(
            a in ends for (sender, receiver), ends in (*self.sends.items(), *self.receives.items())
            if rank in (sender, receiver)
        )  # fmt: skip

    def move(self, channel: tuple[int, int]) -> bool:
        if not self.sends[channel] or not self.receives[channel]:
            return False
        sent, taken = self.sends[channel].pop(0), self.receives[channel].pop(0)
        forward = taken.kind.endswith("F")
        value = name("F" if forward else "G", taken.stage + (-1 if forward else 1), taken)
        expected = Action(
            taken.stage + (-1 if forward else 1), taken.kind.replace("RECV", "SEND"),
            taken.microbatch,
        )  # fmt: skip
        self.wrong |= sent != expected
        self.awaited[channel[1]].discard(value)
        self.values[channel[1]].add(value)
        return True


def name(value: str, stage: int, a: Action) -> str:
    return f"{value}{a.microbatch}.{stage}"
