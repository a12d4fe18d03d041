"""The cases of the laws of ops: each op of nn, and each update of train, on some shapes; a file
per family.

A case has the element types that it is for; a type that no case of an op has is refused by it.
"""

from op_cases import (
    activation,
    attention,
    contraction,
    convolution,
    creation,
    custom,
    elementwise,
    indexing,
    losses,
    movement,
    normalisation,
    norms,
    ordering,
    pooling,
    positions,
    random,
    reduction,
    shape,
    train,
    windows,
)
from op_cases.case import EVEN, Case

__all__ = ["CASES", "EVEN", "Case"]

FAMILIES = (
    elementwise,
    activation,
    contraction,
    convolution,
    reduction,
    shape,
    movement,
    windows,
    indexing,
    ordering,
    normalisation,
    norms,
    pooling,
    losses,
    attention,
    positions,
    creation,
    random,
    custom,
    train,
)

CASES: list[Case] = [case for family in FAMILIES for case in family.CASES]
