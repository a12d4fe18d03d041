"""Module -> text: xDSL's printer, with cached attribute texts and aliases for layouts.

    #layout0 = #dist.layout<@m, [{dp}, {}]>
    ...
    %y = nn.relu %x : (tensor<8x8xf32, #layout0>) -> tensor<8x8xf32, #layout0>

Our parser and xDSL's own parse the text to an equal module. Ops of other dialects, whose syntax our
parser does not know, are printed in the generic form.
"""

from collections import Counter
from collections.abc import Collection
from functools import cache
from io import StringIO
from typing import Any

from xdsl.dialects.builtin import ModuleOp, NoneAttr, TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Block, Operation, SSAValue
from xdsl.irdl import IRDLOperation
from xdsl.irdl.declarative_assembly_format import FunctionalTypeDirective

from shardir.compat.xdsl import NamingPrinter
from shardir.diagnostics import ShardirError
from shardir.dialects import DIALECTS
from shardir.syntax.formats import HANDWRITTEN, has_format
from shardir.syntax.omitted import infer_results, short_form

READ = {"builtin", "func", *DIALECTS}
"""The dialects whose syntax our parser reads."""


class FastPrinter(NamingPrinter):
    """xDSL's printer, with cached attribute texts and the names of the source."""

    def __init__(
        self, stream: StringIO, aliases: dict[Attribute, str] | None = None, *,
        short_types: bool = False, **options: Any,
    ):  # fmt: skip
        super().__init__(stream=stream, **options)
        # pyrefly: ignore[bad-override-mutable-attribute] - always a StringIO
        self.stream: StringIO = stream
        self.aliases = aliases or {}
        self.short_types = short_types
        self.texts: dict[int, tuple[Attribute, str]] = {}
        self.taken: set[str] = set()

    def print_string(self, text: str, *, indent: int | None = None) -> None:
        if "\n" in text:
            super().print_string(text, indent=indent)
        else:
            self.stream.write(text)

    def print_attribute(self, attribute: Attribute) -> None:
        if (entry := self.texts.get(id(attribute))) is None:
            text = self.aliases.get(attribute)
            if text is None:
                if self.printing_location:  # the text depends on the context
                    super().print_attribute(attribute)
                    return
                stream, self.stream = self.stream, StringIO()
                try:
                    super().print_attribute(attribute)
                    text = self.stream.getvalue()
                finally:
                    self.stream = stream
            entry = self.texts[id(attribute)] = attribute, text  # the reference keeps the id valid
        self.stream.write(entry[1])

    def print_ssa_value(self, value: SSAValue) -> str:
        if (name := self.names_of_values.get(value)) is None:
            name = self.names_of_values[value] = self.new_name(value.name_hint)
        self.stream.write(f"%{name}")
        return name

    def new_name(self, hint: str | None) -> str:
        """Return the value's own name if it is free, else the name with the next free number."""
        names = self.ssa_names
        if not hint:
            while (name := self.new_number()) in names:
                pass
        elif hint not in names:
            name = hint
        else:
            while (name := f"{hint}_{names[hint]}") in names:
                names[hint] += 1
            names[hint] += 1
        names[name] = 1
        return name

    def print_op(self, op: Operation) -> None:
        if isinstance(op, FuncOp) and op.is_declaration and op.res_attrs is not None:
            self.print_declaration(op)
        elif self.short_types and not self.print_generic_format and self.print_short(op):
            pass
        elif self.print_generic_format or reads(type(op)):
            super().print_op(op)
        else:
            self.print_generic_format = True
            super().print_op(op)
            self.print_generic_format = False

    def print_short(self, op: Operation) -> bool:
        """Print an op without types that follow from preceding definitions; return False if the op
        has no such form."""
        form = short_form(type(op)) if reads(type(op)) else None
        if form is None or any(v not in self.names_of_values for v in op.operands):
            return False
        program, types = form
        assert isinstance(op, IRDLOperation)
        self.print_results(op)
        self.print_string(op.name)
        program.print(self, op)
        if isinstance(types, FunctionalTypeDirective) and not results_are_inferred(op):
            self.print_string(" -> ")
            if len(op.results) == 1:
                self.print_attribute(op.results[0].type)
            else:
                with self.in_parens():
                    self.print_list(op.result_types, self.print_attribute)
        if self.print_debuginfo:
            self.print_string(" ")
            self.print_attribute(op.location)
        return True

    def print_declaration(self, op: FuncOp) -> None:
        """Print a declaration with attributes of results, which xDSL's printer drops."""
        if self.print_generic_format:
            super().print_op(op)
            return
        assert op.res_attrs is not None
        visibility = f" {op.sym_visibility.data}" if op.sym_visibility else ""
        self.print_string(f"func.func{visibility} ")
        self.print_symbol_name(op.sym_name.data)
        with self.in_parens():
            self.print_list(op.function_type.inputs, self.print_attribute)
        self.print_string(" -> ")
        with self.in_parens():
            for i, (type, attrs) in enumerate(
                zip(op.function_type.outputs, op.res_attrs, strict=True)
            ):
                self.print_string(", " if i else "")
                self.print_attribute(type)
                self.print_op_attributes(attrs.data)
        self.print_op_attributes(op.attributes, print_keyword=True)
        if self.print_debuginfo:
            self.print_string(" ")
            self.print_attribute(op.location)


@cache
def reads(op: type[Operation]) -> bool:
    """Whether our parser reads the custom syntax of an op."""
    dialect, _, _ = op.name.partition(".")
    return op.name in HANDWRITTEN or (dialect in READ and has_format(op))


def results_are_inferred(op: Operation) -> bool:
    """Whether the types of an op's results follow from its operands."""
    try:
        types = infer_results(type(op), [v.type for v in op.operands], op.properties)
    except ShardirError:
        return False
    return types == [*op.result_types]


def value_names(block: Block, without: Collection[Operation] = ()) -> dict[SSAValue, str]:
    """Return the names with which the values of a function are printed, in order, as if the ops of
    `without` were not there."""
    printer = FastPrinter(StringIO())
    values = [*block.args, *(v for op in block.ops if op not in without for v in op.results)]
    return {v: printer.new_name(v.name_hint) for v in values}


def encoding_aliases(module: Operation) -> dict[Attribute, str]:
    """Return a name for each tensor encoding of two values or more."""
    uses: Counter[int] = Counter()
    types: dict[int, Attribute] = {}
    for op in module.walk():
        values = [*op.results, *(a for r in op.regions for b in r.blocks for a in b.args)]
        for v in values:
            uses[id(v.type)] += 1
            types[id(v.type)] = v.type
    seen: Counter[Attribute] = Counter()
    for key, t in types.items():
        if isinstance(t, TensorType) and not isinstance(t.encoding, NoneAttr):
            seen[t.encoding] += uses[key]
    aliases: dict[Attribute, str] = {}
    numbers: Counter[str] = Counter()
    for encoding, n in seen.items():
        if n > 1:
            word = encoding.name.rpartition(".")[2]
            aliases[encoding] = f"#{word}{numbers[word]}"
            numbers[word] += 1
    return aliases


def print_module(
    module: ModuleOp,
    *,
    generic: bool = False,
    aliases: bool = True,
    locations: bool = False,
    short_types: bool = False,
    properties_as_attributes: bool = False,
) -> str:
    """Return the module's text, after a line for each layout that is used at least twice. With
    `short_types`, types that follow from the definitions of operands are omitted."""
    out = StringIO()
    names = encoding_aliases(module) if aliases else {}
    printer_without_aliases = FastPrinter(out)
    for attribute, name in names.items():
        out.write(f"{name} = ")
        printer_without_aliases.print_attribute(attribute)
        out.write("\n")
    printer = FastPrinter(
        out, names, print_generic_format=generic, print_debuginfo=locations,
        print_properties_as_attributes=properties_as_attributes, short_types=short_types,
    )  # fmt: skip
    printer.print_op(module)
    return out.getvalue() + "\n"
