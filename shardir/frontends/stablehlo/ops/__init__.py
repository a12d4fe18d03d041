"""The table of ops of StableHLO and CHLO: one entry for each, in files by subject.

    "tanh": elementwise(nn.tanh)

An entry gets the translation of the current op and the operands as values; it returns a value, or a
sequence of values. It refuses what it does not import, by `t.refuse(reason)`.
"""

from shardir.frontends.stablehlo.ops import (
    collectives,
    contraction,
    control,
    convolution,
    custom,
    elementwise,
    factorization,
    indexing,
    random,
    reduction,
    scattering,
    shape,
    special,
    triangular,
    windows,
)
from shardir.frontends.stablehlo.translation import HloEntry

TABLE: dict[str, HloEntry] = {}
for module in (
    collectives, contraction, control, convolution, custom, elementwise, factorization, indexing,
    random, reduction, scattering, shape, special, triangular, windows,
):  # fmt: skip
    TABLE |= module.TABLE
TABLE["sdy.constant"] = TABLE["stablehlo.constant"]
