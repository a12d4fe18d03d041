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
    EinsumOp as EinsumOp,
    MatmulOp as MatmulOp,
    Contraction as Contraction,
)
from shardir.dialects.nn.creation import (
    ConstantOp as ConstantOp,
    IotaOp as IotaOp,
)
from shardir.dialects.nn.elementwise import (
    AddOp as AddOp,
    SubOp as SubOp,
    MulOp as MulOp,
    DivOp as DivOp,
    MaxOp as MaxOp,
    NegOp as NegOp,
    ExpOp as ExpOp,
    LogOp as LogOp,
    SqrtOp as SqrtOp,
    ReluOp as ReluOp,
    ReluGradOp as ReluGradOp,
    TanhOp as TanhOp,
    TanhGradOp as TanhGradOp,
    SigmoidOp as SigmoidOp,
    SigmoidGradOp as SigmoidGradOp,
    GeluOp as GeluOp,
    GeluGradOp as GeluGradOp,
    CompareOp as CompareOp,
    SelectOp as SelectOp,
    ConvertOp as ConvertOp,
    StopGradientOp as StopGradientOp,
    ComparisonAttr as ComparisonAttr,
)
from shardir.dialects.nn.indexing import (
    GatherOp as GatherOp,
    GatherGradOp as GatherGradOp,
    PickOp as PickOp,
    PickGradOp as PickGradOp,
)
from shardir.dialects.nn.normalisation import (
    SoftmaxOp as SoftmaxOp,
    SoftmaxGradOp as SoftmaxGradOp,
    LogSoftmaxOp as LogSoftmaxOp,
    LogSoftmaxGradOp as LogSoftmaxGradOp,
    CrossEntropyOp as CrossEntropyOp,
    CrossEntropyGradOp as CrossEntropyGradOp,
    LayerNormOp as LayerNormOp,
    LayerNormGradOp as LayerNormGradOp,
)
from shardir.dialects.nn.reduction import (
    ReduceOp as ReduceOp,
    ReductionKindAttr as ReductionKindAttr,
)
from shardir.dialects.nn.shape import (
    ReshapeOp as ReshapeOp,
    TransposeOp as TransposeOp,
    BroadcastOp as BroadcastOp,
)

UNIT = UnitAttr()
FAMILIES = (elementwise, contraction, reduction, shape, indexing, normalisation, creation)

Nn = Dialect(
    "nn",
    [op for family in FAMILIES for op in family.OPS],
    [DimsAttr, elementwise.ComparisonAttr, reduction.ReductionKindAttr],
)
