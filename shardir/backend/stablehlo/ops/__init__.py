"""How ops are written that are not what their definition in numpy says, or that look at elements:
one function each, with the place, the op and its operands, in files of their families' subjects."""

from xdsl.ir import Operation

from shardir.backend.stablehlo.ops import (
    along,
    elementwise,
    indexing,
    random,
    shapes,
    training,
    windows,
)
from shardir.backend.stablehlo.writer import WriteOp

WRITERS: dict[type[Operation], WriteOp] = {}
for module in (along, elementwise, indexing, random, shapes, training, windows):
    WRITERS |= module.WRITERS
