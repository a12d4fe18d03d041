"""Elementary functions."""

from xdsl.ir import Operation

from shardir.backend.torch.emit.scope import Entry
from shardir.backend.torch.ops.common import infix, method
from shardir.dialects import nn

TORCH: dict[type[Operation], Entry] = {
    nn.PowOp: infix("**"),
    nn.ReciprocalOp: method("reciprocal"),
    nn.SquareOp: method("square"),
    nn.SqrtOp: method("sqrt"),
    nn.RsqrtOp: method("rsqrt"),
    nn.ExpOp: method("exp"),
    nn.Exp2Op: method("exp2"),
    nn.Expm1Op: method("expm1"),
    nn.LogOp: method("log"),
    nn.Log2Op: method("log2"),
    nn.Log1pOp: method("log1p"),
    nn.SinOp: method("sin"),
    nn.CosOp: method("cos"),
    nn.TanOp: method("tan"),
    nn.AtanOp: method("atan"),
    nn.ErfOp: method("erf"),
    nn.ErfcOp: method("erfc"),
}
