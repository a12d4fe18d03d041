"""Op definitions that start faster than xDSL's: formats are parsed at their first use, ops are
verified once per signature, and `op.x` is read without indirection.

xDSL parses the formats of all ops when their classes are defined, a tenth of the time to compile a
small program, which uses few of them. It verifies each op of a large program against its
definition, although few of these ops differ in types and properties. Its `op.x` takes seven calls.
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
from shardir.dialects.symbols import verified_signatures

Op = TypeVar("Op", bound=type[IRDLOperation])

EMPTY: Mapping[str, Attribute] = {}


class OpClass(ABCMeta):
    """The metaclass of ops, without registered (virtual) subclasses: `isinstance` is called many
    times for each op, and takes half as long without them."""

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
        setattr(op, name, _direct_accessor(member))
    return op


@dataclass(frozen=True)
class _SingleAccessor(BeforeVariadicSingleAccessor):
    """Reads one operand or result directly from the op's field."""

    field: str

    def __get__(self, obj: Operation, objtype: type | None = None) -> SSAValue:
        return tuple.__getitem__(getattr(obj, self.field), self.idx)


@dataclass(frozen=True)
class _AllAccessor(UniqueVariadicAccessor):
    """Reads all operands or results directly from the op's field."""

    field: str

    def __get__(self, obj: Operation, objtype: type | None = None) -> SSAValues:
        return getattr(obj, self.field)


_FIELDS = {VarIRConstruct.OPERAND: OPERANDS, VarIRConstruct.RESULT: "results"}


def _direct_accessor(member: Any) -> Any:
    """Return the direct accessor in place of xDSL's; other members of an op's class unchanged."""
    field = _FIELDS.get(member.construct) if isinstance(member, BaseAccessor) else None
    if field is None:
        return member
    if type(member) is BeforeVariadicSingleAccessor:
        return _SingleAccessor(member.construct, member.idx, field)
    if type(member) is UniqueVariadicAccessor and member.num_defs == 1:
        return _AllAccessor(member.construct, member.idx, member.num_defs, field)
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
    """Return a new op, in half the time of xDSL's `create`, which also sets fields that most ops
    lack and looks for defaults."""
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
    """Return the method that verifies an op by its definition, then by its class's own method."""

    @cache
    def is_flat() -> bool:
        """Whether the definition constrains types, properties and attributes only."""
        verifying = [t for t in definition.traits if type(t).verify is not OpTrait.verify]
        return not (verifying or definition.regions or definition.successors)

    def verify_all(self: IRDLOperation) -> None:
        defined.of_op(self, lambda: definition.verify(self), marks=True)
        own(self)

    def verify_(self: IRDLOperation) -> None:
        if self.regions or successors_of(self) or not is_flat():
            definition.verify(self)
            own(self)
            return
        here = verified_signatures() if own in _by_signature else None
        if here is None:
            verify_all(self)
        else:
            here.of_op(self, lambda: verify_all(self), marks=True)

    return verify_


_by_signature = set[Callable[[Any], None]]()


def by_signature(own: Callable[[Any], None]) -> Callable[[Any], None]:
    """Mark a verifier that depends on types, properties and symbols only: while symbols are fixed,
    it runs once per signature."""
    _by_signature.add(own)
    return own


defined = SignatureMemo()
"""The signatures of ops that satisfy their definitions."""


@cache
def format_of(op: type[IRDLOperation]) -> FormatProgram:
    """Return the parsed assembly format of an op that has one.

    Raises:
        ParseError: the format is malformed.
    """
    definition = op.get_irdl_definition()
    assert definition.assembly_format is not None
    return FormatProgram.from_str(definition.assembly_format, definition)


def _parse(op: type[IRDLOperation], parser: Parser) -> IRDLOperation:
    return format_of(op).parse(parser, op)


def _print(self: IRDLOperation, printer: Printer) -> None:
    format_of(type(self)).print(printer, self)
