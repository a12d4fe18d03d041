"""The reader of MLIR's generic form, with nothing installed but the core: a text as plain values.

    program = read_text('"builtin.module"() ({ "func.func"() <{sym_name = "main", ...', "x.mlir")

Our own parser reads the text: ops and attributes of StableHLO and Shardy are not registered, so
attributes keep their text, which this file reads.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.dialects.builtin import (
    ArrayAttr,
    Builtin,
    CallSiteLoc,
    DenseArrayBase,
    DenseIntOrFPElementsAttr,
    DictionaryAttr,
    FileLineColLoc,
    FloatAttr,
    FusedLoc,
    IntegerAttr,
    LocationAttr,
    NameLoc,
    NoneAttr,
    StringAttr,
    SymbolRefAttr,
    TensorType,
    UnitAttr,
    UnregisteredAttr,
    UnregisteredOp,
)
from xdsl.dialects.func import CallOp, Func, FuncOp, ReturnOp
from xdsl.ir import Attribute, Operation, Region, SSAValue
from xdsl.utils.exceptions import VerifyException

from shardir.build.function import PACKAGE, file_line
from shardir.diagnostics import Diagnostic, ParseErrors, ShardirError, did_you_mean
from shardir.dialects.blocks import ops_of
from shardir.dialects.locations import op_name
from shardir.frontends.stablehlo.form import (
    FIELDS,
    WORDS,
    HloBlock,
    HloFunction,
    HloOp,
    HloProgram,
    HloType,
    HloValue,
)
from shardir.syntax.dominance import check_dominance
from shardir.syntax.parser import IRParser
from shardir.syntax.source import Source
from shardir.syntax.spelling import LeafError
from shardir.syntax.verify import check_call, check_symbols

PRETTY = re.compile(
    r"^[^\S\n]*(?:%[\w$.:, %-]+=\s*)?((?:stablehlo|chlo|sdy|mhlo|vhlo)\.[\w.]+)", re.M | re.ASCII
)
"""An op of these dialects in its own form, at the start of a line."""

CONVOLUTION = re.compile(r"\s*\[([\w, ?]*)\]\s*x\s*\[([\w, ?]*)\]\s*->\s*\[([\w, ?]*)\]\s*")
"""`[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]`."""

LETTERS = {
    "input": {"b": "batch_dimension", "f": "feature_dimension"},
    "kernel": {"i": "input_feature_dimension", "o": "output_feature_dimension"},
    "output": {"b": "batch_dimension", "f": "feature_dimension"},
}
"""The dimensions of each tensor of a convolution that are not spatial."""

SPELLINGS = {"scatter_dims_to_operand_dims": "scattered_dims_to_operand_dims"}
"""Fields that have another name in the text."""

NUMPY: Mapping[Attribute, str] = {
    builtin.f16: "<f2", builtin.f32: "<f4", builtin.f64: "<f8", builtin.i1: "?",
    builtin.ComplexType(builtin.f32): "<c8", builtin.ComplexType(builtin.f64): "<c16",
}  # fmt: skip
"""The types whose numbers numpy reads as they are stored; and integers."""


def pretty_op(source: Source) -> Diagnostic | None:
    """Return an error at the first op of a text that is not in the generic form; None if there is
    none."""
    if (m := PRETTY.search(source.text)) is None:
        return None
    return source.at(
        m.start(1), m.end(1),
        f"expected ops in MLIR's generic form, got {m[1]}; print it by mlir-opt "
        "--mlir-print-op-generic, in JAX by lowered.compiler_ir().operation.get_asm("
        "print_generic_op_form=True, enable_debug_info=True), or pip install 'shardir[jax]', which "
        "reads this form too",
    )  # fmt: skip


@cache
def _parser() -> IRParser:
    ctx = Context(allow_unregistered=True)
    dialects = Builtin, Func
    for dialect in dialects:
        ctx.load_dialect(dialect)
    return IRParser(dialects, ctx)


def read_text(text: str, name: str = "<stablehlo>") -> HloProgram:
    """Read a text in the generic form; functions and modules may have their own form.

    Raises:
        ParseErrors: the text does not parse, or its ops do not fit; it has all errors.
    """
    source = Source(text, name)
    if (error := pretty_op(source)) is not None:
        raise ParseErrors([error])
    module = _parser().parse_source(source)
    return _TextReader(source).read(module)


def read_numbers(text: str) -> np.ndarray | None:
    """Return the numbers of a text, `dense<...> : tensor<2xbf16>`; None if they are no numbers.

    Raises:
        LeafError: it is not an attribute.
    """
    attr = _parser().parse_attribute(text)
    return _numbers(attr) if isinstance(attr, DenseIntOrFPElementsAttr) else None


class _TextReader:
    def __init__(self, source: Source):
        self.source = source
        self.errors: list[Diagnostic] = []
        self.values: dict[SSAValue, HloValue] = {}
        self.types: dict[int, HloType] = {}
        """The type of each attribute by its id: equal ones are mostly one object."""
        self.attributes: dict[int, Any] = {}
        """The plain value of each attribute by its id."""
        self.lines: dict[int, LocationAttr | None] = {}

    def read(self, module: builtin.ModuleOp) -> HloProgram:
        check_dominance(module, self.report)
        check_symbols(module, self.source, self.report)
        if self.errors:  # ops whose operands have no value can't be read
            raise ParseErrors(self.errors)
        program = HloProgram(attributes=self.named(module), is_verified=False)
        for op in ops_of(module.body.block):
            if isinstance(op, FuncOp):
                f = self.function(op)
                program.functions[f.name] = f
            elif op_name(op) == "sdy.mesh":
                attributes = self.named(op)
                missing = {"sym_name", "mesh"} - attributes.keys()
                if missing:
                    self.report(op, f"expected the attribute {min(missing)} of sdy.mesh, got none")
                else:
                    program.meshes[attributes["sym_name"]] = attributes["mesh"]
            else:
                program.others.append(self.op(op))
        if self.errors:
            raise ParseErrors(sorted(self.errors, key=lambda d: (d.line, d.column)))
        return program

    def report(self, op: Operation, message: str, *notes: str) -> None:
        self.errors.append(self.source.at_op(op, message, notes))

    def function(self, op: FuncOp) -> HloFunction:
        attributes = self.named(op)
        block = self.block(op, op.body)
        types = [a.type for a in op.body.block.args] if op.body.blocks else []
        if op.body.blocks and types != [*op.function_type.inputs]:
            self.report(op, "expected arguments of the types of the function, got others")
        arguments = attributes.get("arg_attrs") or [{} for _ in op.function_type.inputs]
        results = attributes.get("res_attrs") or [{} for _ in op.function_type.outputs]
        return HloFunction(attributes["sym_name"], block, arguments, results)

    def block(self, op: Operation, region: Region) -> HloBlock:
        """Return the block of a region of an op."""
        if not region.blocks:
            return HloBlock((), ())
        block, *others = region.blocks
        if others:
            self.report(op, f"expected one block in a region, got {len(others) + 1}")
            return HloBlock((), ())
        arguments = [HloValue(self.type(a.type), _name(a.location)) for a in block.args]
        self.values.update(zip(block.args, arguments, strict=True))
        ops = [self.op(o) for o in ops_of(block)]
        last = block.last_op
        if last is None or not op_name(last).endswith(".return"):
            got = "none" if last is None else op_name(last)
            self.report(last or op, f"expected a return at the end of a region, got {got}")
        return HloBlock(arguments, ops)

    def op(self, op: Operation) -> HloOp:
        if isinstance(op, CallOp | ReturnOp):
            try:
                check_call(op) if isinstance(op, CallOp) else op.verify_()
            except (VerifyException, ValueError) as error:  # or a module of several blocks
                self.report(op, str(error))
        operands = [self.values[v] for v in op.operands]
        results = [HloValue(self.type(r.type)) for r in op.results]
        self.values.update(zip(op.results, results, strict=True))
        regions = [self.block(op, r) for r in op.regions]
        if (at := id(op.location)) not in self.lines:
            self.lines[at] = _line(op.location)
        return HloOp(op_name(op), operands, results, self.named(op), regions, self.lines[at])

    def type(self, t: Attribute) -> HloType:
        if (read := self.types.get(id(t))) is None:
            read = self.types[id(t)] = _type(t)
        return read

    def named(self, op: Operation) -> dict[str, Any]:
        """Return the plain values of the attributes and properties of an op."""
        read: dict[str, Any] = {}
        cached = self.attributes
        for of in (op.properties, op.attributes):
            for name, attr in of.items():
                if name == "op_name__" and isinstance(op, UnregisteredOp):
                    continue
                if (value := cached.get(id(attr), self)) is self:
                    try:
                        value = cached[id(attr)] = _attribute(attr)
                    except (LeafError, ShardirError) as error:
                        self.report(op, f"attribute {name}: {error}")
                        value = None
                read[name] = value
        return read


def _attribute(attr: Any) -> Any:
    """Return the plain value of an attribute; its text if it has no other. Raises ShardirError."""
    match attr:
        case UnregisteredAttr():
            return _unregistered(attr)
        case IntegerAttr():
            value = attr.value.data
            return bool(value) if attr.type == builtin.i1 else value
        case FloatAttr():
            return attr.value.data
        case StringAttr():
            return attr.data
        case SymbolRefAttr() if not attr.nested_references.data:
            return attr.root_reference.data
        case UnitAttr():
            return None
        case ArrayAttr():
            return [_attribute(a) for a in attr]
        case DictionaryAttr():
            return {name: _attribute(a) for name, a in attr.data.items()}
        case DenseArrayBase():
            is_bool = attr.elt_type == builtin.i1
            return tuple(bool(x) if is_bool else x for x in attr.get_values())
        case DenseIntOrFPElementsAttr():
            numbers = _numbers(attr)
            return str(attr) if numbers is None else numbers
    return str(attr)


def _unregistered(attr: UnregisteredAttr) -> Any:
    """Return the fields of an attribute of StableHLO, or its word; the text of others."""
    dialect, _, name = attr.attr_name.data.partition(".")
    if dialect != "stablehlo" or attr.is_type.data:
        return str(attr)
    if name in WORDS:
        return attr.value.data.strip()
    if name == "conv":
        return _convolution(attr.value.data)
    if name in FIELDS:
        return _fields(name, attr.value.data)
    return str(attr)


def _fields(name: str, text: str) -> dict[str, Any]:
    """Return the fields of a text, `offset_dims = [1], index_vector_dim = 1`; those that are left
    out are empty, or 0. Raises ShardirError."""
    known = FIELDS[name]
    fields: dict[str, Any] = {n: 0 if n == "index_vector_dim" else () for n in known}
    for spelled, value in _attribute(_parser().parse_attribute(f"{{{text}}}")).items():
        field = SPELLINGS.get(spelled, spelled)
        if field not in known:
            raise ShardirError(
                f"expected a field of #stablehlo.{name}, got {spelled}{did_you_mean(field, known)}"
            )
        if isinstance(fields[field], int) != isinstance(value, int):
            raise ShardirError(f"expected numbers of {spelled}, got {value}")
        fields[field] = value if isinstance(value, int) else tuple(value)
    return fields


def _convolution(text: str) -> dict[str, Any]:
    """Return the dimensions of a convolution. Raises ShardirError."""
    if (m := CONVOLUTION.fullmatch(text)) is None:
        raise ShardirError(f"expected dimensions as in [b, 0, f]x[0, i, o]->[b, 0, f], got {text}")
    fields: dict[str, Any] = {}
    for tensor, dims in zip(LETTERS, m.groups(), strict=True):
        letters, entries = LETTERS[tensor], [d.strip() for d in dims.split(",")]
        count = len(entries) - len(letters)
        if sorted(entries) != sorted([*letters, *map(str, range(count))]):
            raise ShardirError(f"expected {', '.join(letters)} and 0 to {count - 1}, got [{dims}]")
        fields |= {f"{tensor}_{name}": entries.index(x) for x, name in letters.items()}
        spatial = tuple(entries.index(str(d)) for d in range(count))
        fields[f"{tensor}_spatial_dimensions"] = spatial
    return fields


def _numbers(attr: Any) -> np.ndarray:
    """Return the numbers of a dense attribute."""
    element, data = attr.get_element_type(), attr.data.data
    shape = tuple(attr.get_shape())
    if (dtype := NUMPY.get(element)) is not None and element != builtin.i1:
        stored = np.frombuffer(data, dtype)
    else:
        stored = np.array(attr.get_values(), _dtype(element))
    if stored.size and attr.is_splat():
        return np.full(shape, stored.flat[0].item())
    return stored.reshape(shape)


def _dtype(element: Any) -> Any:
    """Return the type of numpy for numbers that are not stored as numpy has them."""
    if not isinstance(element, builtin.IntegerType):
        return np.float32
    if element == builtin.i1:
        return np.bool_
    unsigned = element.signedness.data is builtin.Signedness.UNSIGNED
    bits = max(8, 1 << (element.width.data - 1).bit_length())
    return np.dtype(f"{'u' if unsigned else ''}int{bits}")


def _type(t: Attribute) -> HloType:
    if not isinstance(t, TensorType):
        return HloType((), str(t), f"{t} is no tensor")
    element = str(t.element_type)
    if builtin.DYNAMIC_INDEX in t.get_shape():
        return HloType((), element, f"{t} has a dynamic shape")
    problem = "" if t.encoding == NoneAttr() else f"{t} has an encoding"
    return HloType(t.get_shape(), element, problem)


def _name(location: Any) -> str:
    return location.desc.data if isinstance(location, NameLoc) else ""


def _line(location: Any) -> LocationAttr | None:
    """Return the innermost line of a source within a location."""
    match location:
        case FileLineColLoc():
            file = location.filename.data
            # a line of ours traced the function
            return None if file.startswith(PACKAGE) else file_line(file, location.line.data)
        case NameLoc():
            return _line(location.location)
        case CallSiteLoc():
            return _line(location.callee) or _line(location.caller)
        case FusedLoc():
            inner: Any = location.locations
            return next((l for x in inner if (l := _line(x))), None)
    return None
