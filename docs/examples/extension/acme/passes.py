"""The pass fuse-swish."""

from dataclasses import dataclass

from acme.ops import SwishOp
from shardir.extend import Function, GlobalPass, Rewriter, erase, float_attr, nn


@dataclass(frozen=True)
class FuseSwish(GlobalPass):
    """Replace x * sigmoid(x) by acme.swish.

    The sigmoid stays while it has other uses.
    """

    name = "fuse-swish"

    def rewrite(self, f: Function) -> None:
        for op in f.ops:
            if isinstance(op, nn.MulOp) and (gate := sigmoid_of(op)) is not None:
                rewriter = f.rewriter().before(op)
                # of the same type: in a program with some annotations `op` would place it
                beta = {"beta": float_attr(1.0)}
                new = rewriter.create(SwishOp, [gate.x], [op.out.type], beta)
                Rewriter.replace(op, new.results)
                if gate.out.first_use is None:
                    erase(gate)


def sigmoid_of(op: nn.MulOp) -> nn.SigmoidOp | None:
    """Return the sigmoid of a product of x and its sigmoid."""
    for x, y in ((op.lhs, op.rhs), (op.rhs, op.lhs)):
        if isinstance(y.owner, nn.SigmoidOp) and y.owner.x is x:
            return y.owner
    return None
