"""Schedules: which rank runs which stages, and in which order; in the grammar of
torch.distributed.pipelining.

2F0         stage 2 computes the forward part of microbatch 0
2I4, 2W4    stage 2 computes the gradients of its inputs for microbatch 4; those of its weights
2B4         both together
2SEND_F0    stage 2 sends the results of 2F0 to stage 3, which has 3RECV_F0
2SEND_B4    stage 2 sends the results of 2I4 or 2B4 to stage 1, which has 1RECV_B4
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

from shardir.diagnostics import ShardirError, did_you_mean, one_of

FORWARD, INPUT, WEIGHT, BACKWARD = "F", "I", "W", "B"
COMPUTE = (FORWARD, INPUT, WEIGHT, BACKWARD)
TRANSFERS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
OTHERS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
"""Kinds that are parsed and kept, not derived: a stage's parameters are gathered or freed, its
gradients reduced."""
KINDS = (*COMPUTE, *TRANSFERS, *OTHERS)

OVERLAPPED = "OVERLAP_F_B"
"""Torch's kind of two actions that a rank may run at the same time: `(0F7;7B3)OVERLAP_F_B`. Here
they run in turn."""

ACTION = re.compile(r"(?P<stage>[0-9]+)(?P<kind>[A-Z_]+)(?P<microbatch>[0-9]*)", re.ASCII)
TOGETHER = re.compile(rf"\((?P<actions>[^()]*)\){OVERLAPPED}", re.ASCII)
EXAMPLE = "write a stage, a kind and a microbatch, such as 2F0"


class Action(NamedTuple):
    """An action of a rank for a stage and a microbatch, both counted from 0; the microbatch is None
    for an action of all microbatches."""

    stage: int
    kind: str
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


Orders = tuple[tuple[Action, ...], ...]
"""The actions of each rank, in their order."""


def parse_action(text: str) -> Action:
    """Return the action of a text such as `2F0`.

    Raises:
        ShardirError: the text is not an action.
    """
    match = ACTION.fullmatch(text.strip())
    if match is None:
        raise ShardirError(f"expected an action, got {text.strip()!r}; {EXAMPLE}")
    kind, microbatch = match["kind"], match["microbatch"]
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS)
        raise ShardirError(f"expected {one_of(KINDS)}, got {kind!r} in {text.strip()!r}{hint}")
    if not microbatch and kind not in OTHERS:
        raise ShardirError(f"expected a microbatch after {kind}, got {text.strip()!r}; {EXAMPLE}")
    return Action(int(match["stage"]), kind, int(microbatch) if microbatch else None)


def parse_orders(text: str) -> Orders:
    """Return the orders of a text in torch's format: a line of actions for each rank, separated by
    commas. Empty cells are dropped.

    Raises:
        ShardirError: there is no line, or a cell is not an action; with all errors.
    """
    orders, errors = [], []
    for rank, line in enumerate(text.strip().split("\n")):
        actions: list[Action] = []
        for cell in line.split(","):
            try:
                actions += _actions_of(cell.strip())
            except ShardirError as e:
                errors.append(f"rank {rank}: {e}")
        orders.append(tuple(actions))
    if not orders:
        errors = ["expected a line of actions for each rank, got no line; write 0F0,0B0"]
    if errors:
        raise ShardirError("\n".join(errors))
    return tuple(orders)


def orders_text(orders: Orders) -> str:
    """Return the text that `parse_orders` reads."""
    return "\n".join(",".join(map(str, actions)) for actions in orders)


def peak(order: Sequence[Action], size: Sequence[float]) -> float:
    """Return the maximum that a rank holds of microbatches, from F to B or W.

    Args:
        size: of a microbatch on each stage, in bytes or microbatches.
    """
    maximum = held = 0.0
    for a in order:
        if a.kind == "F":
            held += size[a.stage]
            maximum = max(maximum, held)
        elif a.kind != "I":
            held -= size[a.stage]
    return maximum


def _actions_of(cell: str) -> list[Action]:
    """Return the actions of a cell: none, one, or two that torch overlaps."""
    if not cell:
        return []
    if together := TOGETHER.fullmatch(cell):
        return [parse_action(a) for a in together["actions"].split(";")]
    return [parse_action(cell)]


@dataclass(frozen=True)
class Schedule:
    """The orders of the ranks of a pipeline. `check` tells whether they can run.

    Attributes:
        placement: the rank of each stage.
        orders: the actions of each rank: F, B, I and W.
    """

    stages: int
    ranks: int
    microbatches: int
    placement: tuple[int, ...]
    orders: Orders

    @classmethod
    def of(cls, orders: Orders) -> Self:
        """Return the schedule of orders. A stage is on the rank that has most of its actions.

        Raises:
            ShardirError: an action is not a computation, or a stage has no action; with all errors.
        """
        counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for rank, actions in enumerate(orders):
            for a in actions:
                counts[a.stage][rank] += 1
        stages = 1 + max(counts, default=-1)
        errors = [
            f"rank {rank}: expected {one_of(COMPUTE)}, got {a}; drop it: transfers and other "
            "actions are derived"
            for rank, actions in enumerate(orders) for a in actions if a.kind not in COMPUTE
        ] + [
            f"expected actions of stages 0 to {stages - 1}, got none of stage {s}; count stages "
            "from 0"
            for s in range(stages) if s not in counts
        ]  # fmt: skip
        if not stages:
            errors.append("expected actions, got none; write 0F0,0B0")
        if errors:
            raise ShardirError("\n".join(errors))
        microbatches = 1 + max(a.microbatch or 0 for actions in orders for a in actions)
        placement = tuple(counts[s].most_common(1)[0][0] for s in range(stages))
        return cls(stages, len(orders), microbatches, placement, orders)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the schedule of a text with a line of actions for each rank.

        Raises:
            ShardirError: a cell is not an action, or `of` raises; with all errors.
        """
        return cls.of(parse_orders(text))

    def csv(self) -> str:
        """Return the text, which `parse` and torch read."""
        return orders_text(self.orders)

    def __str__(self) -> str:
        return self.csv()

    @cached_property
    def splits_backward(self) -> frozenset[tuple[int, int | None]]:
        """The stages and microbatches whose backward part is split into I and W."""
        return frozenset((a.stage, a.microbatch) for o in self.orders for a in o if a.kind == "I")

    @property
    def is_forward(self) -> bool:
        """Whether there are no backward parts."""
        return all(a.kind == "F" for order in self.orders for a in order)

    def forward(self) -> Self:
        """Return the schedule without its backward parts."""
        orders = tuple(tuple(a for a in order if a.kind == "F") for order in self.orders)
        return replace(self, orders=orders)

    def backward(self, stage: int, microbatch: int | None) -> Action:
        """Return the action that computes the gradients of a stage's inputs: I or B."""
        split = (stage, microbatch) in self.splits_backward
        return Action(stage, "I" if split else "B", microbatch)

    def needs(self, action: Action) -> list[Action]:
        """Return the actions whose results a computation takes, of its own and adjacent stages."""
        stage, kind, microbatch = action
        if kind == "F":
            return [Action(stage - 1, "F", microbatch)] if stage else []
        if kind == "W":
            return [Action(stage, "I", microbatch)]
        own = Action(stage, "F", microbatch)
        last = stage == self.stages - 1
        return [own] if last else [own, self.backward(stage + 1, microbatch)]
