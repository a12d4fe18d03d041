"""What a program costs: seconds and bytes of memory on a cluster."""

from shardir.cost import clusters
from shardir.cost.memory import MemoryUse, Storage, memory_of
from shardir.cost.report import FunctionCost, report
from shardir.cost.seconds import OpCost, op_seconds

__all__ = [
    "FunctionCost", "MemoryUse", "OpCost", "Storage", "clusters", "memory_of", "op_seconds",
    "report",
]  # fmt: skip
