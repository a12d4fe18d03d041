"""One function on its way to text: its variables and lines, and what ops ask of their
surroundings."""

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath

from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, BlockArgument, Operation, OpResult, SSAValue

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh
from shardir.analysis.aliasing import maybe_shared
from shardir.analysis.roles import retained_arguments
from shardir.analysis.storages import Storages, live_ops
from shardir.backend.torch.emit import names
from shardir.backend.torch.emit.literals import Number, fold, number_text
from shardir.backend.torch.emit.names import Names, axes_text, comment, joined, tuple_text
from shardir.diagnostics import Failure
from shardir.dialects import dist, nn, train
from shardir.dialects.dist import global_shape, layout_of
from shardir.dialects.locations import file_location

DTYPES = {
    "f32": "torch.float32",
    "f64": "torch.float64",
    "bf16": "torch.bfloat16",
    "f16": "torch.float16",
    "i64": "torch.int64",
    "i32": "torch.int32",
    "i1": "torch.bool",
}

Text = str | SSAValue | None
"""What an entry gives: an expression, the value that the result is already, or None
when it has written its own lines."""
Entry = Callable[..., Text]
"""What makes an op's text, from the scope and the op."""


def table() -> dict[type[Operation], Entry]:
    from shardir.backend.torch.ops import TORCH
    from shardir.backend.torch.ops.dist import TORCH_DIST

    return {**TORCH, **TORCH_DIST}


def foreign_names(f: FuncOp) -> Iterator[str]:
    """What the text of a function names that is not shardir's: the modules of custom ops."""
    for op in f.walk():
        if isinstance(op, nn.CustomOp) and op.custom.function is not None:
            yield op.custom.function[0].split(".")[0]


class Program:
    """What the functions of one file share."""

    def __init__(self, mesh: Mesh | None, rank: int | None):
        self.mesh, self.rank = mesh, rank
        self.used = {"torch", "rt"}  # names of imports.MODULES and SHORTHANDS
        self.foreign: set[str] = set()  # the modules of custom ops
        self.constants: dict[str, list[str]] = {}
        self.table = table()

    def constant(self, numbers: list[str]) -> str:
        """The name of a tuple of numbers at the head of the file."""
        name = f"{names.CONSTANT}{len(self.constants)}"
        self.constants[name] = numbers
        return name


class Variable:
    """A name in the text, and the values that it holds one after the other, or at once."""

    def __init__(self, name: str, value: SSAValue):
        self.name, self.values = name, [value]


class Scope:
    """One function on its way to text: names, lines, and what ops ask of their surroundings."""

    def __init__(self, program: Program, f: FuncOp, name: str):
        self.program, self.f, self.name = program, f, name
        self.mesh, self.rank = program.mesh, program.rank
        self.is_step = train.is_step(f)
        if len(f.body.blocks) > 1:
            raise Failure.at(f, "the torch backend emits functions of one block")
        self.block: Block = f.body.block
        self.retained = retained_arguments(f)
        self.ops = live_ops(list(self.block.ops))
        self.storages = Storages(self.block.args, self.ops)
        for op in self.ops:
            for result, operand in maybe_shared(op, self.mesh):
                self.storages.join(result, operand)
        self.names = Names(foreign_names(f))
        self.variables: dict[SSAValue, Variable] = {}
        self.numbers: dict[SSAValue, Number] = {}
        self.mail: dict[str, deque[dist.SendOp]] = {}  # what no dist.recv has met so far
        self.lines: list[str] = []
        self.head_lines: list[str] = []
        self.parts_known: dict[tuple[int, Axes], tuple[str, str]] = {}
        self.place: str | None = None
        self.backward = False

    # ---- the whole ----

    def text(self) -> list[str]:
        hints = [a.name_hint or f"arg{i}" for i, a in enumerate(self.block.args)]
        given = [self.define(a, h).name for a, h in zip(self.block.args, hints, strict=True)]
        head = joined(f"def {self.name}(", ["mesh", *given], "):", 0)
        about: list[str] = []
        for a in self.block.args:
            about += comment(f"{self.variables[a].name}: {self.describe(a)}", 4)
        for op in self.ops:
            if isinstance(op, ReturnOp):
                self.finish(op)
            else:
                self.emit(op)
                if self.is_step:
                    self.delete(op)
        return [*head, *about, *self.head_lines, *self.lines]

    def emit(self, op: Operation) -> None:
        entry = self.program.table.get(type(op))
        if entry is None:
            raise Failure.at(op, f"the torch backend has no text for {op.name}")
        number = fold(op, self.numbers)
        if number is not None:
            self.numbers[op.results[0]] = number  # it becomes part of the lines that use it
            return
        if not isinstance(op, dist.CollectiveOp | dist.WaitOp | train.Mark):
            self.say_where(op)
        made = entry(self, op)
        if made is None:
            return
        if isinstance(made, SSAValue):
            self.storages.join(op.results[0], made)
            self.same(op.results[0], made)
            return
        self.let(op, made)

    def finish(self, op: ReturnOp) -> None:
        for sent in (o for waiting in self.mail.values() for o in waiting):
            raise Failure.at(sent, "[C11] a dist.send without a dist.recv behind it")
        returned: set[SSAValue] = set()
        out = []
        for v, updated in zip(op.operands, train.updated_keys(self.f), strict=True):
            text, root = self.operand(v), self.storages.root(v)
            foreign = isinstance(root, BlockArgument) and root not in self.retained
            if updated is not None and (root in returned or foreign):
                text += ".clone()"
            returned.add(root)
            out.append(text)
        self.line("")
        text = f"return {', '.join(out) or '()'}"
        self.lines += [f"    {text}"] if len(text) < 97 else joined("return (", out, ")", 4)

    def delete(self, op: Operation) -> None:
        """Frees what no later op reads. Arguments belong to the caller; scalars weigh nothing."""
        at, dead = self.storages.at[op], []
        if at + 2 >= len(self.ops):
            return
        for v in dict.fromkeys((*op.operands, *op.results)):
            var = self.variables.get(v)
            if var is None or var.name in dead or not self.shape_of(v):
                continue
            argument = any(isinstance(x, BlockArgument) for x in var.values)
            if not argument and all(self.storages.last.get(x, -1) <= at for x in var.values):
                dead.append(var.name)
        if dead:
            self.line(f"del {', '.join(dead)}")

    # ---- lines ----

    def line(self, text: str) -> None:
        self.lines.append(f"    {text}" if text else "")

    def note(self, text: str) -> None:
        """A comment."""
        self.lines += comment(text, 4)

    def head(self, text: str) -> None:
        """The head of a part of the function."""
        self.line("")
        self.note(f"---- {text} ----")
        self.place, self.backward = None, text == "backward"

    def say_where(self, op: Operation) -> None:
        """The source line of what follows, when it is another than before."""
        place = self.where(op)
        if place and place != self.place:
            self.note(f"{place}, backward" if self.backward else place)
            self.place = place

    def left(self, op: Operation) -> None:
        """After a collective's own comment the place is said again, where it differs."""
        if self.where(op) != self.place:
            self.place = None

    def let(self, op: Operation, expression: str) -> None:
        """`names = expression` for the results of an op."""
        left = [self.result(r, op).name if self.is_read(r) else "_" for r in op.results]
        self.line(f"{', '.join(left)} = {expression}" if left else expression)

    def use(self, name: str) -> None:
        """Let the program define a name of imports.py."""
        self.program.used.add(name)

    # ---- names ----

    def define(self, v: SSAValue, hint: str | None) -> Variable:
        var = self.variables[v] = Variable(self.names.new(hint), v)
        return var

    def same(self, v: SSAValue, other: SSAValue) -> None:
        """`v` is what `other` is, in the same variable."""
        var = self.variables[other]
        var.values.append(v)
        self.variables[v] = var

    def result(self, v: OpResult, op: Operation) -> Variable:
        """The variable of a result: that of an operand of its name which dies here, or a new
        one."""
        hint = v.name_hint
        before = op.operands
        if isinstance(op, dist.CollectiveOp | dist.WaitOp):  # a result is the operand of its place
            before = (op.operands[v.index],)
            hint = hint or self.variables[before[0]].name
        for x in before if hint is not None else ():
            if (var := self.variables.get(x)) is not None:
                if hint is None or _base(x.name_hint or var.name) != _base(hint):
                    continue
                free = not any(isinstance(y, BlockArgument) for y in var.values)
                if free and all(
                    self.storages.last.get(y, -1) <= self.storages.at[op] for y in var.values
                ):
                    var.values.append(v)
                    self.variables[v] = var
                    return var
        return self.define(v, hint or _by_kind(op))

    def is_read(self, v: SSAValue) -> bool:
        return v in self.storages.last

    def operand(self, v: SSAValue) -> str:
        """The variable of a value. A number that no line has made so far is made now."""
        if v not in self.variables:
            number = self.number(v)
            assert number is not None, f"{v} is used before it is defined"
            self.line(f"{self.define(v, v.name_hint or 'number').name} = {self.full((), v)}")
        return self.variables[v].name

    def may_update(self, v: SSAValue, op: Operation) -> bool:
        """Whether `op` may write its result into the memory of `v`: a parameter, a state or the
        step's own, which nothing reads afterwards."""
        return (
            self.is_step and v in self.variables
            and self.storages.is_free(v, op, self.retained)
            and not self.storages.is_shared(v, op)
        )  # fmt: skip

    # ---- numbers ----

    def number(self, v: SSAValue) -> Number | None:
        """The value of a scalar that is known now."""
        return self.numbers.get(v)

    def scalar(self, v: SSAValue) -> str | None:
        """A known scalar, not a truth value, as a literal that means the same beside a tensor of
        its type."""
        number = self.number(v)
        if number is None or isinstance(number, bool):
            return None
        text = number_text(number, self.element(v))
        return f"({text})" if text.startswith("-") else text

    def full(self, shape: Sequence[str], v: SSAValue) -> str:
        number = self.number(v)
        assert number is not None
        text = number_text(number, self.element(v))
        return (
            f"torch.full({tuple_text(list(shape))}, {text}, dtype={self.dtype(v)}, "
            "device=mesh.device)"
        )

    # ---- types ----

    def type(self, v: SSAValue) -> TensorType:
        assert isinstance(v.type, TensorType)
        return v.type

    def element(self, v: SSAValue) -> str:
        return str(self.type(v).element_type)

    def dtype(self, v: SSAValue) -> str:
        element = self.element(v)
        if element not in DTYPES:
            owner = v.owner if isinstance(v.owner, Operation) else self.f
            raise Failure.at(owner, f"the torch backend has no element type {element}")
        return DTYPES[element]

    def is_float(self, v: SSAValue) -> bool:
        return "f" in self.element(v)

    def shape_of(self, v: SSAValue) -> Shape:
        """The shape in the type: that of the largest shard."""
        return self.type(v).get_shape()

    def whole(self, v: SSAValue) -> Shape:
        """The global shape."""
        return global_shape(self.type(v), self.mesh)

    def axes(self, v: SSAValue, dim: int) -> Axes:
        """The axes that split a dimension."""
        layout = layout_of(v)
        return layout.dims[dim] if layout is not None else ()

    def parts(self, v: SSAValue, dim: int) -> int:
        """Into how many shards a dimension is split."""
        return self.mesh.extent(self.axes(v, dim)) if self.mesh is not None else 1

    def is_even(self, v: SSAValue, dim: int) -> bool:
        return self.mesh is None or self.mesh.even(self.whole(v)[dim], self.axes(v, dim))

    def may_be_empty(self, v: SSAValue, dim: int) -> bool:
        """Whether some rank has no row of a dimension."""
        total, axes = self.whole(v)[dim], self.axes(v, dim)
        if self.mesh is None or not axes:
            return total == 0
        ends = (self.mesh.bounds(total, axes, k) for k in range(self.mesh.extent(axes)))
        return any(start == stop for start, stop in ends)

    def bounds(self, v: SSAValue, dim: int) -> tuple[int, int]:
        """The rows of a dimension on the rank that is folded in."""
        assert self.mesh is not None and self.rank is not None
        axes = self.axes(v, dim)
        return self.mesh.bounds(self.whole(v)[dim], axes, self.mesh.index(self.rank, axes))

    def size(self, v: SSAValue, dim: int) -> str:
        """The size of a dimension here."""
        if self.is_even(v, dim):
            return str(self.shape_of(v)[dim])
        return self.rows(self.whole(v)[dim], self.axes(v, dim))

    def rows(self, total: int, axes: Axes) -> str:
        """How many of so many rows split over these axes lie here."""
        if self.mesh is None or not axes:
            return str(total)
        if self.mesh.even(total, axes):
            return str(self.mesh.largest(total, axes))
        return self.part(total, axes)[1]

    def part(self, total: int, axes: Axes) -> tuple[str, str]:
        """The first of so many rows that lie here, and how many: numbers for the rank that is
        folded in, else two variables that the function begins with."""
        assert self.mesh is not None
        if self.rank is not None:
            start, stop = self.mesh.bounds(total, axes, self.mesh.index(self.rank, axes))
            return str(start), str(stop - start)
        if (total, axes) not in self.parts_known:
            self.use("ops")
            about = f"{total}_{'_'.join(a.name for a in axes)}"
            start, rows = (self.names.new(f"{word}_{about}") for word in ("start", "rows"))
            self.head_lines.append(
                f"    {start}, {rows} = ops.part(mesh, {total}, {axes_text(axes)})"
            )
            self.parts_known[total, axes] = start, rows
        return self.parts_known[total, axes]

    def sizes(self, v: SSAValue) -> list[str]:
        return [self.size(v, d) for d in range(len(self.shape_of(v)))]

    def start(self, v: SSAValue, dim: int) -> str:
        """The global index of the first row along a dimension here."""
        if self.parts(v, dim) == 1:
            return "0"
        if self.is_even(v, dim) and self.rank is None:
            return f"mesh.index({axes_text(self.axes(v, dim))}) * {self.shape_of(v)[dim]}"
        return self.part(self.whole(v)[dim], self.axes(v, dim))[0]

    # ---- words for people ----

    def where(self, op: Operation) -> str:
        """File and line of an op."""
        place = file_location(op.location)
        return f"{PurePath(place[0]).name}:{place[1]}" if place else ""

    def called(self, v: SSAValue) -> str:
        """A value and what made it: nn.matmul %logits at digits.ir:15."""
        if isinstance(v, BlockArgument):
            return f"the argument %{v.name_hint or f'arg{v.index}'}"
        assert isinstance(v.owner, Operation)
        name = f" %{v.name_hint}" if v.name_hint else ""
        place = self.where(v.owner)
        return f"{v.owner.name}{name}{f' at {place}' if place else ''}"

    def describe(self, v: SSAValue) -> str:
        """The type of an argument: f32 [4, 8] of [8, 8], split {dp}, {}."""
        shape, layout = list(self.shape_of(v)), layout_of(v)
        text = f"{self.element(v)} {shape}"
        if layout is None or not layout.used:
            return text
        return f"{text} of {list(self.whole(v))}, {layout_text(layout)}"


def layout_text(layout: Layout) -> str:
    """[{dp}, {tp}], partial sum {x}"""
    return str(layout).partition(", ")[2]


_REDUCED = {
    "sum": "total", "mean": "mean", "prod": "product", "max": "greatest", "min": "smallest",
    "any": "any_of", "all": "all_of",
}  # fmt: skip


def _by_kind(op: Operation) -> str:
    """A name for what the source has no name for."""
    if isinstance(op, nn.ReduceOp):
        return _REDUCED[op.kind.data]
    return op.name.rpartition(".")[2]


def _base(hint: str) -> str:
    return re.sub(r"_\d+$", "", hint)
