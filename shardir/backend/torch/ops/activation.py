"""Activations."""

from collections.abc import Callable

from xdsl.ir import Operation

from shardir.backend.torch.emit.literals import float_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.backend.torch.ops.common import method
from shardir.dialects import nn
from shardir.dialects.nn.properties import float_of


def _function(call: str, *options: str) -> Callable[[EmissionScope, Operation], Text]:
    """Return the emitter of a call of torch.nn.functional with numbers from properties."""

    def entry(s: EmissionScope, op: Operation) -> Text:
        s.use("F")
        arguments = [s.operand(op.operands[0]), *(float_text(float_of(op, n)) for n in options)]
        return f"F.{call}({', '.join(arguments)})"

    return entry


def _grad(call: str, last: str = "") -> Callable[[EmissionScope, Operation], Text]:
    def entry(s: EmissionScope, op: Operation) -> Text:
        s.use("aten")
        saved, dy = op.operands
        return f"aten.{call}({s.operand(dy)}, {s.operand(saved)}{last})"

    return entry


def _gelu(s: EmissionScope, op: nn.GeluOp) -> Text:
    s.use("F")
    form = "" if op.exact is not None else ', approximate="tanh"'
    return f"F.gelu({s.operand(op.x)}{form})"


def _gelu_grad(s: EmissionScope, op: nn.GeluGradOp) -> Text:
    form = "" if op.exact is not None else ', approximate="tanh"'
    return _grad("gelu_backward", form)(s, op)


TORCH: dict[type[Operation], Entry] = {
    nn.ReluOp: method("relu"),
    nn.ReluGradOp: _grad("threshold_backward", ", 0"),
    nn.TanhOp: method("tanh"),
    nn.TanhGradOp: _grad("tanh_backward"),
    nn.SigmoidOp: method("sigmoid"),
    nn.SigmoidGradOp: _grad("sigmoid_backward"),
    nn.SiluOp: _function("silu"),
    nn.SiluGradOp: _grad("silu_backward"),
    nn.GeluOp: _gelu,
    nn.GeluGradOp: _gelu_grad,
    nn.SoftplusOp: _function("softplus"),
    nn.LeakyReluOp: _function("leaky_relu", "slope"),
    nn.EluOp: _function("elu", "alpha"),
    nn.HardtanhOp: _function("hardtanh", "min", "max"),
}
