"""The emission of one function: its variables and lines, and the queries of the ops' entries."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, BlockArgument, Operation, OpResult, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.analysis.aliasing import maybe_shared
from shardir.analysis.roles import retained_arguments
from shardir.analysis.storages import Storages, live_ops
from shardir.backend.torch.emit import names
from shardir.backend.torch.emit.literals import Number, fold, number_text
from shardir.backend.torch.emit.names import Names, comment, joined, tuple_text
from shardir.backend.torch.emit.origins import source_line
from shardir.backend.torch.emit.types import LocalTypes
from shardir.diagnostics import Failure
from shardir.dialects import dist, nn, train

Text = str | SSAValue | None
"""The result of an entry: an expression, a value whose variable the result shares, or None when
the entry has written its own lines."""
Entry = Callable[..., Text]
"""A function from the scope and the op to the op's text."""


def foreign_names(f: FuncOp) -> Iterator[str]:
    """The modules of custom ops, which the text of a function names."""
    for op in f.walk():
        if isinstance(op, nn.CustomOp) and op.custom.function is not None:
            yield op.custom.function[0].split(".")[0]


class Program:
    """The state that the functions of one file share."""

    def __init__(self, mesh: Mesh | None, rank: int | None, table: Mapping[type[Operation], Entry]):
        self.mesh, self.rank, self.table = mesh, rank, table
        self.used = {"torch", "rt"}  # names of imports.MODULES and SHORTHANDS
        self.foreign: set[str] = set()  # the modules of custom ops
        self.constants: dict[str, list[str]] = {}

    def constant(self, numbers: list[str]) -> str:
        """Return the name of a new tuple of numbers at the head of the file."""
        name = f"{names.CONSTANT}{len(self.constants)}"
        self.constants[name] = numbers
        return name


class Variable:
    """A name in the text, of values that it holds in turn or at once: the last op that reads one of
    them (-1: none), and whether one is an argument."""

    def __init__(self, name: str):
        self.name, self.last, self.argument = name, -1, False


class EmissionScope(LocalTypes):
    """The emission of one function: names, lines, and the queries of the ops' entries."""

    def __init__(self, program: Program, f: FuncOp, name: str):
        super().__init__(f, program.mesh, program.rank, Names(foreign_names(f)), program.used)
        self.program, self.name = program, name
        self.is_step = train.is_step(f)
        if len(f.body.blocks) > 1:
            raise Failure.at(f, "the torch backend emits functions of one block")
        self.block: Block = f.body.block
        self.retained = retained_arguments(f)
        dist.matching_sends(self.block.ops)
        self.ops = live_ops(list(self.block.ops))
        self.storages = Storages(self.block.args, self.ops)
        for op in self.ops:
            for result, operand in maybe_shared(op, self.mesh):
                self.storages.join(result, operand)
        self.variables: dict[SSAValue, Variable] = {}
        self.numbers: dict[SSAValue, Number] = {}
        self.lines: list[str] = []
        self.indent = 4
        """The indentation of lines."""
        self.index = ""
        """The variable of the microbatch's index, in a loop."""
        self.source_line: str | None = None
        self.backward = False

    # ---- the text ----

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
            self.numbers[op.results[0]] = number  # the lines that use it have it as a literal
            return
        if not isinstance(op, dist.CollectiveOp | dist.WaitOp | train.Mark):
            self.note_source_line(op)
        made = entry(self, op)
        if made is None:
            return
        if isinstance(made, SSAValue):
            self.storages.join(op.results[0], made)
            self.same(op.results[0], made)
            return
        self.let(op, made)

    def finish(self, op: ReturnOp) -> None:
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
        """Free the values that no later op reads, but for arguments, which the caller owns, and
        scalars."""
        at, dead = self.storages.at[op], []
        if at + 2 >= len(self.ops):
            return
        for v in dict.fromkeys((*op.operands, *op.results, *self.storages.held.get(op, ()))):
            var = self.variables.get(v)
            if var is None or var.name in dead or not self.shape_of(v):
                continue
            if not var.argument and var.last <= at:
                dead.append(var.name)
        if dead:
            self.line(f"del {', '.join(dead)}")

    # ---- lines ----

    def line(self, text: str) -> None:
        self.lines.append(" " * self.indent + text if text else "")

    def note(self, text: str) -> None:
        """Write a comment."""
        self.lines += comment(text, self.indent)

    def head(self, text: str) -> None:
        """Write the heading of a part of the function."""
        self.line("")
        self.note(f"---- {text} ----")
        self.source_line, self.backward = None, text == "backward"

    def note_source_line(self, op: Operation) -> None:
        """Write the source line of an op where it differs from the last one."""
        line = source_line(op)
        if line and line != self.source_line:
            self.note(f"{line}, backward" if self.backward else line)
            self.source_line = line

    def left(self, op: Operation) -> None:
        """Write the source line again after a collective's comment, where it differs."""
        if source_line(op) != self.source_line:
            self.source_line = None

    def let(self, op: Operation, expression: str) -> None:
        """`names = expression` for the results of an op."""
        left = [self.result(r, op).name if self.is_read(r) else "_" for r in op.results]
        self.line(f"{', '.join(left)} = {expression}" if left else expression)

    # ---- names ----

    def define(self, v: SSAValue, hint: str | None) -> Variable:
        return self.hold(Variable(self.names.new(hint)), v)

    def same(self, v: SSAValue, other: SSAValue) -> None:
        """Let `v` share the variable of `other`."""
        self.hold(self.variables[other], v)

    def hold(self, var: Variable, v: SSAValue) -> Variable:
        """Let a variable hold `v` too."""
        var.last = max(var.last, self.storages.last.get(v, -1))
        var.argument |= isinstance(v, BlockArgument)
        self.variables[v] = var
        return var

    def result(self, v: OpResult, op: Operation) -> Variable:
        """Return the variable of a result: that of an operand of its name without later uses, or
        a new one."""
        hint = v.name_hint
        before = op.operands
        if isinstance(op, dist.CollectiveOp | dist.WaitOp):  # a result is the operand of its index
            before = (op.operands[v.index],)
            hint = hint or self.variables[before[0]].name
        for x in before if hint is not None else ():
            if (var := self.variables.get(x)) is not None:
                if hint is None or _base(x.name_hint or var.name) != _base(hint):
                    continue
                if not var.argument and var.last <= self.storages.at[op]:
                    return self.hold(var, v)
        return self.define(v, hint or _by_kind(op))

    def is_read(self, v: SSAValue) -> bool:
        return v in self.storages.last

    def operand(self, v: SSAValue) -> str:
        """Return the variable of a value; a folded scalar without one gets a line."""
        if v not in self.variables:
            number = self.number(v)
            assert number is not None, f"{v} is used before it is defined"
            self.line(f"{self.define(v, v.name_hint or 'number').name} = {self.full((), v)}")
        return self.variables[v].name

    def may_update(self, v: SSAValue, op: Operation) -> bool:
        """Whether `op` may write its result into the memory of `v`: a parameter, a state or a value
        of the step, without later uses."""
        return (
            self.is_step and v in self.variables
            and self.storages.is_free(v, op, self.retained)
            and not self.storages.is_shared(v, op)
        )  # fmt: skip

    # ---- numbers ----

    def number(self, v: SSAValue) -> Number | None:
        """The value of a scalar that is folded; None for others."""
        return self.numbers.get(v)

    def scalar(self, v: SSAValue) -> str | None:
        """A folded scalar, not a boolean, as a literal that is equivalent beside a tensor of its
        type."""
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


_REDUCED = {
    "sum": "total", "mean": "mean", "prod": "product", "max": "maximum", "min": "minimum",
    "any": "any_of", "all": "all_of",
}  # fmt: skip


def _by_kind(op: Operation) -> str:
    """A name for a value without a name in the source."""
    if isinstance(op, nn.ReduceOp):
        return _REDUCED[op.kind.data]
    return op.name.rpartition(".")[2]


def _base(hint: str) -> str:
    return re.sub(r"_\d+$", "", hint)
