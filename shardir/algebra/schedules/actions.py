"""The actions of pipeline parallel steps, and their text, which is torch.distributed.pipelining's.

2F0         stage 2 computes the forward part of microbatch 0
2I4, 2W4    stage 2 computes the gradients of its inputs for microbatch 4; those of its weights
2B4         both together
2SEND_F0    stage 2 sends the results of 2F0 to stage 3, which has 3RECV_F0
2SEND_B4    stage 2 sends the results of 2I4 or 2B4 to stage 1, which has 1RECV_B4
"""

import re
from typing import NamedTuple

from shardir.diagnostics import ShardirError, did_you_mean, one_of

FORWARD, INPUT, WEIGHT, BACKWARD = "F", "I", "W", "B"
COMPUTE = (FORWARD, INPUT, WEIGHT, BACKWARD)
TRANSFERS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
OTHERS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
"""Kinds that are read and kept: a stage's parameters are gathered or freed, its gradients
reduced."""
KINDS = (*COMPUTE, *TRANSFERS, *OTHERS)

OVERLAPPED = "OVERLAP_F_B"
"""Torch's kind of actions that a rank may run at the same time: `(0F7;7B3)OVERLAP_F_B`. Here they
are run in turn."""

ACTION = re.compile(r"(?P<stage>[0-9]+)(?P<kind>[A-Z_]+)(?P<microbatch>[0-9]*)", re.ASCII)
TOGETHER = re.compile(rf"\((?P<actions>[^()]*)\){OVERLAPPED}", re.ASCII)
EXAMPLE = "write a stage, a kind and a microbatch, such as 2F0"


class Action(NamedTuple):
    """An act of a rank for a stage and a microbatch, both counted from 0. The microbatch is None
    where the action concerns all of them."""

    stage: int
    kind: str
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


Orders = tuple[tuple[Action, ...], ...]
"""The actions of each rank, in the order in which it runs them."""


def parse_action(text: str) -> Action:
    """Return the action that a text such as `2F0` is.

    Raises:
        ShardirError: it is none.
    """
    found = ACTION.fullmatch(text.strip())
    if found is None:
        raise ShardirError(f"expected an action, got {text.strip()!r}; {EXAMPLE}")
    kind, microbatch = found["kind"], found["microbatch"]
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS)
        raise ShardirError(f"expected {one_of(KINDS)}, got {kind!r} in {text.strip()!r}{hint}")
    if not microbatch and kind not in OTHERS:
        raise ShardirError(f"expected a microbatch after {kind}, got {text.strip()!r}; {EXAMPLE}")
    return Action(int(found["stage"]), kind, int(microbatch) if microbatch else None)


def parse_orders(text: str) -> Orders:
    """Return the actions of each rank, from a line for each: actions with commas between them, as
    torch writes them to a file. Empty cells are dropped.

    Raises:
        ShardirError: there is no line, or a cell is no action; with all errors.
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


def _actions_of(cell: str) -> list[Action]:
    if not cell:
        return []
    if together := TOGETHER.fullmatch(cell):
        return [parse_action(a) for a in together["actions"].split(";")]
    return [parse_action(cell)]
