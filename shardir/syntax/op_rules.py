"""The grammar rules of all ops, cached on disk, so that a process parses the formats of the ops it
uses only.

rules = rules_of([nn.ReluOp, nn.AddOp, ...], reader)
rules.of["nn.relu"]    # SSA_ID [group_0] [BRACES] ":" FN_TYPE
rules.lines()          # group_0: "strategy" ANGLES
"""

from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from xdsl.dialects.utils.enum_attribute import EnumAttribute
from xdsl.irdl import IRDLOperation
from xdsl.utils.exceptions import ParseError

from shardir.diagnostics import ShardirError
from shardir.grammar.retained import retained, version
from shardir.syntax import formats, omitted
from shardir.syntax.formats import OpFormat, Reader, Rules


class OpRules(NamedTuple):
    """The rule of each op by op name, and the names of shared rules by text."""

    of: dict[str, str]
    shared: dict[str, str]

    def lines(self) -> list[str]:
        """Return the shared rules in Lark's syntax."""
        return [
            f"{'!' if name.startswith('word') else ''}{name}: {text}"
            for text, name in self.shared.items()
        ]


def rules_of(ops: Sequence[type[IRDLOperation]], read: Reader) -> OpRules:
    """Return the rules of ops, all with an assembly format; from the cache if possible."""
    files = (formats, omitted)  # the code that makes the rules
    code = sha256(b"".join(Path(f.__file__).read_bytes() for f in files)).hexdigest()
    key = repr((code, version("xdsl"), [_definition(op) for op in ops]))
    if " at 0x" in key:  # an object's address instead of a description: not a valid key
        return _make_rules(ops, read)
    return OpRules(*retained(key, lambda: _make_rules(ops, read)))


def _make_rules(ops: Sequence[type[IRDLOperation]], read: Reader) -> OpRules:
    """Return the rules of the ops whose formats have no directive that the grammar lacks."""
    rules, of = Rules(read), dict[str, str]()
    for op in ops:
        try:
            with suppress(NotImplementedError):
                of[op.name] = OpFormat(op, rules).rhs
        except ParseError as e:
            text = op.get_irdl_definition().assembly_format
            raise ShardirError(
                f"the assembly_format of {op.name}, {text!r}: {e.msg}; correct its class"
            ) from None
    return OpRules(of, rules.names)


def _definition(op: type[IRDLOperation]) -> tuple[Any, ...]:
    """Return the parts of an op's definition that its rule depends on."""
    d = op.get_irdl_definition()
    fields = (*d.properties.values(), *d.attributes.values())
    bases = {base for field in fields for base in field.constr.get_bases() or ()}
    return (
        d.name, d.assembly_format, d.operands, d.results, d.regions, d.successors,
        d.properties, d.attributes, d.accessor_names, d.options, d.custom_directives,
        sorted(map(_description, bases)),
    )  # fmt: skip


def _description(base: type[Any]) -> tuple[list[str], list[str]]:
    """Return the names of an attribute's base classes, and the words of an enumeration."""
    words = [str(w.value) for w in base.enum_type] if issubclass(base, EnumAttribute) else []
    return [f"{c.__module__}.{c.__qualname__}" for c in base.__mro__], words
