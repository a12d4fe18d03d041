"""Schedules of pipeline parallel steps: which rank computes which stage for which microbatch, in
which order. Plain values, in the grammar of torch.distributed.pipelining.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardir.algebra.schedules.actions import (
    COMPUTE,
    KINDS,
    OTHERS,
    TRANSFERS,
    Action,
    Orders,
    orders_text,
    parse_action,
    parse_orders,
)
from shardir.algebra.schedules.checking import check, check_actions
from shardir.algebra.schedules.named import NAMES, NamedSchedule, schedule
from shardir.algebra.schedules.schedule import Schedule

if TYPE_CHECKING:
    from shardir.algebra.schedules.costs import PipelineCosts, lower_bound
    from shardir.algebra.schedules.merging import merged
    from shardir.algebra.schedules.searching import (
        SearchedSchedule,
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
    "merging": ("merged",),
    "searching": ("SearchedSchedule", "named_schedules", "placements", "search"),
    "simulation": ("PipelineTimeline", "simulate"),
    "transfers": ("check_transfers", "with_transfers"),
}
"""Names by their files, which are imported at their first use: verification needs none of them."""


def __getattr__(name: str) -> Any:
    for file, names in _LATER.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
