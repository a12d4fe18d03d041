"""The pipeline schedules of torch.distributed.pipelining, without process groups."""

from typing import Any

import torch.distributed.pipelining.schedules as theirs

from shardir.algebra.schedules import Action, Orders, Schedule

CLASSES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Our names of theirs. ZB-H1 is their InterleavedZeroBubble with one stage on each rank."""


class StageOfNone:
    """A stage as their schedules ask for it, without a module."""

    def __init__(self, ranks: int, stages: int, index: int):
        self.group_size, self.num_stages, self.stage_index = ranks, stages, index
        self.group_rank, self.is_first, self.is_last = 0, index == 0, index == stages - 1
        self.group, self.submod, self.device = None, None, "cpu"
        self.stage_index_to_group_rank: dict[int, int] = {}


def torch_schedule(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Any:
    """Return their schedule of this name.

    Raises:
        ValueError: theirs cannot have these numbers.
    """
    made: Any = theirs.get_schedule_class(CLASSES["interleaved-zb" if name == "zb-h1" else name])
    count = ranks * chunks
    stages = [StageOfNone(ranks, count, c * ranks) for c in range(chunks)]
    single = issubclass(made, theirs.PipelineScheduleSingle)
    return made(stages[0] if single else stages, microbatches)


def torch_orders(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Orders:
    """Return the orders of their schedule: F, I, W and B.

    Raises:
        ValueError: theirs cannot have these numbers.
    """
    found = torch_schedule(name, ranks, microbatches, chunks)
    single = isinstance(found, theirs.PipelineScheduleSingle)
    listed: Any = found._get_pipeline_order() if single else found.pipeline_order
    orders = [our_actions(listed[rank]) for rank in range(ranks)]
    if name == "1f1b":  # torch 2.13 lists the forward parts of the last rank from 1, but runs 0
        orders[-1] = tuple(
            a._replace(microbatch=(a.microbatch or 0) - (a.kind == "F")) for a in orders[-1]
        )
    return tuple(orders)


def our_actions(listed: list[Any]) -> tuple[Action, ...]:
    """Return their actions as ours, without those that are empty or reduce gradients."""
    each = [part for a in listed if a is not None for part in (a.sub_actions or (a,))]
    found = [Action(a.stage_index, a.computation_type.value, a.microbatch_index) for a in each]
    return tuple(a for a in found if a.kind != "REDUCE_GRAD")


def their_actions(orders: Orders) -> dict[int, list[Any]]:
    return {r: [theirs._Action.from_str(str(a)) for a in o] for r, o in enumerate(orders)}


def validates(schedule: Schedule) -> bool:
    """Whether their check of the numbers and the order of actions accepts a schedule."""
    try:
        found = theirs._validate_schedule(
            their_actions(schedule.orders), schedule.ranks, schedule.stages, schedule.microbatches
        )
    except (AssertionError, KeyError, IndexError):  # the last from the text of a message
        return False
    return found == dict(enumerate(schedule.placement))
