"""load-strategies: a file that save-strategies wrote -> its strategies and layouts on the program.

    @loss %h = nn.matmul strategy <((2, 1), (1, 2))> : <@m, [{dp}, {tp}]>
 -> %h = nn.matmul %x, %w strategy<((2, 1), (1, 2))> : (...) -> tensor<8x6xf32, #dist.layout<...>>

Replaces propagate-strategies or search-strategies: the passes that follow produce the program that
was saved, byte for byte.

1. Requires the same program: functions, names, ops, ranks of tensors, meshes. Each difference is an
   error at its line in the file; all are reported at once.
2. Requires that the annotations of the program agree with the file.
3. A search erases propagation barriers and decomposes composites. Where the file was saved after a
   search (`search`), this pass does so too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from xdsl.dialects.builtin import UnitAttr
from xdsl.ir import Attribute, Block, BlockArgument, Operation, SSAValue

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Mesh
from shardir.algebra.saved import ARGUMENT, Line, LineError, Saved, read
from shardir.analysis.functions import makers
from shardir.diagnostics import ParseErrors, ShardirError, coded, did_you_mean
from shardir.dialects.dist import StrategyAttr, sharding_of, with_layout
from shardir.dialects.locations import at, called
from shardir.dialects.nn.base import TensorOp, strategy_factors
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.bases import Function, GlobalPass
from shardir.rewriting.composites import expand
from shardir.rewriting.functions import update_signature
from shardir.rewriting.marks import RECOMPUTE, SEARCHED, resolve_markers
from shardir.rewriting.rewriter import set_type
from shardir.syntax.files import read_text
from shardir.syntax.parser import default_parser
from shardir.syntax.printer import value_names
from shardir.syntax.source import Source
from shardir.syntax.spelling import LeafError


@dataclass(frozen=True)
class LoadStrategies(GlobalPass):
    """Sets the strategies and layouts of a file on a program."""

    name = "load-strategies"
    file: str
    """The file, as save-strategies writes it."""

    def concerns(self, f: Function) -> bool:
        return super().concerns(f) and f.mesh is not None

    def rewrite_all(self, functions: Sequence[Function]) -> None:
        source = Source(read_text(Path(self.file)), self.file)
        saved, errors = read(source.text)
        if not errors:
            names = [f.name for f in functions]
            errors += _unknown_functions(saved, names)
            loaded = [_LoadedFunction(f, saved) for f in functions]
            errors += [error for f in loaded for error in f.errors()]
            if not errors:
                for f in loaded:
                    f.write()
        if errors:
            raise ParseErrors([source.at_line(error) for error in sorted(errors)])


def _unknown_functions(saved: Saved, names: Sequence[str]) -> Iterator[LineError]:
    """Yield an error for the first line of each function that the program does not have."""
    lines = {line.function: line.number for line in reversed(saved.lines)}
    for name, number in lines.items():
        if name not in names:
            hint = did_you_mean(name, names).removeprefix("; ") or None
            message = f"expected a function of the program, got @{name}"
            yield LineError(number, 0, coded("V2", message, use=hint))


class _LoadedFunction:
    """A function with its lines of the file."""

    def __init__(self, f: Function, saved: Saved):
        assert f.mesh is not None
        self.f, self.mesh, self.saved = f.op, f.mesh, saved
        self.block: Block = f.block
        self.name = f.name
        self.lines = [line for line in saved.lines if line.function == f.name]
        self.search_result: Attribute | None = None
        if f.name in saved.found:
            resolve_markers(f.block, None)
            expand(f.block, None)
        self.value_names = value_names(f.block)
        self.line_of: dict[Operation | BlockArgument, Line] = {}

    def errors(self) -> Iterator[LineError]:
        """Yield the differences between the function and its lines; match the lines that agree."""
        where = f"@{self.name}"
        if not self.lines:
            last = max((line.number for line in self.saved.lines), default=1)
            yield LineError(last, 0, coded("V3", f"expected lines of {where}, got none"))
            return
        of: dict[str, Line] = {}
        for line in self.lines:
            if (first := of.setdefault(line.names[0], line)) is not line:
                message = f"expected one line of %{line.names[0]} in {where}, got two"
                use = f"drop this one or line {first.number}"
                yield LineError(line.number, 0, coded("V2", message, use=use))
        yield from self.mesh_errors()
        number = self.lines[0].number
        for by, made in makers(self.block):
            names = tuple(self.value_names[v] for v in made)
            line = of.pop(names[0], None)
            if line is None:
                message = f"expected a line of {_described(by, names)} after this one, got none"
                yield LineError(number, 0, coded("V3", message))
                continue
            self.line_of[by] = line
            number = line.number
            for message in self.differences(by, made, names, line):
                yield LineError(number, 0, message)
        for name, line in of.items():
            message = f"expected a value of {where}, got %{name}"
            yield LineError(line.number, 0, coded("V2", message))
        yield from self.search_errors()

    def search_errors(self) -> Iterator[LineError]:
        text = self.saved.found.get(self.name)
        if text is None:
            return
        try:
            self.search_result = default_parser().parse_attribute(text)
        except LeafError:
            message = f"expected an attribute as the search result of @{self.name}, got {text}"
            yield LineError(self.saved.numbers[f"@{self.name}"], 0, coded("V1", message))

    def mesh_errors(self) -> Iterator[LineError]:
        mesh = self.saved.meshes.get(self.mesh.name)
        if mesh is None:
            message = f"expected dist.mesh {self.mesh}, the mesh of @{self.name}, got none"
            yield LineError(self.lines[0].number, 0, coded("V4", message))
        elif mesh.axes != self.mesh.axes:
            message = f"expected dist.mesh {self.mesh}, got {mesh}"
            yield LineError(self.saved.numbers[mesh.name], 0, coded("V4", message))

    def differences(
        self, by: Operation | BlockArgument, made: Sequence[SSAValue], names: tuple[str, ...],
        line: Line,
    ) -> Iterator[str]:  # fmt: skip
        """Yield the differences between an argument or an op and its line."""
        kind = by.name if isinstance(by, Operation) else ARGUMENT
        if (kind, names, len(names)) != (line.op, line.names, len(line.layouts)):
            got = f"{', '.join(f'%{n}' for n in line.names)} = {line.op}"
            yield coded("V4", f"expected {_described(by, names)}, got {got}")
            return
        for v, name, layout in zip(made, names, line.layouts, strict=True):
            annotated = sharding_of(v)
            try:
                _check(layout, self.mesh, unsharded_type(v).get_shape())
            except ShardirError as e:
                yield f"%{name}: {e}"
                continue
            if annotated is not None and not annotated.allows(layout, self.mesh):
                yield coded("V5", f"expected %{name} as annotated, [{annotated}], got [{layout}]")
        yield from self.strategy_errors(by, line)

    def strategy_errors(self, by: Operation | BlockArgument, line: Line) -> Iterator[str]:
        if not isinstance(by, TensorOp):
            if line.strategy is not None:
                yield coded("V4", f"expected {line.op} without a strategy, got {line.strategy}")
            return
        annotated = None if by.strategy is None else by.strategy.data
        if annotated is not None and annotated != line.strategy:
            got = line.strategy or "none"
            yield coded("V5", f"expected {called(by)} as annotated, {annotated}, got {got}")
        elif line.strategy is not None:
            try:
                line.strategy.op_sharding(strategy_factors(by), self.mesh)
            except ShardirError as e:
                yield f"{line.op}: {e}"

    def write(self) -> None:
        for by, made in makers(self.block):
            line = self.line_of[by]
            for v, layout in zip(made, line.layouts, strict=True):
                set_type(v, with_layout(unsharded_type(v), layout))
            if line.strategy is not None and isinstance(by, TensorOp):
                by.properties["strategy"] = StrategyAttr(line.strategy)
            if line.recompute and isinstance(by, Operation):
                by.attributes[RECOMPUTE] = UnitAttr()
        update_signature(self.f)
        if self.search_result is not None:
            self.f.attributes[SEARCHED] = self.search_result


def _described(by: Operation | BlockArgument, names: Sequence[str]) -> str:
    values = ", ".join(f"%{n}" for n in names)
    return f"{values} = {by.name if isinstance(by, Operation) else ARGUMENT}{at(by)}"


def _check(layout: Layout, mesh: Mesh, shape: Shape) -> None:
    """Raise ShardirError where a value of the shape cannot have the layout on the mesh."""
    if layout.mesh != mesh.name:
        message = f"expected a layout on @{mesh.name}, got one on @{layout.mesh}"
        raise ShardirError(coded("V4", message))
    layout.check(mesh, shape)
