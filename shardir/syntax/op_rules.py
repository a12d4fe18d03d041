"""The rules of all ops, retained: a process parses the formats of those ops only that it reads.

rules = rules_of([nn.ReluOp, nn.AddOp, ...], reader)
rules.of["nn.relu"]    # SSA_ID [group_0] [BRACES] ":" FN_TYPE
rules.lines()          # group_0: "strategy" ANGLES
"""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from xdsl.dialects.utils.enum_attribute import EnumAttribute
from xdsl.irdl import IRDLOperation

from shardir.grammar.retained import retained, version
from shardir.syntax import formats, omitted
from shardir.syntax.formats import OpFormat, Reader, Rules


class OpRules(NamedTuple):
    """The rule of each op by its name, and the names of the rules that they share by their text."""

    of: dict[str, str]
    shared: dict[str, str]

    def lines(self) -> list[str]:
        """Return the shared rules as Lark reads them."""
        return [
            f"{'!' if name.startswith('word') else ''}{name}: {text}"
            for text, name in self.shared.items()
        ]


def rules_of(ops: Sequence[type[IRDLOperation]], read: Reader) -> OpRules:
    """Return the rules of ops that have an assembly format."""
    files = (formats, omitted)  # the code that makes the rules
    code = sha256(b"".join(Path(f.__file__).read_bytes() for f in files)).hexdigest()
    key = repr((code, version("xdsl"), [_definition(op) for op in ops]))
    if " at 0x" in key:  # it has the address of something in place of a description
        return _made(ops, read)
    return OpRules(*retained(key, lambda: _made(ops, read)))


def _made(ops: Sequence[type[IRDLOperation]], read: Reader) -> OpRules:
    rules = Rules(read)
    return OpRules({op.name: OpFormat(op, rules).rhs for op in ops}, rules.names)


def _definition(op: type[IRDLOperation]) -> tuple[Any, ...]:
    """Return all that the rule of an op depends on."""
    d = op.get_irdl_definition()
    fields = (*d.properties.values(), *d.attributes.values())
    bases = {base for field in fields for base in field.constr.get_bases() or ()}
    return (
        d.name, d.assembly_format, d.operands, d.results, d.regions, d.successors,
        d.properties, d.attributes, d.accessor_names, d.options, d.custom_directives,
        sorted(map(_description, bases)),
    )  # fmt: skip


def _description(base: type[Any]) -> tuple[list[str], list[str]]:
    """Return the classes of an attribute, and the words of an enumeration."""
    words = [str(w.value) for w in base.enum_type] if issubclass(base, EnumAttribute) else []
    return [f"{c.__module__}.{c.__qualname__}" for c in base.__mro__], words
