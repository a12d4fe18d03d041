"""The `nn` dialect: tensor ops, one class each, in families.

A family is a file, with its table OPS. The dialect is their sum.
"""

from xdsl.dialects.builtin import UnitAttr
from xdsl.ir import Dialect

from shardir.dialects.nn import (
    contraction,
    creation,
    elementwise,
    indexing,
    normalisation,
    reduction,
    shape,
)
from shardir.dialects.nn.base import DimsAttr as DimsAttr
from shardir.dialects.nn.base import TensorOp as TensorOp
from shardir.dialects.nn.contraction import (
    Contraction as Contraction,
)
from shardir.dialects.nn.contraction import (
    EinsumOp as EinsumOp,
)
from shardir.dialects.nn.contraction import (
    MatmulOp as MatmulOp,
)
from shardir.dialects.nn.creation import (
    ConstantOp as ConstantOp,
)
from shardir.dialects.nn.creation import (
    IotaOp as IotaOp,
)
from shardir.dialects.nn.elementwise import (
    AddOp as AddOp,
)
from shardir.dialects.nn.elementwise import (
    CompareOp as CompareOp,
)
from shardir.dialects.nn.elementwise import (
    ComparisonAttr as ComparisonAttr,
)
from shardir.dialects.nn.elementwise import (
    ConvertOp as ConvertOp,
)
from shardir.dialects.nn.elementwise import (
    DivOp as DivOp,
)
from shardir.dialects.nn.elementwise import (
    ExpOp as ExpOp,
)
from shardir.dialects.nn.elementwise import (
    GeluGradOp as GeluGradOp,
)
from shardir.dialects.nn.elementwise import (
    GeluOp as GeluOp,
)
from shardir.dialects.nn.elementwise import (
    LogOp as LogOp,
)
from shardir.dialects.nn.elementwise import (
    MaxOp as MaxOp,
)
from shardir.dialects.nn.elementwise import (
    MulOp as MulOp,
)
from shardir.dialects.nn.elementwise import (
    NegOp as NegOp,
)
from shardir.dialects.nn.elementwise import (
    ReluGradOp as ReluGradOp,
)
from shardir.dialects.nn.elementwise import (
    ReluOp as ReluOp,
)
from shardir.dialects.nn.elementwise import (
    SelectOp as SelectOp,
)
from shardir.dialects.nn.elementwise import (
    SigmoidGradOp as SigmoidGradOp,
)
from shardir.dialects.nn.elementwise import (
    SigmoidOp as SigmoidOp,
)
from shardir.dialects.nn.elementwise import (
    SqrtOp as SqrtOp,
)
from shardir.dialects.nn.elementwise import (
    StopGradientOp as StopGradientOp,
)
from shardir.dialects.nn.elementwise import (
    SubOp as SubOp,
)
from shardir.dialects.nn.elementwise import (
    TanhGradOp as TanhGradOp,
)
from shardir.dialects.nn.elementwise import (
    TanhOp as TanhOp,
)
from shardir.dialects.nn.indexing import (
    GatherGradOp as GatherGradOp,
)
from shardir.dialects.nn.indexing import (
    GatherOp as GatherOp,
)
from shardir.dialects.nn.indexing import (
    PickGradOp as PickGradOp,
)
from shardir.dialects.nn.indexing import (
    PickOp as PickOp,
)
from shardir.dialects.nn.normalisation import (
    CrossEntropyGradOp as CrossEntropyGradOp,
)
from shardir.dialects.nn.normalisation import (
    CrossEntropyOp as CrossEntropyOp,
)
from shardir.dialects.nn.normalisation import (
    LayerNormGradOp as LayerNormGradOp,
)
from shardir.dialects.nn.normalisation import (
    LayerNormOp as LayerNormOp,
)
from shardir.dialects.nn.normalisation import (
    LogSoftmaxGradOp as LogSoftmaxGradOp,
)
from shardir.dialects.nn.normalisation import (
    LogSoftmaxOp as LogSoftmaxOp,
)
from shardir.dialects.nn.normalisation import (
    SoftmaxGradOp as SoftmaxGradOp,
)
from shardir.dialects.nn.normalisation import (
    SoftmaxOp as SoftmaxOp,
)
from shardir.dialects.nn.reduction import (
    ReduceOp as ReduceOp,
)
from shardir.dialects.nn.reduction import (
    ReductionKindAttr as ReductionKindAttr,
)
from shardir.dialects.nn.shape import (
    BroadcastOp as BroadcastOp,
)
from shardir.dialects.nn.shape import (
    ReshapeOp as ReshapeOp,
)
from shardir.dialects.nn.shape import (
    TransposeOp as TransposeOp,
)

UNIT = UnitAttr()
FAMILIES = (elementwise, contraction, reduction, shape, indexing, normalisation, creation)

Nn = Dialect(
    "nn",
    [op for family in FAMILIES for op in family.OPS],
    [DimsAttr, elementwise.ComparisonAttr, reduction.ReductionKindAttr],
)
