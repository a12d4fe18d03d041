"""The cases of the ops of acme, and what the ops compute, for the laws of shardir.testing."""

import numpy as np

from acme.ops import SwishOp
from shardir.extend import Array, float_attr
from shardir.testing import Case

SWISH = [
    Case("even", SwishOp, ((4, 8),), props={"beta": float_attr(1.0)}),
    Case("odd", SwishOp, ((5, 3),), props={"beta": float_attr(-0.5)}),
    Case("cube", SwishOp, ((2, 3, 4),), props={"beta": float_attr(1.5)}),
]


def swish(op: SwishOp, x: Array) -> Array:
    """x sigmoid(beta x), written apart from `SwishOp.evaluate`."""
    return x * 0.5 * (1 + np.tanh(0.5 * op.beta.value.data * x))


SAMPLES = {SwishOp: (SWISH, swish)}
