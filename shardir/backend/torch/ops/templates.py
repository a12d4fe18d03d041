"""The text of an op of an extension: an expression with its operands and properties in braces.

    SwishOp: "{x} * torch.sigmoid({beta} * {x})"

Properties of the op are numbers, tuples of numbers, texts, True, or None where it has none. The
expression may use torch alone, since a program needs nothing else.
"""

from collections.abc import Callable
from string import Formatter
from typing import Any

from xdsl.dialects.builtin import FloatAttr, IntegerAttr, StringAttr, UnitAttr
from xdsl.ir import Attribute, Operation
from xdsl.irdl import IRDLOperation, OperandDef

from shardir.backend.torch.emit.literals import float_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.backend.torch.ops.common import ints
from shardir.diagnostics import Failure, ShardirError, did_you_mean
from shardir.dialects.text import IntsAttr, WordAttr


def entry_of(op: type[Operation], text: Any) -> Entry:
    """Return the emitter of an op: a function as it is, that of an expression for a text.

    Raises:
        ShardirError: the text has other names in braces than those of the op, or the op has
            several results.
    """
    if callable(text):
        return text
    if not isinstance(text, str) or not issubclass(op, IRDLOperation):
        raise ShardirError(f"expected an expression of torch for {op.name}, got {text!r:.60}")
    definition = op.get_irdl_definition()
    operands = {name for name, d in definition.operands if type(d) is OperandDef}
    known = {*operands, *definition.properties}
    try:
        fields = [name for _, name, _, _ in Formatter().parse(text) if name is not None]
    except ValueError as e:
        raise ShardirError(
            f"expected an expression of torch for {op.name}, got {text!r}: {e}"
        ) from e
    for name in fields:
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are {', '.join(sorted(known))}"
            raise ShardirError(
                f"expected the name of an operand or a property of {op.name} in {text!r}, got "
                f"{{{name}}}{hint}"
            )
    if len(definition.results) != 1:
        raise ShardirError(
            f"expected an op with one result for the text {text!r}, got {op.name}; give a function"
        )
    return _emitter(text, [f for f in fields if f in operands])


def _emitter(text: str, operands: list[str]) -> Callable[[EmissionScope, Any], Text]:
    def entry(s: EmissionScope, op: Any) -> Text:
        given: dict[str, Any] = {
            name: _text(op, op.properties.get(name)) for name in op.get_irdl_definition().properties
        }
        given |= {name: s.operand(getattr(op, name)) for name in operands}
        return text.format_map(given)

    return entry


def _text(op: Operation, value: Attribute | None) -> str:
    """Return a property in Python."""
    match value:
        case None:
            return "None"
        case UnitAttr():
            return "True"
        case FloatAttr():
            return float_text(value.value.data)
        case IntegerAttr():
            return str(value.value.data)
        case IntsAttr():
            return ints(value.data)
        case StringAttr() | WordAttr():
            return repr(str(value.data))
    raise Failure.at(op, f"expected a number, numbers or a text as property, got {value}")
