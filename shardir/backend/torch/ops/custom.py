"""Custom ops: calls of functions in modules that the embedder registered.

The imported module and the function come from the registration in Python, never from the IR, which
provides names and literal values of options only.
"""

from xdsl.ir import Operation

from shardir.backend.torch.emit.imports import MODULES
from shardir.backend.torch.emit.literals import float_text
from shardir.backend.torch.emit.names import RESERVED, literal, tuple_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.diagnostics import Failure, coded
from shardir.dialects import nn
from shardir.dialects.nn.custom import OptionValue

TAKEN = (RESERVED - {"torch"}) | {"program", "single", "shardir_runtime"}
"""The modules that a program imports or has in its directory: custom ops can't be in them."""


def value_text(value: OptionValue) -> str:
    """The literal of an option's value."""
    if isinstance(value, str):
        return literal(value)
    if isinstance(value, tuple):
        return tuple_text([value_text(v) for v in value])
    return float_text(value)


def _custom(s: EmissionScope, op: nn.CustomOp) -> Text:
    if (registered := op.custom.function) is None:
        raise Failure.at(op, str(op.lacks("function in torch", 'torch="module:function"')))
    module, function = registered
    options = [f"{name}={value_text(v)}" for name, v in op.values.items()]
    arguments = ", ".join([*map(s.operand, op.operands), *options])
    if module == MODULES["fallback"]:
        s.use("fallback")
        return f"fallback.{function}({arguments})"
    if module.split(".")[0] in TAKEN:
        message = (
            f'expected the function of "{op.callee.data}" in a module whose name programs do not '
            f"use, got {module}"
        )
        raise Failure.at(op, coded("T11", message, use="rename the module"))
    s.program.foreign.add(module)
    return f"{module}.{function}({arguments})"


TORCH: dict[type[Operation], Entry] = {nn.CustomOp: _custom}
