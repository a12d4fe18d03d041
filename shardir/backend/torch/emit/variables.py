"""The variables and lines of an emitted function."""

import re
from collections.abc import Sequence
from typing import Self

from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, BlockArgument, Operation, OpResult, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.analysis.aliasing import maybe_shared
from shardir.analysis.roles import donated_arguments, frees, retained_arguments
from shardir.analysis.storages import Storages, live_ops
from shardir.backend.torch.emit.biases import bias_addition, biased_product
from shardir.backend.torch.emit.literals import Number, number_text
from shardir.backend.torch.emit.names import (
    WIDTH,
    Names,
    assignment_lines,
    comment_lines,
    printable,
    tuple_text,
)
from shardir.backend.torch.emit.origins import source_line
from shardir.backend.torch.emit.types import LocalTypes
from shardir.diagnostics import Failure
from shardir.dialects import dist, nn, train
from shardir.dialects.blocks import ops_of


class OpLine(str):
    """A line of the program, with the op that it belongs to."""

    def __new__(cls, text: str, op: Operation) -> Self:
        line = super().__new__(cls, text)
        line.op = op
        return line

    op: Operation


class Variable:
    """A variable of the program, which may hold several values: the index of the last op that reads
    one of them (-1: none), and whether one is an argument."""

    def __init__(self, name: str):
        self.name, self.last, self.argument = name, -1, False

    @property
    def base(self) -> "Variable":
        """The list's variable for an element of a list, else the variable itself. It has the valid
        `last` and `argument`."""
        return self


class VariableScope(LocalTypes):
    """The variables and lines of one function."""

    def __init__(
        self, f: FuncOp, mesh: Mesh | None, rank: int | None, names: Names, used: set[str]
    ):
        super().__init__(f, mesh, rank, names, used)
        self.frees, self.lent = frees(f), donated_arguments(f)
        if len(f.body.blocks) > 1:
            raise Failure.at(f, "the torch backend emits functions of one block")
        self.block: Block = f.body.block
        self.retained = retained_arguments(f)
        dist.matching_sends(self.block.ops)
        self.ops = live_ops(ops_of(self.block))
        self.storages = Storages(self.block.args, self.ops)
        items = [op for op in self.ops if isinstance(op, train.ItemsOp)]
        for op in self.ops:
            for result, operand in () if op in items else maybe_shared(op, self.mesh):
                self.storages.join(result, operand)
            if biased_product(op) is not None:
                self.storages.join(op.results[0], op.operands[0])
        for op in items:
            if self.storages.is_of_each_run(op):
                self.storages.pin(op.x)  # the list keeps it alive
            else:
                for result in op.outs:
                    self.storages.join(result, op.x)
        self.variables: dict[SSAValue, Variable] = {}
        self.numbers: dict[SSAValue, Number] = {}
        self._literals: dict[SSAValue, str] = {}
        self.lines: list[str] = []
        self.indent = 4
        """The indentation of lines."""
        self.source_line: str | None = None
        self._becomes = {op.x: op.carried for op in self.ops if isinstance(op, train.CarryOp)}
        """The variable of the loop that each carried value becomes in the next run."""

    # ---- lines ----

    def line(self, text: str) -> None:
        self.lines.append(" " * self.indent + text if text else "")

    def note(self, text: str) -> None:
        """Write a comment."""
        self.lines += comment_lines(text, self.indent)

    def head(self, text: str) -> None:
        """Write the heading of a part of the function."""
        self.line("")
        self.note(f"---- {text} ----")
        self.source_line = None

    def write_source(self, op: Operation, at: int) -> None:
        """Write the source line of an op, if it differs from the last one: after the op's first
        line, or before it if that would be too long."""
        line = source_line(op)
        if not line or line == self.source_line:
            return
        self.source_line = line
        commented = f"{self.lines[at]}  # {printable(line)}"
        if len(commented) <= WIDTH and "#" not in self.lines[at]:
            self.lines[at] = commented
        else:
            self.lines[at:at] = comment_lines(line, self.indent)

    def left(self, op: Operation) -> None:
        """Write the source line again after a collective's comment, if it differs."""
        if source_line(op) != self.source_line:
            self.source_line = None

    def let(self, op: Operation, expression: str) -> None:
        """Write `names = expression` for the results of an op."""
        targets = [self.result(r, op).name if self.is_read(r) else "_" for r in op.results]
        if len(targets) == 1:
            self.lines += assignment_lines(
                targets[0], self.placed(op.results[0], expression), self.indent
            )
        else:
            self.line(f"{', '.join(targets)} = {expression}" if targets else expression)

    def placed(self, v: OpResult, expression: str) -> str:
        """Return the expression of a value, writing into its slot in the arena if it has one."""
        return expression

    # ---- names ----

    def define(self, v: SSAValue, hint: str | None) -> Variable:
        return self.hold(Variable(self.names.new(hint)), v)

    def same(self, v: SSAValue, other: SSAValue) -> None:
        """Let `v` share the variable of `other`."""
        self.storages.joined.setdefault(v, []).append(other)
        self.hold(self.variables[other], v)

    def hold(self, var: Variable, v: SSAValue) -> Variable:
        """Let a variable hold `v` too."""
        base = var.base
        base.last = max(base.last, self.storages.last.get(v, -1))
        base.argument |= isinstance(v, BlockArgument)
        self.variables[v] = var
        return var

    def result(self, v: OpResult, op: Operation) -> Variable:
        """Return the variable of a result: the loop variable to which it is carried, the variable
        of an operand with the same name and no later uses, or a new variable."""
        variable = self.variables.get(self._becomes.get(v, v))
        if variable is not None and self.is_free(variable, op):
            return self.hold(variable, v)
        hint, users = v.name_hint, {use.operation for use in v.uses}
        if len(users) == 1 and isinstance(first := users.pop(), train.CarriedOp):
            hint = first.out.name_hint or hint  # the loop's variable, from its first run on
        elif (add := bias_addition(op)) is not None:
            hint = add.out.name_hint or hint
        before = op.operands
        if isinstance(op, dist.CollectiveOp | dist.WaitOp):  # operands and results correspond
            before = (op.operands[v.index],)
            old = self.variables.get(before[0])  # in flight, only the first result has a variable
            hint = hint or (old.name if old is not None else None)
        for x in before if hint is not None else ():
            if (var := self.variables.get(x)) is not None:
                if hint is None or _base(x.name_hint or var.name) != _base(hint):
                    continue
                if self.is_free(var, op) and not self._is_carried(var):
                    return self.hold(var, v)
        return self.define(v, hint or _by_kind(op))

    def is_free(self, variable: Variable, op: Operation) -> bool:
        """Whether a variable can be reused after an op: not an argument or an element of a list,
        and without later readers."""
        if variable.base is not variable or variable.argument:
            return False
        return variable.last <= self.storages.at[op]

    def _is_carried(self, variable: Variable) -> bool:
        """Whether a loop sets the variable."""
        return any(self.variables.get(v) is variable for v in self._becomes.values())

    def is_read(self, v: SSAValue) -> bool:
        return v in self.storages.last

    def operand(self, v: SSAValue) -> str:
        """Return the variable of a value; write a line for a folded scalar without one."""
        if v not in self.variables:
            number = self.number(v)
            assert number is not None, f"{v} is used before it is defined"
            self.line(f"{self.define(v, v.name_hint or 'number').name} = {self.full((), v)}")
        return self.variables[v].name

    def may_update(self, v: SSAValue, op: Operation) -> bool:
        """Whether `op` may write its result into the memory of `v`: a parameter or state that a
        result replaces, or a value of the function, without later uses."""
        return (
            self.frees and v in self.variables
            and self.storages.is_free(v, op, self.lent)
            and not self.storages.is_shared(v, op)
        )  # fmt: skip

    # ---- numbers ----

    def number(self, v: SSAValue) -> Number | None:
        """Return the value of a folded scalar; None for other values."""
        return self.numbers.get(v)

    def scalar(self, v: SSAValue) -> str | None:
        """A folded scalar as a literal that is equivalent in ops with tensors of its type; None for
        booleans and other values."""
        number = self.number(v)
        if number is None or isinstance(number, bool):
            return None
        if (text := self._literals.get(v)) is None:
            text = number_text(number, self.element(v))
            text = self._literals[v] = f"({text})" if text.startswith("-") else text
        return text

    def device(self, v: SSAValue) -> str:
        """Return the device of a value's tensor: the rank's device, or the host."""
        layout = dist.layout_of(v)
        return '"cpu"' if layout is not None and layout.host else "mesh.device"

    def full(self, shape: Sequence[str], v: SSAValue) -> str:
        number = self.number(v)
        assert number is not None
        text = number_text(number, self.element(v))
        return (
            f"torch.full({tuple_text(list(shape))}, {text}, dtype={self.dtype(v)}, "
            f"device={self.device(v)})"
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


_NUMBER = re.compile(r"_\d+$")


def _base(hint: str) -> str:
    return _NUMBER.sub("", hint)
