"""The emission of one function: variables, lines, and queries for the ops' emitters."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import BlockArgument, Operation, OpResult, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.analysis.accumulation import added_in_place
from shardir.analysis.aliasing import copies
from shardir.analysis.storages import reads
from shardir.backend.torch.emit import names
from shardir.backend.torch.emit.arena import PLACED_COLLECTIVES, FunctionArena
from shardir.backend.torch.emit.list_variables import Element
from shardir.backend.torch.emit.literals import fold
from shardir.backend.torch.emit.loops import LoopScope
from shardir.backend.torch.emit.names import Names, comment_lines, join_items, return_lines
from shardir.backend.torch.emit.out_forms import out_form
from shardir.backend.torch.emit.variables import OpLine
from shardir.diagnostics import Failure
from shardir.dialects import dist, nn, train
from shardir.dialects.nn.base import TensorOp

Text = str | SSAValue | None
"""The result of an emitter: an expression, a value whose variable the result shares, or None if the
emitter has written its own lines."""
Entry = Callable[..., Text]
"""An emitter: a function from the scope and the op to the op's text."""


def foreign_names(f: FuncOp) -> Iterator[str]:
    """Yield the top-level modules of a function's custom ops."""
    for op in f.walk():
        if isinstance(op, nn.CustomOp) and op.custom.function is not None:
            yield op.custom.function[0].split(".")[0]


class Program:
    """The shared state of the functions in one file."""

    def __init__(
        self, mesh: Mesh | None, rank: int | None, table: Mapping[type[Operation], Entry],
        straight_line: bool = False, arena: bool = False,
    ):  # fmt: skip
        self.mesh, self.rank, self.table = mesh, rank, table
        self.straight_line = straight_line
        """Whether steps in stages are plain calls on each rank."""
        self.arenas: dict[str, FunctionArena] | None = {} if arena else None
        """The arena of each function by name; None for a program without an arena."""
        self.used = {"torch", "rt"}  # names of imports.MODULES and SHORTHANDS
        self.foreign: set[str] = set()  # the modules of custom ops
        self.constants: dict[str, list[str]] = {}

    def constant(self, numbers: list[str]) -> str:
        """Return the name of a new tuple of numbers at the head of the file."""
        name = f"{names.CONSTANT}{len(self.constants)}"
        self.constants[name] = numbers
        return name


def function_text(
    program: Program, f: FuncOp, name: str, totals: Sequence[SSAValue] = ()
) -> list[str]:
    """Return the lines of a function. With an arena it is emitted twice, since aliases are known at
    the end only."""
    constants = dict(program.constants)
    scope = EmissionScope(program, f, name, totals)
    lines = scope.text()
    if program.arenas is None or not (function_arena := FunctionArena.of(scope)).names:
        return lines
    program.constants, program.arenas[name] = constants, function_arena
    return EmissionScope(program, f, name, totals, function_arena).text()


class EmissionScope(LoopScope):
    """The emission of one function: names, lines, and queries for the ops' emitters."""

    def __init__(
        self, program: Program, f: FuncOp, name: str, totals: Sequence[SSAValue] = (),
        arena: FunctionArena | None = None, within: "EmissionScope | None" = None,
    ):  # fmt: skip
        """`totals` are returned addends of sums; the sums become the first parameters. The scope of
        a region is `within` that of its function, whose names it shares."""
        own_names = Names(foreign_names(f)) if within is None else within.names
        super().__init__(f, program.mesh, program.rank, own_names, program.used)
        self.indent = 4 if within is None else within.indent + 4
        self.totals = list(totals)
        added = added_in_place(self.block.ops)
        self.sums |= {v: op.out for v, op in added.items()} | {v: v for v in totals}
        self._parameters: dict[SSAValue, str] = {}
        self.program, self.name = program, name
        self._lent: dict[SSAValue, bool] = {}
        """Whether each storage may be memory of an argument that the caller owns."""
        self._arena = arena
        self._slots = self.names.new("slots") if arena is not None else ""
        self._dead: list[str] = []
        """The variables without later readers, which are freed before the next allocation."""

    # ---- the text ----

    def text(self) -> list[str]:
        sum_names = [self.names.new(f"{v.name_hint or 'product'}_sum") for v in self.totals]
        self._parameters = dict(zip(self.totals, sum_names, strict=True))
        for name in sum_names:
            self.note(f"{name}: of the microbatches before, or None")
        if self._arena is not None:
            self.use("arena")
            self.use("runtime_arena")
            call = f"arena.slots(mesh, {names.literal(self.name)})"
            self.head_lines += [
                *comment_lines(self._arena.about(), 4),
                f"    {self._slots} = {call}",
            ]
        head = join_items(f"def {self.name}(", ["mesh", *sum_names, *self.arguments()], "):", 0)
        about, self.lines = self.lines, []
        for op in self.ops:
            at = len(self.lines)
            if isinstance(op, ReturnOp):
                self.finish(op)
            else:
                if not self._is_in_place(op):
                    self._free()
                self.emit(op)
                if self.frees:
                    self.delete(op)
            self._own(op, at)
        return [*head, *about, *self.head_lines, *self.lines]

    def _own(self, op: Operation, at: int) -> None:
        """Mark the lines from index `at` on as lines of an op."""
        for i in range(at, len(self.lines)):
            if not isinstance(line := self.lines[i], OpLine):
                self.lines[i] = OpLine(line, op)

    def emit(self, op: Operation) -> None:
        entry = self.program.table.get(type(op))
        if entry is None:
            raise Failure.at(op, f"the torch backend has no text for {op.name}")
        number = fold(op, self.numbers)
        if number is not None:
            self.numbers[op.results[0]] = number  # the lines that use it have it as a literal
            return
        at = len(self.lines)
        text = entry(self, op)
        if isinstance(text, SSAValue):
            self.storages.join(op.results[0], text)
            self.same(op.results[0], text)
        elif text is not None:
            self.let(op, text)
        if len(self.lines) > at and isinstance(op, TensorOp) and not isinstance(op, dist.HandsOn):
            self.write_source(op, at)

    # ---- the arena ----

    def placed(self, v: OpResult, expression: str) -> str:
        if self.program.arenas is None or not self._may_have_slot(v):
            return expression
        form = out_form(expression, self._slot(v))
        if form is None:
            return expression
        self.placeable[v] = self._in_layers()
        if self._arena is None or v not in self._arena.names:
            return expression
        self.used.update({"aten", "ops_memory"} & {form.partition(".")[0]})
        return form

    def placed_results(self, op: dist.CollectiveOp) -> str:
        """Return the argument that places a collective's results and buffers in the arena; empty
        without slots for them."""
        v = op.outs[0]
        if self.program.arenas is None or not isinstance(op, PLACED_COLLECTIVES):
            return ""
        if not all(map(self._is_new, op.outs)):
            return ""
        if not any(self.shape_of(out) and self.is_read(out) for out in op.outs):
            return ""
        self.placeable[v] = self._in_layers()
        return f", out={self._slot(v)}" if self._arena and v in self._arena.names else ""

    def _may_have_slot(self, v: OpResult) -> bool:
        return self.is_read(v) and bool(self.shape_of(v)) and self._is_new(v)

    def _is_new(self, v: OpResult) -> bool:
        """Whether a value has device memory of its own, one piece for each run of the innermost
        loop."""
        layout = dist.layout_of(v)
        shares = any(x not in self.numbers for x in self.storages.joined.get(v, ()))
        over_layers = [loop for loop in self.loops if isinstance(loop.op, train.RepeatOp)]
        return (
            (not shares or (copies(v.op, self.mesh) and self._is_row_major(v.op.operands[0])))
            and not (layout is not None and layout.host)
            and over_layers in ([], self.loops[-1:])
        )

    def _is_row_major(self, v: SSAValue) -> bool:
        """Whether a value is a view of row-major memory (of a product or a collective), so that it
        is known which reshapes copy."""
        while others := self.storages.joined.get(v):
            v = others[0]
        is_product = isinstance(v.owner, nn.Contraction) and v in self.placeable
        return is_product or isinstance(v.owner, PLACED_COLLECTIVES)

    def _in_layers(self) -> bool:
        """Whether the innermost loop is over layers."""
        return bool(self.loops) and isinstance(self.loops[-1].op, train.RepeatOp)

    def _slot(self, v: SSAValue) -> str:
        name = self._arena.names.get(v, "") if self._arena is not None else ""
        return f"{self._slots}.{name}" + (f"[{self.loops[-1].index}]" if self._in_layers() else "")

    # ---- sums in place ----

    def add(self, total: SSAValue, product: str) -> Text:
        """Add a product, `addmm_(a, b)`, to its sum: in the loop, or to the parameter."""
        if (name := self._parameters.get(total)) is None:
            self.line(f"{self.variables[total].name}.{product}")
            return None
        matrices = product.partition("(")[2]
        return f"stages.add_product({name}, {matrices}"

    def add_by(self, total: SSAValue, call: str) -> Text:
        """Add to a sum by the argument `out` of a call: in the loop, or to the parameter."""
        name = self._parameters.get(total)
        text = f"{call[:-1]}, out={name or self.variables[total].name})"
        if name is None:
            self.line(text)
            return None
        return text

    def finish(self, op: ReturnOp) -> None:
        returned: set[object] = set()
        out, copied = [], False
        for v, updated in zip(op.operands, train.updated_keys(self.f), strict=True):
            text = self.operand(v)
            memory = {text, *self._memory(v)}
            shares = updated is not None and (self._is_lent(v) or not returned.isdisjoint(memory))
            if shares or (self._arena is not None and v in self._arena.copied):
                text, copied = text + ".clone()", True
            returned |= memory
            out.append(text)
        if not copied:
            out = self.texts(op.operands)
        self.line("")
        self.lines += return_lines(out)

    def _memory(self, v: SSAValue) -> list[object]:
        """Keys of the memory of a returned value: values with a common key may share memory."""
        root = self.storages.root(v)
        if (place := self.lists.place.get(v)) is not None:
            return [(root, place[1])]
        return [root, self.variables[root].name] if root in self.variables else [root]

    def _is_lent(self, v: SSAValue) -> bool:
        """Whether a value may share memory with an argument that the caller owns."""
        if (storage := self.storages.root(v)) not in self._lent:
            roots = self.storages.sources(storage)
            members = (x for root in roots for x in self.storages.members(root))
            self._lent[storage] = any(
                isinstance(x, BlockArgument) and x not in self.retained for x in members
            )
        return self._lent[storage]

    def delete(self, op: Operation) -> None:
        """Free the values that no later op reads, except scalars and arguments, which the caller
        owns."""
        at, dead = self.storages.at[op], []
        if at + 2 >= len(self.ops):
            return
        results = () if isinstance(op, train.CarryOp) else op.results
        for v in dict.fromkeys((*reads(op), *results, *self.storages.held.get(op, ()))):
            var = self.variables.get(v)
            if var is None or var.base.argument or var.base.last > at or not self.shape_of(v):
                continue
            if not (isinstance(op, train.CarryOp) and var is self.variables[op.carried]):
                dead.append(var.base.name)
        if isinstance(op, train.ItemsOp):
            self.loops[-1].collected += dead
            return
        if isinstance(op, train.EndRepeatOp):
            dead += self.appended
        self._dead += [name for name in dict.fromkeys(dead) if name not in self.emptied]
        if not self._is_in_place(op):
            self._free()
        self._empty(op, at)

    def _is_in_place(self, op: Operation) -> bool:
        """Whether an op allocates no memory: an update by a fused kernel."""
        return isinstance(op, train.AdamOp | train.AdamWOp)

    def _free(self) -> None:
        """Write the line that frees values without readers."""
        if self._dead:
            self.lines += join_items("del ", self._dead, "", self.indent)
            self._dead = []

    def _empty(self, op: Operation, at: int) -> None:
        """Free the elements of loops' lists that no later op reads, in lists that live on."""
        for v in dict.fromkeys(reads(op)) if not self.loops else ():
            var, of = self.variables.get(v), self.in_list(v)
            is_made = of is not None and of.stride == 0
            if isinstance(var, Element) and var.place is None and is_made and self.shape_of(v):
                base = var.base
                is_held = base.last > at and not base.argument and base.name not in self.emptied
                if is_held and self.storages.last.get(v, -1) <= at:
                    self.line(f"{var.name} = None")
