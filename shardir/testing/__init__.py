"""Tests of ops, passes and programs, for packages that extend shardir; our own tests use them too.

    from shardir.testing import Case, check_op

    CASES = [Case("even", SwishOp, ((4, 8),), props={"beta": float_attr(1.5)}), ...]

    def test_swish():
        check_op(SwishOp, CASES, lambda op, x: x / (1 + np.exp(-op.beta.value.data * x)))

They need numpy; what runs emitted programs needs torch. No framework of tests is needed: a check
raises AssertionError.
"""

from shardir.testing.answers import by_torch
from shardir.testing.cases import Case
from shardir.testing.execution import interpret, on_ranks
from shardir.testing.extensions import check_extension
from shardir.testing.op_laws import check_op
from shardir.testing.passes import check_pass
from shardir.testing.random_layouts import random_form
from shardir.testing.random_programs import random_program
from shardir.testing.reducer import reduce

__all__ = [
    "Case",
    "by_torch",
    "check_extension",
    "check_op",
    "check_pass",
    "interpret",
    "on_ranks",
    "random_form",
    "random_program",
    "reduce",
]
