"""What a program costs: seconds and bytes of memory on a cluster."""

from shardir.cost import clusters
from shardir.cost.report import FunctionCost, report
from shardir.cost.seconds import OpCost, op_seconds

__all__ = ["FunctionCost", "OpCost", "clusters", "op_seconds", "report"]
