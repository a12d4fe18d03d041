"""The named schedules: one record each."""

from collections.abc import Callable
from dataclasses import dataclass

from shardir.algebra.schedules.actions import Orders
from shardir.algebra.schedules.blocks import v_half, v_min, zb_h2
from shardir.algebra.schedules.looped import (
    breadth_first,
    gpipe,
    interleaved,
    one_forward_one_backward,
    per_round,
    zero_bubble,
)
from shardir.algebra.schedules.schedule import Schedule
from shardir.algebra.schedules.v_shaped import dualpipev, zbv
from shardir.diagnostics import ShardirError, did_you_mean, one_of


@dataclass(frozen=True)
class NamedSchedule:
    """A function that makes orders from numbers of ranks, of microbatches, and of stages on each
    rank, and the numbers that it takes."""

    title: str
    orders: Callable[[int, int, int], Orders]
    chunks: int | None = 1
    """The number of stages on each rank; None for any."""
    in_rounds: bool = False
    """Microbatches are in rounds of equal size, as many as the ranks go into them."""
    fills: bool = False
    """There are at least as many microbatches as stages."""


NAMES = {
    "gpipe": NamedSchedule("all forward parts, then all backward parts", gpipe),
    "1f1b": NamedSchedule("forward and backward parts in turns", one_forward_one_backward),
    "eager-1f1b": NamedSchedule("1F1B with twice the forward parts before the turns", interleaved),
    "interleaved": NamedSchedule(
        "1F1B with several stages on each rank, in rounds", interleaved, None, in_rounds=True
    ),
    "looped-bfs": NamedSchedule("GPipe with several stages on each rank", breadth_first, None),
    "zb-h1": NamedSchedule("1F1B with the gradients of weights delayed", zero_bubble),
    "zb-h2": NamedSchedule("no pause on any rank, with twice the memory of 1F1B", zb_h2),
    "interleaved-zb": NamedSchedule(
        "interleaved, with the gradients of weights delayed", zero_bubble, None, in_rounds=True
    ),
    "zbv": NamedSchedule("stages as a V, with the gradients of weights apart", zbv, 2),
    "v-half": NamedSchedule("stages as a V, with half the memory of 1F1B", v_half, 2),
    "v-min": NamedSchedule("stages as a V, with a third of the memory of 1F1B", v_min, 2),
    "dualpipev": NamedSchedule(
        "stages as a V, forward and backward parts in turns", dualpipev, 2, fills=True
    ),
}
"""The named schedules, by name."""


def schedule(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return a named schedule of a pipeline with `chunks` stages on each of the ranks.

    Raises:
        ShardirError: there is no schedule of this name, or not with these numbers.
    """
    named = NAMES.get(name)
    if named is None:
        hint = did_you_mean(name, NAMES)
        raise ShardirError(f"expected the name of a schedule: {one_of(NAMES)}, got {name!r}{hint}")
    for what, number in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if number < 1:
            raise ShardirError(f"{name}: expected {what} = 1 or more, got {number}; use 1 or more")
    if named.chunks is not None and chunks != named.chunks:
        raise ShardirError(
            f"{name}: expected chunks = {named.chunks}, the number of stages on each rank, got "
            f"{chunks}; use {named.chunks}"
        )
    size, rest = per_round(ranks, microbatches)
    if named.in_rounds and rest:
        raise ShardirError(
            f"{name}: expected microbatches in {microbatches // ranks} rounds of equal size on "
            f"{ranks} ranks, got {microbatches}; use {microbatches - rest} or "
            f"{(size + 1) * (microbatches // ranks)}"
        )
    if named.fills and microbatches < ranks * chunks:
        raise ShardirError(
            f"{name}: expected at least {ranks * chunks} microbatches, as many as stages, got "
            f"{microbatches}; use {ranks * chunks} or more"
        )
    return Schedule.of(named.orders(ranks, microbatches, chunks))
