"""The reader of jaxlib's bindings: a module of theirs, or a text, as plain values."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, func, sdy, stablehlo
from xdsl.dialects.builtin import LocationAttr

from shardir.build.function import PACKAGE, file_line
from shardir.diagnostics import Diagnostic, ParseErrors
from shardir.frontends.stablehlo.complexes import is_lowered
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
from shardir.frontends.stablehlo.generic import read_numbers
from shardir.frontends.stablehlo.ops import TABLE
from shardir.syntax.source import Source

DIMENSIONS: Mapping[Any, tuple[str, ...]] = {
    getattr(stablehlo, f"{name.capitalize()}DimensionNumbers"): fields
    for name, fields in FIELDS.items()
}
"""The fields of each class of StableHLO's attributes."""

ENUMERATIONS = tuple(getattr(stablehlo, f"{name.title().replace('_', '')}Attr") for name in WORDS)

ARRAYS = (
    ir.DenseI64ArrayAttr, ir.DenseI32ArrayAttr, ir.DenseI16ArrayAttr, ir.DenseI8ArrayAttr,
    ir.DenseBoolArrayAttr, ir.DenseF32ArrayAttr, ir.DenseF64ArrayAttr,
)  # fmt: skip

EXPANSION = "builtin.module(func.func(chlo-legalize-to-stablehlo,stablehlo-complex-math-expander))"
"""The passes of StableHLO that write a function as a computation of simpler ones."""

stablehlo.register_stablehlo_passes()


def read_text(text: str, name: str = "<stablehlo>") -> HloProgram:
    """Read a text, in MLIR's generic form or in the pretty forms of StableHLO and Shardy.

    Raises:
        ParseErrors: the text does not parse, or its ops do not fit.
    """
    context = ir.Context()
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context.append_dialect_registry(registry)
    for dialect in (stablehlo, chlo, sdy):
        dialect.register_dialect(context)  # others are loaded where the text names them
    try:
        module = ir.Module.parse(text, context)
    except ir.MLIRError as error:
        source = Source(text, name)
        errors = [_diagnostic(d, source) for d in error.error_diagnostics]
        of_lines = {d.location: d for d in reversed(errors)}  # an op fails for each of its reasons
        raise ParseErrors([*reversed(of_lines.values())]) from None
    with module.context:
        return _ModuleReader(name).program(module)


def _diagnostic(error: ir.DiagnosticInfo, source: Source) -> Diagnostic:
    """Return an error of MLIR with its place in the text, which MLIR calls `-`."""
    message = f"expected a module of StableHLO, got: {error.message}"
    if (m := re.match(r'loc\("-":(\d+):(\d+)', str(error.location))) is None:
        return Diagnostic(message, source.name)
    start = source.starts[int(m[1]) - 1] + int(m[2]) - 1
    return source.at(start, start + 1, message)


def read_module(module: ir.Module) -> HloProgram:
    """Read a module, such as `jax.jit(f).lower(...).compiler_ir()`."""
    with module.context:
        return _ModuleReader().program(module)


class _ModuleReader:
    def __init__(self, name: str = "-"):
        self.name = name
        self.values: dict[Any, HloValue] = {}
        self.expansions: dict[str, HloFunction | None] = {}

    def program(self, module: ir.Module) -> HloProgram:
        program = HloProgram(attributes=_attributes(module.operation))
        for view in module.body.operations:
            op = view.operation
            match op.name:
                case "func.func":
                    f = self.function(op)
                    program.functions[f.name] = f
                case "sdy.mesh":
                    program.meshes[ir.StringAttr(op.attributes["sym_name"]).value] = str(
                        op.attributes["mesh"]
                    )
                case _:
                    program.others.append(self.op(op))
        program.functions.update({f.name: f for f in self.expansions.values() if f is not None})
        return program

    def function(self, op: ir.Operation) -> HloFunction:
        attributes = _attributes(op)
        block = self.block(op.regions[0])
        arguments = attributes.get("arg_attrs") or [{} for _ in block.arguments]
        results = attributes.get("res_attrs") or [{} for _ in block.results]
        return HloFunction(attributes["sym_name"], block, arguments, results)

    def block(self, region: ir.Region) -> HloBlock:
        if len(region.blocks) == 0:
            return HloBlock((), ())
        block = region.blocks[0]
        arguments = [HloValue(_type(a.type), _name(a.location)) for a in block.arguments]
        self.values.update(zip(block.arguments, arguments, strict=True))
        return HloBlock(arguments, [self.op(o.operation) for o in block.operations])

    def op(self, op: ir.Operation) -> HloOp:
        operands = [self.values[v] for v in op.operands]
        results = [HloValue(_type(r.type)) for r in op.results]
        self.values.update(zip(op.results, results, strict=True))
        regions = [self.block(r) for r in op.regions]
        line = _line(op.location, self.name)
        elements = {v.type.element for v in (*operands, *results)}
        if (
            _needs_expansion(op.name, elements)
            and not regions
            and (f := self.expansion(op)) is not None
        ):
            return HloOp("func.call", operands, results, {"callee": f.name}, (), line)
        return HloOp(op.name, operands, results, _attributes(op), regions, line)

    def expansion(self, op: ir.Operation) -> HloFunction | None:
        """Return a function that computes an op by simpler ones, as StableHLO's passes write it;
        None if they do not."""
        types = [[v.type for v in values] for values in (op.operands, op.results)]
        attributes = {name: op.attributes[name] for name in op.attributes}
        key = f"{op.name} {types} {attributes}"
        if key not in self.expansions:
            with ir.Location.unknown(op.context):
                module = ir.Module.create()
                with ir.InsertionPoint(module.body):
                    f = func.FuncOp(f"{op.name}_{len(self.expansions)}", tuple(types))
                block = f.add_entry_block()
                with ir.InsertionPoint(block):
                    simple = ir.Operation.create(
                        op.name, types[1], list(block.arguments), attributes
                    )
                    func.ReturnOp(simple.results)
                with suppress(ir.MLIRError):  # the import refuses what the passes do not know
                    passmanager.PassManager.parse(EXPANSION).run(module.operation)
                is_same = op.name in [
                    o.operation.name for o in block.operations if _is_of(o, types)
                ]
            self.expansions[key] = None if is_same else self.function(f.operation)
        return self.expansions[key]


def _is_of(view: Any, types: Sequence[Sequence[ir.Type]]) -> bool:
    """Whether an op has operands and results of these types."""
    op = view.operation
    return [[v.type for v in values] for values in (op.operands, op.results)] == types


def _needs_expansion(name: str, elements: Collection[str]) -> bool:
    """Whether the importer has no entry for an op: a function of CHLO, or of complex numbers."""
    if any(e.startswith("complex") for e in elements):
        return name.startswith(("chlo.", "stablehlo.")) and not is_lowered(name)
    return name.startswith("chlo.") and name not in TABLE


def _attributes(op: ir.Operation) -> dict[str, Any]:
    if op.name == "stablehlo.constant" and "complex<" in str(op.results[0].type):
        text = str(op)  # jaxlib has no class for complex numbers
        return {"value": read_numbers(text[text.index("dense") :])}
    return {name: _attribute(op.attributes[name]) for name in op.attributes}


def _attribute(attr: Any) -> Any:
    """Return the plain value of an attribute; its text if it has no other."""
    reader = READERS.get(type(attr))
    if reader is not None:
        return reader(attr)
    for kind, fields in DIMENSIONS.items():
        if kind.isinstance(attr):
            read = kind(attr)
            values = {name: getattr(read, name) for name in fields}
            return {n: v if isinstance(v, int) else tuple(v) for n, v in values.items()}
    for word in ENUMERATIONS:
        if word.isinstance(attr):
            return word(attr).value
    return str(attr)


def _numbers(attr: Any) -> Any:
    """Return the numbers of a dense attribute as an array. The bindings do not read bf16."""
    shape = tuple(attr.type.shape)
    try:
        if attr.is_splat:
            return np.full(shape, attr.get_splat_value().value)
        return np.array(attr).reshape(shape)
    except TypeError:
        return read_numbers(str(attr))


READERS: Mapping[Any, Callable[[Any], Any]] = {
    ir.IntegerAttr: lambda a: a.value,
    ir.BoolAttr: lambda a: a.value,
    ir.FloatAttr: lambda a: a.value,
    ir.StringAttr: lambda a: a.value,
    ir.FlatSymbolRefAttr: lambda a: a.value,
    ir.TypeAttr: str,
    ir.UnitAttr: lambda _: None,
    ir.ArrayAttr: lambda a: [_attribute(x) for x in a],
    ir.DictAttr: lambda a: {x.name: _attribute(x.attr) for x in a},
    ir.DenseIntElementsAttr: _numbers,
    ir.DenseFPElementsAttr: _numbers,
    ir.DenseElementsAttr: _numbers,
    **{kind: tuple for kind in ARRAYS},
}
"""The plain value of each builtin attribute."""


def _type(t: ir.Type) -> HloType:
    if not isinstance(t, ir.RankedTensorType):
        return HloType((), str(t), f"{t} is no tensor")
    if not t.has_static_shape:
        return HloType((), str(t.element_type), f"{t} has a dynamic shape")
    problem = "" if t.encoding is None else f"{t} has an encoding"
    return HloType(tuple(t.shape), str(t.element_type), problem)


def _name(location: Any) -> str:
    return location.name_str if isinstance(location, ir.NameLoc) else ""


def _line(location: Any, name: str) -> LocationAttr | None:
    """Return the innermost line of a source within a location; `name` is that of a text."""
    match location:
        case ir.FileLineColLoc():
            file = str(location.filename).strip('"')
            if file.startswith(PACKAGE):  # a line of ours traced the function
                return None
            return file_line(name if file == "-" else file, location.start_line)
        case ir.NameLoc():
            return _line(location.child_loc, name)
        case ir.CallSiteLoc():
            return _line(location.callee, name) or _line(location.caller, name)
        case ir.FusedLoc():
            return next((l for x in location.locations if (l := _line(x, name))), None)
    return None
