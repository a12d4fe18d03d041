"""The dialect `dist`, with the tensor op that it has: tensor ops are made of its types."""

from xdsl.ir import Dialect

from shardir.dialects.dist import (
    attributes,
    base,
    manual,
    point_to_point,
    products,
    propagation,
    redistribute,
    steps,
    types,
)

Dist = Dialect(
    "dist",
    [
        types.ClusterOp, types.MeshOp, propagation.ShardingGroupOp,
        propagation.PropagationBarrierOp, redistribute.RedistributeOp, manual.ManualOp,
        *steps.OPS.values(), base.WaitOp, point_to_point.SendOp, point_to_point.RecvOp,
        *products.RING_PRODUCTS,
    ],
    [*attributes.ATTRS, propagation.DirectionAttr],
)  # fmt: skip
