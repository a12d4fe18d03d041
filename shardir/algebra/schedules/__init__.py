"""Schedules of pipeline parallel steps: plain values, in the grammar of
torch.distributed.pipelining.

    schedule.py      actions, orders and schedules, and their text
    checking.py      whether a schedule can run
    named.py         GPipe, 1F1B, interleaved, zero bubble, V-shaped ones
    costs.py         costs of stages, and the lower bound of a step
    simulation.py    the time and memory of a schedule
    filling.py       list scheduling
    searching.py     the search for a fast schedule within memory
    transfers.py     sends and receives, and the proof that they end
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardir.algebra.schedules.checking import check, check_actions
from shardir.algebra.schedules.named import NAMES, NamedSchedule, schedule
from shardir.algebra.schedules.schedule import (
    COMPUTE,
    KINDS,
    OTHERS,
    TRANSFERS,
    Action,
    Orders,
    Schedule,
    orders_text,
    parse_action,
    parse_orders,
)

if TYPE_CHECKING:
    from shardir.algebra.schedules.costs import PipelineCosts, lower_bound
    from shardir.algebra.schedules.searching import (
        SearchedSchedule,
        merged,
        named_schedules,
        placements,
        search,
    )
    from shardir.algebra.schedules.simulation import PipelineTimeline, simulate
    from shardir.algebra.schedules.transfers import check_transfers, with_transfers

__all__ = [
    "COMPUTE",
    "KINDS",
    "NAMES",
    "OTHERS",
    "TRANSFERS",
    "Action",
    "NamedSchedule",
    "Orders",
    "PipelineCosts",
    "PipelineTimeline",
    "Schedule",
    "SearchedSchedule",
    "check",
    "check_actions",
    "check_transfers",
    "lower_bound",
    "merged",
    "named_schedules",
    "orders_text",
    "parse_action",
    "parse_orders",
    "placements",
    "schedule",
    "search",
    "simulate",
    "with_transfers",
]

_LATER = {
    "costs": ("PipelineCosts", "lower_bound"),
    "searching": ("SearchedSchedule", "merged", "named_schedules", "placements", "search"),
    "simulation": ("PipelineTimeline", "simulate"),
    "transfers": ("check_transfers", "with_transfers"),
}
"""Names by file. A file is imported at the first use of one of its names: verification needs none
of them."""


def __getattr__(name: str) -> Any:
    for file, names in _LATER.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
