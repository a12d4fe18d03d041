"""The cost of a program: seconds and bytes of memory on a cluster."""

from shardir.cost import clusters
from shardir.cost.memory import MemoryUse, Storage, memory_of
from shardir.cost.report import FunctionCost, report
from shardir.cost.seconds import OpCost, op_seconds
from shardir.cost.terms import Coefficients, PlanCost, Terms, relative

__all__ = [
    "Coefficients", "FunctionCost", "MemoryUse", "OpCost", "PlanCost", "Storage", "Terms",
    "clusters", "memory_of", "op_seconds", "relative", "report",
]  # fmt: skip
