"""Special and extreme numbers in the operands of ops, and how the results are compared."""

from collections.abc import Sequence

import numpy as np

from shardir.dialects import nn
from support.harness import Array

SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0)
LIMITS = np.finfo(np.float64)
EXTREME = (
    *(s * x for x in (LIMITS.max, LIMITS.tiny, LIMITS.smallest_subnormal, 1e10) for s in (1, -1)),
    LIMITS.eps, 0.0,
)  # fmt: skip

FINITE = (
    nn.BatchNormOp, nn.GroupNormOp, nn.LayerNormOp, nn.RmsNormOp, nn.LerpOp, nn.VarOp, nn.StdOp,
    nn.BinaryCrossEntropyWithLogitsOp, nn.BceWithLogitsLossOp,
)  # fmt: skip
"""Ops whose formula has several products and differences, in an order that torch documents nowhere
and that differs by device: they are finite where torch's are, and equal there; elsewhere one may
have NaN where the other has an infinity."""
WITHOUT_NAN = (nn.EluOp, nn.HardtanhOp)
"""torch's kernel for several elements has another gradient at NaN than that for one."""
UNDEFINED = (
    nn.AttentionOp, nn.BatchNormInferenceOp, nn.BceLossOp, nn.BinaryCrossEntropyOp,
    nn.CrossEntropyLossOp, nn.CrossEntropyOp, nn.KlDivLossOp, nn.RemainderOp, nn.SoftMarginLossOp,
)  # fmt: skip
"""torch refuses the numbers, its kernels differ from each other, or the docstring names how the op
differs from torch."""

SUMS = (
    nn.AdaptiveAvgPoolOp, nn.BatchNormOp, nn.ConvOp, nn.ConvTransposeOp,
    nn.ConvWeightOp, nn.CumsumOp, nn.EinsumOp, nn.GroupNormOp, nn.LayerNormOp, nn.LogsumexpOp,
    nn.MatmulOp, nn.ReduceOp, nn.RmsNormOp, nn.StdOp, nn.VarOp,
)  # fmt: skip
"""Ops that add elements: where extreme ones overflow or cancel each other, the order decides."""


def with_special(
    rng: np.random.Generator, x: Array, share: float, values: Sequence[float] = SPECIAL
) -> Array:
    """Return an array with a share of its floats replaced."""
    if x.dtype.kind != "f":
        return x
    return np.where(rng.random(x.shape) < share, rng.choice(values, x.shape), x)
