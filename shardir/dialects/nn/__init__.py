"""The `nn` dialect: tensor ops, one class each, in families.

A family is a file, with its table OPS. The dialect is their sum, and `nn.X` is any class of them.
"""

from xdsl.dialects.builtin import UnitAttr
from xdsl.ir import Dialect

from shardir.dialects.nn import (
    activation,
    arithmetic,
    attention,
    base,
    contraction,
    convolution,
    creation,
    custom,
    indexing,
    joining,
    logic,
    losses,
    movement,
    normalisation,
    norms,
    ordering,
    pooling,
    positions,
    random,
    reduction,
    selection,
    shape,
    windows,
)
from shardir.dialects.nn.activation import *
from shardir.dialects.nn.arithmetic import *
from shardir.dialects.nn.attention import *
from shardir.dialects.nn.base import *
from shardir.dialects.nn.contraction import *
from shardir.dialects.nn.convolution import *
from shardir.dialects.nn.creation import *
from shardir.dialects.nn.custom import *
from shardir.dialects.nn.elementwise import *
from shardir.dialects.nn.indexing import *
from shardir.dialects.nn.joining import *
from shardir.dialects.nn.logic import *
from shardir.dialects.nn.losses import *
from shardir.dialects.nn.movement import *
from shardir.dialects.nn.normalisation import *
from shardir.dialects.nn.norms import *
from shardir.dialects.nn.ordering import *
from shardir.dialects.nn.pooling import *
from shardir.dialects.nn.positions import *
from shardir.dialects.nn.random import *
from shardir.dialects.nn.reduction import *
from shardir.dialects.nn.selection import *
from shardir.dialects.nn.shape import *
from shardir.dialects.nn.windows import *

UNIT = UnitAttr()
FAMILIES = (
    arithmetic,
    logic,
    selection,
    activation,
    contraction,
    convolution,
    reduction,
    shape,
    movement,
    joining,
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
)

Nn = Dialect(
    "nn",
    [op for family in FAMILIES for op in family.OPS],
    [
        base.DimsAttr,
        movement.IntsPerDimAttr,
        logic.ComparisonAttr,
        reduction.ReductionKindAttr,
        losses.LossReductionAttr,
        random.DistributionAttr,
        positions.PairingAttr,
    ],
)
