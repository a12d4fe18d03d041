"""Schedules of pipeline parallel steps: which rank computes which stage for which microbatch, in
which order. Plain values, in the grammar of torch.distributed.pipelining.
"""

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
from shardir.algebra.schedules.costs import PipelineCosts, lower_bound
from shardir.algebra.schedules.named import NAMES, NamedSchedule, schedule
from shardir.algebra.schedules.schedule import Schedule
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
