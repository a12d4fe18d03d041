"""The laws of ops on all cases of ours: `LAWS`, of `shardir.testing`.

`python test/op_laws.py` prints what covers each law of each op.
"""

from op_cases import CASES

from shardir.dialects import nn, train
from shardir.dialects.nn.base import TensorOp
from shardir.testing.op_laws import COVERAGE, OpLaws
from support.extent import LONG
from support.reference import torch_gradient

OPS: list[type[TensorOp]] = [
    op for d in (nn.Nn, train.Train) for op in d.operations
    if issubclass(op, TensorOp) and op not in (*train.LOOP, train.TransferOp, train.EitherOp)
]  # fmt: skip
"""The ops on tensors that can be alone in a function."""

LAWS = OpLaws(CASES, torch_gradient, LONG)


def main() -> int:
    """Print what covers each law of each op."""
    found = LAWS.cells(OPS)
    for op in OPS:
        print(op.name, *(f"{law}: {found[op, law] or '-'}" for law in COVERAGE), sep="; ")
    return 0
