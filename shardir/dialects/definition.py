"""Definitions of ops whose assembly format is parsed where it is first used, which are verified
once for each signature, and whose values are read at once.

xDSL parses the formats of all ops when their classes are defined: a tenth of the time in which a
small program is compiled. A program has few of them. And it compares each op of a large program
with its definition, of which few have different types and properties. To read `op.x` takes it seven
calls.
"""

from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from xdsl.dialects.builtin import UNKNOWN_LOC, LocationAttr
from xdsl.ir import Attribute, Block, Operation, OpResult, Region, SSAValue, SSAValues
from xdsl.irdl import IRDLOperation, OpDef, VarIRConstruct
from xdsl.irdl.declarative_assembly_format import FormatProgram
from xdsl.irdl.operations import (
    BaseAccessor,
    BeforeVariadicSingleAccessor,
    UniqueVariadicAccessor,
    get_accessors_from_op_def,
)
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.traits import OpTrait

from shardir.compat.xdsl import OPERANDS, give_operands, successors_of
from shardir.dialects.signatures import SignatureMemo
from shardir.dialects.symbols import verified_here

Op = TypeVar("Op", bound=type[IRDLOperation])

EMPTY: Mapping[str, Attribute] = {}


class OpClass(ABCMeta):
    """The class of classes of ops, of which none is registered as the subclass of another: whether
    an op is of one is asked for each op many times, and takes half as long without a look at those
    that may be registered."""

    __instancecheck__ = type.__instancecheck__
    __subclasscheck__ = type.__subclasscheck__


def op_definition(op: Op) -> Op:
    """Define an op by its class, as xDSL's `irdl_op_definition` does."""
    definition = OpDef.from_pyrdl(op)
    text, definition.assembly_format = definition.assembly_format, None
    members = get_accessors_from_op_def(definition, None)
    definition.assembly_format = text
    members["verify_"] = _verifier(definition, op.verify_)
    own = (*definition.properties.values(), *definition.attributes.values())
    if all(attribute.default_value is None for attribute in own):
        members["create"] = classmethod(_create)
    if text is not None:
        members |= {"parse": classmethod(_parse), "print": _print}
    for name, member in members.items():
        setattr(op, name, _at_once(member))
    return op


@dataclass(frozen=True)
class _One(BeforeVariadicSingleAccessor):
    """Reads an operand or a result from the field that has them."""

    field: str

    def __get__(self, obj: Operation, objtype: type | None = None) -> SSAValue:
        return tuple.__getitem__(getattr(obj, self.field), self.idx)


@dataclass(frozen=True)
class _All(UniqueVariadicAccessor):
    """Reads all operands or results from the field that has them."""

    field: str

    def __get__(self, obj: Operation, objtype: type | None = None) -> SSAValues:
        return getattr(obj, self.field)


_FIELDS = {VarIRConstruct.OPERAND: OPERANDS, VarIRConstruct.RESULT: "results"}


def _at_once(member: Any) -> Any:
    """Return a member of an op's class, of which an accessor reads values at once."""
    field = _FIELDS.get(member.construct) if isinstance(member, BaseAccessor) else None
    if field is None:
        return member
    if type(member) is BeforeVariadicSingleAccessor:
        return _One(member.construct, member.idx, field)
    if type(member) is UniqueVariadicAccessor and member.num_defs == 1:
        return _All(member.construct, member.idx, member.num_defs, field)
    return member


def _create(
    cls: type[IRDLOperation],
    *,
    operands: Sequence[SSAValue] = (),
    result_types: Sequence[Attribute] = (),
    properties: Mapping[str, Attribute] = EMPTY,
    attributes: Mapping[str, Attribute] = EMPTY,
    location: LocationAttr | None = None,
    successors: Sequence[Block] = (),
    regions: Sequence[Region] = (),
) -> IRDLOperation:
    """Return an op, as xDSL's `create` does in twice the time: it sets what most ops do not have,
    and looks for defaults."""
    op = cls.__new__(cls)
    give_operands(op, operands)
    op.results = SSAValues([OpResult(t, op, i) for i, t in enumerate(result_types)])
    op.properties = {**properties}
    op.attributes = {**attributes}
    op.location = UNKNOWN_LOC if location is None else location
    if successors:
        op.successors = successors
    for region in regions:
        op.add_region(region)
    return op


def _verifier(definition: OpDef, own: Callable[[Any], None]) -> Callable[[IRDLOperation], None]:
    """Return the method that verifies an op: by its definition, then by the method of its class."""

    @cache
    def is_flat() -> bool:
        """Whether all that the definition asks for is in the types, properties and attributes."""
        asking = [t for t in definition.traits if type(t).verify is not OpTrait.verify]
        return not (asking or definition.regions or definition.successors)

    def verify_all(self: IRDLOperation) -> None:
        defined.of_op(self, lambda: definition.verify(self), marks=True)
        own(self)

    def verify_(self: IRDLOperation) -> None:
        if self.regions or successors_of(self) or not is_flat():
            definition.verify(self)
            own(self)
            return
        here = verified_here() if own in _by_signature else None
        if here is None:
            verify_all(self)
        else:
            here.of_op(self, lambda: verify_all(self), marks=True)

    return verify_


_by_signature = set[Callable[[Any], None]]()


def by_signature(own: Callable[[Any], None]) -> Callable[[Any], None]:
    """Mark a method that verifies an op by its types and properties, and what symbols mean: where
    these are fixed, each signature is verified once."""
    _by_signature.add(own)
    return own


defined = SignatureMemo()
"""The signatures of ops that are as their definitions ask."""


@cache
def format_of(op: type[IRDLOperation]) -> FormatProgram:
    """Return the parsed assembly format of an op that has one.

    Raises:
        ParseError: it is not a format.
    """
    definition = op.get_irdl_definition()
    assert definition.assembly_format is not None
    return FormatProgram.from_str(definition.assembly_format, definition)


def _parse(op: type[IRDLOperation], parser: Parser) -> IRDLOperation:
    return format_of(op).parse(parser, op)


def _print(self: IRDLOperation, printer: Printer) -> None:
    format_of(type(self)).print(printer, self)
