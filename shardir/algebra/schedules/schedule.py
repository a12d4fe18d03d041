"""A schedule: which rank has which stages, and in which order it computes what."""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from shardir.algebra.schedules.actions import COMPUTE, Action, Orders, orders_text, parse_orders
from shardir.diagnostics import ShardirError, one_of


@dataclass(frozen=True)
class Schedule:
    """The orders of the ranks of a pipeline. `check` tells whether they can run.

    `placement` has the rank of each stage. `orders` has the actions of each rank: F, B, I and W.
    """

    stages: int
    ranks: int
    microbatches: int
    placement: tuple[int, ...]
    orders: Orders

    @classmethod
    def of(cls, orders: Orders) -> Self:
        """Return the schedule of these orders: a stage is on the rank that has most of its actions.

        Raises:
            ShardirError: an action does not compute, or a stage has no action; with all errors.
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
        """Return the schedule with a line of actions for each rank.

        Raises:
            ShardirError: a cell is no action, or `of` raises; with all errors.
        """
        return cls.of(parse_orders(text))

    def csv(self) -> str:
        """Return the text that `parse` reads, and torch."""
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
        """Return the actions whose results a computing action takes, of its own stage and of the
        adjacent ones."""
        stage, kind, microbatch = action
        if kind == "F":
            return [Action(stage - 1, "F", microbatch)] if stage else []
        if kind == "W":
            return [Action(stage, "I", microbatch)]
        own = Action(stage, "F", microbatch)
        last = stage == self.stages - 1
        return [own] if last else [own, self.backward(stage + 1, microbatch)]
