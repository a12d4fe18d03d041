"""Lark rules for ops, made from the `assembly_format` that each op declares.

One declaration serves xDSL's printer, xDSL's parser and this rule. Each directive becomes a piece
of a rule and one setter for each child that the piece yields; `[...]` always yields its children
(None if absent), so that the index of a child identifies it. Ops with equal formats share a rule: a
dialect with a hundred ops has a dozen rules. The types at the end of a format may be omitted in the
text (omitted.py).
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import xdsl.irdl.declarative_assembly_format as fmt
from xdsl.context import Context
from xdsl.dialects.builtin import DenseArrayBase, StringAttr, UnitAttr, i32
from xdsl.dialects.utils.enum_attribute import EnumAttribute
from xdsl.ir import Attribute, Block, Operation, ParametrizedAttribute, Region, SSAValue
from xdsl.irdl import (
    AttrSizedOperandSegments,
    AttrSizedRegionSegments,
    AttrSizedResultSegments,
    IRDLOperation,
    VerificationContext,
)
from xdsl.irdl.declarative_assembly_format import ParsingState
from xdsl.irdl.operations import AttrSizedSegments
from xdsl.parser import AttrParser
from xdsl.utils.exceptions import ParseError, VerifyException

from shardir.compat.xdsl import LISTS, state_at
from shardir.diagnostics import ShardirError
from shardir.dialects.definition import format_of
from shardir.dialects.signatures import Memo
from shardir.grammar.machine import Token
from shardir.syntax.omitted import infer_results, split
from shardir.syntax.parts import share_out

HANDWRITTEN = {"builtin.module": "MODULE", "func.func": "FUNC"}
"""The terminals of ops whose rules are in mlir.lark."""

Setter = Callable[[ParsingState, Any], None]
RulePiece = tuple[str, list[Setter]]
TypeLists = Sequence[Sequence[Attribute]]


def has_format(op: type[Operation]) -> bool:
    """Whether an op has an `assembly_format`."""
    return issubclass(op, IRDLOperation) and op.get_irdl_definition().assembly_format is not None


class MisfitError(ShardirError):
    """The children of a rule do not fit the op; `at` is the token of the error, if any."""

    def __init__(self, message: str, at: Token | None = None):
        super().__init__(message)
        self.at = at


class Rules:
    """Helper rules that formats share, by text."""

    def __init__(self, read: "Reader"):
        self.read = read
        self.names: dict[str, str] = {}

    def name(self, prefix: str, text: str) -> str:
        return self.names.setdefault(text, f"{prefix}_{len(self.names)}")


class Reader(Protocol):
    """The parser's interface for formats: converts tokens to values, with located errors."""

    def body(self, base: type[Attribute], t: Token) -> Attribute: ...
    def typed(self, base: type[Any], type: Attribute, t: Token) -> Attribute: ...
    def array(self, element: Any, t: Token) -> Attribute: ...
    def symbol(self, t: Token) -> str: ...
    def defined(self, t: Token) -> SSAValue: ...
    def block_named(self, t: Token) -> Block: ...


def piece(
    d: fmt.FormatDirective, rules: Rules, *, first: bool = False, last: bool = False
) -> RulePiece:
    """Return the rule of a directive. The `first` directive of an optional group, or its anchor, is
    never empty. At the end of the `last` directive, types may be omitted."""

    def maybe(text: str) -> str:
        return text if first else f"[{text}]"

    read = rules.read
    match d:
        case fmt.WhitespaceDirective():
            return "", []
        case fmt.PunctuationDirective(text) | fmt.KeywordDirective(text):
            return f'"{text}"', []
        case fmt.OperandVariable():
            return "SSA_ID", [d.set]
        case fmt.OptionalOperandVariable():
            return maybe("SSA_ID"), [d.set]
        case fmt.VariadicOperandVariable():
            return maybe("operands"), [lambda s, v: d.set(s, v or ())]
        case fmt.OperandsDirective():
            return maybe("operands"), [lambda s, v: set_operands(d, s, v or ())]
        case fmt.TypeDirective(inner) if isinstance(inner, fmt.OptionalVariable):
            return maybe("type"), [lambda s, v: d.set(s, () if v is None else (v,))]
        case fmt.TypeDirective(inner) if isinstance(inner, LISTS):
            return maybe("types"), [lambda s, v: d.set(s, v or ())]
        case fmt.TypeDirective():
            return "type", [lambda s, v: d.set(s, (v,))]
        case fmt.FunctionalTypeDirective():

            def set_types(s: ParsingState, v: Any) -> None:
                set_side(d.operand_typeable_directive, s, v.inputs.data, "operand")
                set_side(d.result_typeable_directive, s, v.outputs.data, "result")

            return "FN_TYPE", [set_types]
        case fmt.AttrDictDirective():
            keyword = '"attributes" ' if d.with_keyword else ""
            return maybe(f"{keyword}BRACES"), [lambda s, v: set_dict(d, s, v)]
        case fmt.RegionVariable():
            return "region", [d.set]
        case fmt.OptionalRegionVariable():
            return maybe("region"), [d.set]
        case fmt.VariadicRegionVariable():
            # xDSL prints commas from 0.75 on
            many = 'region (","? region)*'
            return rules.name("many", many if first else f"({many})?"), [d.set]
        case fmt.SuccessorVariable():
            return "BLOCK_ID", [lambda s, t: d.set(s, read.block_named(t))]
        case fmt.OptionalSuccessorVariable():
            return maybe("BLOCK_ID"), [lambda s, t: d.set(s, t and read.block_named(t))]
        case fmt.VariadicSuccessorVariable():
            return maybe("successors"), [lambda s, v: d.set(s, v or ())]
        case fmt.OptionalUnitAttrVariable():
            return "", []  # its group sets it
        case fmt.SymbolNameAttributeVariable():
            return optional(d, "SYMBOL", first), [setter(d, lambda t: StringAttr(read.symbol(t)))]
        case fmt.DenseArrayAttributeVariable():
            return optional(d, "SQUARES", first), [setter(d, lambda t: read.array(d.elt_type, t))]
        case fmt.TypedAttributeVariable():
            token = "DENSE" if "dense" in d.unique_base.name else "NUMBER"
            return token, [setter(d, lambda t: read.typed(d.unique_base, d.unique_type, t))]
        case fmt.UniqueBaseAttributeVariable() if is_word(d.unique_base):
            base: Any = d.unique_base
            words = {str(w.value): base(w) for w in base.enum_type}
            rule = rules.name("word", " | ".join(f'"{w}"' for w in sorted(words)))
            return rule, [setter(d, lambda c: words[c[0].value])]
        case fmt.UniqueBaseAttributeVariable() if is_in_angles(d.unique_base):
            return "ANGLES", [setter(d, lambda t: read.body(d.unique_base, t))]
        case fmt.AttributeVariable() if not isinstance(d, fmt.UniqueBaseAttributeVariable):
            return optional(d, "ATTR", first), [setter(d, lambda v: v)]
        case fmt.OptionalGroupDirective():
            return group(d, rules, last)
        case _:
            raise NotImplementedError(f"no Lark rule for {type(d).__name__}")


def is_word(base: type[Attribute]) -> bool:
    """Whether an attribute is written as one of the words of an enumeration."""
    parse: Any = EnumAttribute.parse_parameter
    return issubclass(base, EnumAttribute) and base.parse_parameter.__func__ is parse.__func__


@cache
def is_in_angles(base: Any) -> bool:
    """Whether what is written of an attribute has to begin with `<`."""
    parse = (
        base.parse_parameters if issubclass(base, ParametrizedAttribute) else base.parse_parameter
    )
    try:
        parse(AttrParser(state_at("0", 0), Context()))
    except ParseError as e:
        return "'<'" in e.msg
    return False


def optional(d: fmt.AttributeVariable, token: str, first: bool) -> str:
    return f"[{token}]" if d.is_optional and not first else token


def setter(d: fmt.AttributeVariable, read: Callable[[Any], Attribute]) -> Setter:
    def set_attribute(s: ParsingState, v: Any) -> None:
        if v is not None:
            d.set(s, read(v))

    return set_attribute


def group(d: fmt.OptionalGroupDirective, rules: Rules, last: bool) -> RulePiece:
    """`(...)?` becomes a rule of its own, which records the presence of a group of keywords."""
    texts, then_setters = sequence(
        (d.then_first, *d.then_elements), rules, first=True, anchor=d.anchor, last=last
    )
    else_text, else_setters = sequence(d.else_elements, rules)
    name = rules.name("group", texts)
    units = [e for e in d.then_elements if isinstance(e, fmt.OptionalUnitAttrVariable)]

    def set_group(s: ParsingState, v: Any) -> None:
        if v is not None:
            apply(then_setters, s, v)
            for unit in units:
                unit.set(s, UnitAttr())
            for e in d.else_elements:
                e.set_empty(s)
        else:
            for e in (d.then_first, *d.then_elements):
                if not isinstance(e, fmt.OptionalUnitAttrVariable):
                    e.set_empty(s)

    if not d.else_elements:
        return f"[{name}]", [set_group]
    else_name = rules.name("group", else_text)

    def set_either(s: ParsingState, v: Any) -> None:
        is_then, children = v
        if is_then:
            set_group(s, children)
        else:
            set_group(s, None)
            apply(else_setters, s, children)

    either = rules.name("either", f"{name} -> then_part | {else_name} -> else_part")
    return either, [set_either]


def apply(setters: Sequence[Setter], s: ParsingState, children: Sequence[Any]) -> None:
    for f, child in zip(setters, children, strict=True):
        f(s, child)


def sequence(
    directives: Sequence[fmt.FormatDirective],
    rules: Rules,
    *,
    first: bool = False,
    anchor: object = None,
    last: bool = False,
) -> RulePiece:
    """Return the rule of a list of directives. A group is present if its `anchor` is. The `last`
    directives of a format may end with types that can be omitted."""
    texts: list[str] = []
    setters: list[Setter] = []
    head, types = split(directives) if last else (directives, None)
    for d in head:
        text, piece_setters = piece(
            d, rules, first=first or d is anchor, last=last and d is head[-1]
        )
        first = first and isinstance(d, fmt.WhitespaceDirective)
        texts.append(text)
        setters += piece_setters
    if types is not None:
        text, piece_setters = omissible(types, rules)
        texts.append(text)
        setters += piece_setters
    return " ".join(t for t in texts if t), setters


def omissible(d: fmt.FunctionalTypeDirective | fmt.TypeDirective, rules: Rules) -> RulePiece:
    """Return the rule of optional types after a `:`. If the types of operands are omitted, those of
    results may still follow an arrow."""
    text, (set_types,) = piece(d, rules, first=True)

    def set_given(s: Any, v: Any) -> None:
        if v is not None and not isinstance(v, list):
            set_types(s, v)
            return
        s.untyped = True
        if isinstance(d, fmt.FunctionalTypeDirective):
            s.results, s.arrow = d.result_typeable_directive, v

    if isinstance(d, fmt.FunctionalTypeDirective):
        return f'(":" {text} | no_operand_types)', [set_given]
    return f'[":" {text}]', [lambda s, v: set_types(s, v) if v else setattr(s, "untyped", True)]


def set_operands(d: fmt.OperandsDirective, s: ParsingState, tokens: Sequence[Any]) -> None:
    try:
        share_out(d, s.op_type, s.operands, "operand", tokens)
    except VerifyException as e:
        raise MisfitError(str(e), tokens[0] if tokens else None) from None


def set_side(
    side: fmt.TypeableDirective, s: ParsingState, types: Sequence[Attribute], what: str
) -> None:
    single = not isinstance(side, (*LISTS, fmt.OptionalVariable))
    if single and len(types) != 1:
        raise MisfitError(f"expected 1 {what} type, got {len(types)}")
    if isinstance(side, fmt.OptionalVariable) and len(types) > 1:
        raise MisfitError(f"expected at most 1 {what} type, got {len(types)}")
    try:
        if isinstance(side, fmt.OperandsDirective):
            share_out(side, s.op_type, s.operand_types, "operand type", types)
        elif isinstance(side, fmt.ResultsDirective):
            share_out(side, s.op_type, s.result_types, "result type", types)
        else:
            side.set_types(s, types)
    except VerifyException as e:
        raise MisfitError(str(e)) from None


def set_dict(d: fmt.AttrDictDirective, s: ParsingState, v: dict[str, Attribute] | None) -> None:
    if not v:
        return
    if twice := sorted(d.reserved_attr_names & v.keys()):
        raise MisfitError(
            f"attribute {twice[0]} has its own place in the syntax of {s.op_type.name}"
        )
    for name, value in v.items():
        (s.properties if name in d.expected_properties else s.attributes)[name] = value


class OpParts(ParsingState):
    """xDSL's record of a parsed op, made from known lengths."""

    def __init__(self, f: "OpFormat"):
        self.op_type = f.op
        self.operands = [None] * f.operands
        self.operand_types = [None] * f.operands
        self.result_types = [None] * f.results
        self.regions = [None] * f.regions
        self.successors = [None] * f.successors
        self.attributes = {}
        self.properties = {}
        self.untyped = False
        """Whether the types of operands are omitted."""
        self.results: fmt.TypeableDirective | None = None
        """The results whose types are omitted too, or follow an arrow."""
        self.arrow: list[Attribute] | None = None
        """The types after an arrow, if there is one."""


class OpFormats(dict[str, "OpFormat"]):
    """The formats of ops by name, each made at its first use."""

    def __init__(self, ops: dict[str, type[IRDLOperation]], read: Reader):
        super().__init__()
        self.ops, self.read = ops, read

    def __missing__(self, name: str) -> "OpFormat":
        op_format = self[name] = OpFormat(self.ops[name], Rules(self.read))
        return op_format


class OpFormat:
    """The construction of one op from the children of its rule."""

    def __init__(self, op: type[IRDLOperation], rules: Rules):
        self.op = op
        self.op_def = op.get_irdl_definition()
        self.program = format_of(op)
        self.rhs, self.setters = sequence(self.program.stmts, rules, last=True)
        self.operands, self.results = len(self.op_def.operands), len(self.op_def.results)
        self.regions, self.successors = len(self.op_def.regions), len(self.op_def.successors)
        self.segments = [o for o in self.op_def.options if isinstance(o, AttrSizedSegments)]
        self.inferred = Memo()

    def types(self, s: OpParts) -> tuple[TypeLists, TypeLists]:
        """Return the types of operands and results. Missing types are inferred; cached."""
        if None not in s.operand_types and None not in s.result_types:
            return s.operand_types, s.result_types  # type: ignore[return-value] - no None
        known_types = [t for ts in (*s.operand_types, *s.result_types) for t in (ts or (None,))]
        keyed = [*known_types, *s.properties.values(), *s.attributes.values()]
        key = (
            tuple(map(id, keyed)), tuple(s.properties), tuple(s.attributes),
            tuple(-1 if o is None else len(o) for o in s.operands),
            tuple(-1 if t is None else len(t) for t in (*s.operand_types, *s.result_types)),
        )  # fmt: skip
        if (types := self.inferred.get(key)) is None:
            s.context = VerificationContext()
            try:
                self.program.resolve_constraint_variables(s, self.op_def)
                operands = self.program.resolve_operand_types(s, self.op_def)
                results = self.program.resolve_result_types(s, self.op_def)
            except (VerifyException, ValueError, KeyError) as e:
                raise MisfitError(str(e)) from None
            if len(self.inferred) > 10_000:
                self.inferred.clear()
            types = self.inferred[key] = operands, results, keyed
        return types[0], types[1]

    def complete(self, s: OpParts, read: Reader) -> None:
        """Set omitted types from the definitions of the operands.

        Raises:
            MisfitError: an operand is not defined before, or the result types do not follow.
            ShardirError: the operands do not fit.
        """
        tokens: Sequence[Any] = s.operands
        types = [[read.defined(t).type for t in segment or ()] for segment in tokens]
        s.operand_types = [*types]
        if s.results is not None:
            results = s.arrow
            if results is None:
                results = infer_results(self.op, [t for ts in types for t in ts], s.properties)
            if results is None:
                raise MisfitError(
                    f"expected the result types of {self.op.name}, which do not follow from its "
                    "operands, got none; write them after `->`"
                )
            set_side(s.results, s, results, "result")

    def segment_sizes(self, s: OpParts) -> None:
        """Set the attributes with the segment sizes of operands, results, regions and
        successors."""
        for option in self.segments:
            if isinstance(option, AttrSizedOperandSegments):
                parts: Sequence[Any] = s.operands
            elif isinstance(option, AttrSizedResultSegments):
                parts = s.result_types
            elif isinstance(option, AttrSizedRegionSegments):
                parts = s.regions
            else:
                parts = s.successors
            sizes = DenseArrayBase.from_list(i32, [len(p or ()) for p in parts])
            (s.properties if option.as_property else s.attributes)[option.attribute_name] = sizes

    def make(
        self, s: OpParts, operands: Sequence[SSAValue], results: Sequence[Attribute], location: Any
    ) -> Operation:
        if self.segments:
            self.segment_sizes(s)
        regions: list[Region] = [r for rs in s.regions for r in (rs or ())]
        successors: list[Block] = [b for bs in s.successors for b in (bs or ())]
        return self.op.create(
            operands=operands, result_types=results, properties=s.properties,
            attributes=s.attributes, location=location, successors=successors, regions=regions,
        )  # fmt: skip
