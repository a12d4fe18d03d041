"""load-strategies: a file that save-strategies wrote -> a strategy or a layout wherever it had one.

    @loss %h = nn.matmul strategy <((2, 1), (1, 2))> : <@m, [{dp}, {tp}]>
 -> %h = nn.matmul %x, %w strategy<((2, 1), (1, 2))> : (...) -> tensor<8x6xf32, #dist.layout<...>>

In the place of propagate-strategies or search-strategies: what follows makes the same of the
program as it did when the file was saved, byte for byte.

1. The program is the same: functions, names, ops, ranks of tensors, meshes. What is not as the file
   says is an error, at its line in the file; all of them at once.
2. What the text states must be what the file says.
3. A search takes barriers out, and puts the parts of composites in their place. Where the
   file was saved behind one (`search`), so does this pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, UnitAttr
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Block, BlockArgument, Operation, SSAValue
from xdsl.parser import Parser
from xdsl.passes import ModulePass
from xdsl.utils.exceptions import ParseError

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Mesh
from shardir.algebra.saved import ARGUMENT, Line, LineError, Saved, read
from shardir.analysis.functions import is_local_body, makers, mesh_of, name_of
from shardir.diagnostics import Diagnostic, ParseErrors, ShardirError, did_you_mean
from shardir.dialects.dist import StrategyAttr, sharding_of, with_layout
from shardir.dialects.locations import at, called
from shardir.dialects.nn.base import TensorOp, strategy_factors
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.composites import expand
from shardir.rewriting.functions import bodies, update_signature
from shardir.rewriting.marks import RECOMPUTE, SEARCHED, resolve_markers
from shardir.rewriting.rewriter import set_type
from shardir.syntax.files import read_text
from shardir.syntax.printer import value_names
from shardir.syntax.source import Source

AGAIN = "save the strategies of this program, or correct the line"


@dataclass(frozen=True)
class LoadStrategies(ModulePass):
    """Gives a program the strategies and layouts of a file."""

    name = "load-strategies"
    file: str

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        source = Source(read_text(Path(self.file)), self.file)
        saved, errors = read(source.text)
        if errors:
            raise ParseErrors([_diagnostic(source, error) for error in errors])
        functions = {
            name_of(f): _Function(f, block, mesh, saved)
            for f, block in bodies(op)
            if (mesh := mesh_of(f, op)) is not None and not is_local_body(block)
        }
        for name in dict.fromkeys(line.function for line in saved.lines):
            if name not in functions:
                number = next(line.number for line in saved.lines if line.function == name)
                hint = did_you_mean(name, functions) or ""
                message = f"[V2] the program has no function @{name}{hint or f'; {AGAIN}'}"
                errors.append(LineError(number, 0, message))
        for function in functions.values():
            errors += function.errors(ctx)
        if errors:
            raise ParseErrors([_diagnostic(source, error) for error in sorted(errors)])
        for function in functions.values():
            function.write()


def _diagnostic(source: Source, error: LineError) -> Diagnostic:
    start = source.starts[error.number - 1] + error.column
    end = source.starts[error.number - 1] + len(source.line_text(error.number))
    return source.at(start, end, error.message)


class _Function:
    """A function, and the lines of the file that are of it."""

    def __init__(self, f: FuncOp, block: Block, mesh: Mesh, saved: Saved):
        self.f, self.block, self.mesh, self.saved = f, block, mesh, saved
        self.lines = [line for line in saved.lines if line.function == name_of(f)]
        self.found: Attribute | None = None
        if name_of(f) in saved.found:
            resolve_markers(block, None)
            expand(block, None)
        self.names = value_names(block)
        self.of: dict[Operation | BlockArgument, Line] = {}

    def errors(self, ctx: Context) -> Iterator[LineError]:
        """What the file says of the function that is not so; what fits is kept."""
        where = f"@{name_of(self.f)}"
        if not self.lines:
            last = max((line.number for line in self.saved.lines), default=1)
            yield LineError(last, 0, f"[V3] there is no line of {where}; {AGAIN}")
            return
        of: dict[str, Line] = {}
        for line in self.lines:
            if (first := of.setdefault(line.names[0], line)) is not line:
                message = f"[V2] %{line.names[0]} of {where} stands in line {first.number} already"
                yield LineError(line.number, 0, f"{message}; leave one out")
        yield from self.mesh_errors()
        number = self.lines[0].number
        for by, made in makers(self.block):
            names = tuple(self.names[v] for v in made)
            line = of.pop(names[0], None)
            if line is None:
                message = f"[V3] behind this line there is none of {_said(by, names)}"
                yield LineError(number, 0, f"{message}; {AGAIN}")
                continue
            self.of[by] = line
            number = line.number
            for message in self.differences(by, made, names, line):
                yield LineError(number, 0, message)
        for name, line in of.items():
            yield LineError(line.number, 0, f"[V2] the program has no %{name} in {where}; {AGAIN}")
        if (text := self.saved.found.get(where.removeprefix("@"))) is not None:
            try:
                self.found = Parser(ctx, text).parse_attribute()
            except ParseError:
                yield LineError(
                    self.saved.numbers[where],
                    0,
                    f"[V1] what the search found of {where} is no attribute",
                )

    def mesh_errors(self) -> Iterator[LineError]:
        mesh = self.saved.meshes.get(self.mesh.name)
        if mesh is None:
            message = f"[V4] @{name_of(self.f)} is on dist.mesh {self.mesh}, which is not here"
            yield LineError(self.lines[0].number, 0, f"{message}; {AGAIN}")
        elif mesh.axes != self.mesh.axes:
            message = f"[V4] the program has dist.mesh {self.mesh}; {AGAIN}"
            yield LineError(self.saved.numbers[mesh.name], 0, message)

    def differences(
        self, by: Operation | BlockArgument, made: Sequence[SSAValue], names: tuple[str, ...],
        line: Line,
    ) -> Iterator[str]:  # fmt: skip
        """What a line says that is not so of an argument or an op."""
        kind = by.name if isinstance(by, Operation) else ARGUMENT
        if (kind, names, len(names)) != (line.op, line.names, len(line.layouts)):
            yield f"[V4] in the program it is {_said(by, names)}; {AGAIN}"
            return
        for v, name, layout in zip(made, names, line.layouts, strict=True):
            stated = sharding_of(v)
            try:
                _check(layout, self.mesh, unsharded_type(v).get_shape())
            except ShardirError as e:
                yield f"%{name}: {e}"
                continue
            if stated is not None and not stated.allows(layout, self.mesh):
                yield (
                    f"[V5] %{name} is stated in the program to lie as [{stated}]; leave that out, "
                    "or correct the line"
                )
        yield from self.strategy_errors(by, line)

    def strategy_errors(self, by: Operation | BlockArgument, line: Line) -> Iterator[str]:
        if not isinstance(by, TensorOp):
            if line.strategy is not None:
                yield f"[V4] {line.op} has no strategy; leave it out"
            return
        stated = None if by.strategy is None else by.strategy.data
        if stated is not None and stated != line.strategy:
            yield (
                f"[V5] {called(by)} has the strategy {stated} in the program; leave that out, or "
                "correct the line"
            )
        elif line.strategy is not None:
            try:
                line.strategy.op_sharding(strategy_factors(by), self.mesh)
            except ShardirError as e:
                yield f"{line.op}: {e}"

    def write(self) -> None:
        for by, made in makers(self.block):
            line = self.of[by]
            for v, layout in zip(made, line.layouts, strict=True):
                set_type(v, with_layout(unsharded_type(v), layout))
            if line.strategy is not None and isinstance(by, TensorOp):
                by.properties["strategy"] = StrategyAttr(line.strategy)
            if line.recompute and isinstance(by, Operation):
                by.attributes[RECOMPUTE] = UnitAttr()
        update_signature(self.f)
        if self.found is not None:
            self.f.attributes[SEARCHED] = self.found


def _said(by: Operation | BlockArgument, names: Sequence[str]) -> str:
    values = ", ".join(f"%{n}" for n in names)
    return f"{values} = {by.name if isinstance(by, Operation) else ARGUMENT}{at(by)}"


def _check(layout: Layout, mesh: Mesh, shape: Shape) -> None:
    """Raises ShardirError where a value of the shape does not lie so on the mesh."""
    if layout.mesh != mesh.name:
        raise ShardirError(f"[V4] it lies on @{mesh.name}, not on @{layout.mesh}; {AGAIN}")
    layout.check(mesh, shape)
