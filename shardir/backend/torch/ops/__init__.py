"""What each tensor op and update is in torch: one entry per op, a file per family.

An entry gets the scope of the text and the op, and gives an expression, or a value that the
result is already (the same variable), or None when it has written its own lines.
"""

from shardir.backend.torch.ops import (
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
    ordering,
    positions,
    random,
    reduction,
    shape,
    train,
    windows,
)

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
    losses,
    attention,
    positions,
    creation,
    random,
    custom,
    train,
)

TORCH = {op: entry for family in FAMILIES for op, entry in family.TORCH.items()}
