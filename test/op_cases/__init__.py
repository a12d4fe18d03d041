"""The samples of each op of nn and train: a file per family, of the same name as its dialect's.

A file has CASES, the ops on some shapes, and REFERENCES, for each op the independent answer: torch
on one device. The laws of ops hold on all of them (`op_laws.py`). A case has the element types that
it is for; a type that no case of an op has is refused by it.
"""

from support.reference import Reference
from xdsl.ir import Operation

from op_cases.case import EVEN, Case
from shardir.dialects.families import modules_of

__all__ = ["CASES", "EVEN", "FAMILIES", "REFERENCES", "Case"]

FAMILIES = {n: module for n, module in modules_of(__name__).items() if hasattr(module, "CASES")}

CASES: list[Case] = [case for family in FAMILIES.values() for case in family.CASES]
REFERENCES: dict[type[Operation], Reference] = {
    op: reference for family in FAMILIES.values() for op, reference in family.REFERENCES.items()
}
