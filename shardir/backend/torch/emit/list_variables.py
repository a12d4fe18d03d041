"""The variables of lists of values: arguments, results of one op, and results of loops.

%w0, %b0, %w1, %b1, ...    ->    all_w = arguments[0:32:2]  # each tensor<8x4xf32>
"""

from collections.abc import Iterable, Sequence
from typing import Any

from xdsl.ir import Operation, SSAValue

from shardir.backend.torch.emit.lists import Lists, ValueList, columns_of, index_of
from shardir.backend.torch.emit.names import WIDTH, join_items, listed_names
from shardir.backend.torch.emit.sequences import Spot, texts_of
from shardir.backend.torch.emit.variables import Variable, VariableScope


class ListVariable(Variable):
    """The variable of a list, with the number of its elements."""

    def __init__(self, name: str, count: int):
        super().__init__(name)
        self.count = count


class Element(Variable):
    """An element of a list, with an index that is a number or, in a loop, text; then `place` has
    the list, the index in the first run, and the step between runs."""

    def __init__(
        self, of: ListVariable, index: int | str, place: tuple[ValueList, int, int] | None = None
    ):
        super().__init__(f"{of.name}[{index}]")
        self._of, self.place = of, place
        self.number = index if isinstance(index, int) else None

    @property
    def base(self) -> ListVariable:
        return self._of


class ListScope(VariableScope):
    """The emission of one function's values in lists."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.lists = Lists(self.ops, columns_of(self.f))
        self.of_lists: dict[ValueList, ListVariable] = {}
        self.stacks: dict[ValueList, str] = {}
        """The text that pops the next value, for lists that are read one by one from an end."""

    def _next(self, v: SSAValue) -> str | None:
        """The text that pops a value from its list; None if it has a variable, or no list."""
        place = self.lists.place.get(v)
        if v in self.variables or place is None or place[0] not in self.stacks:
            return None
        return f"{self.of_lists[place[0]].name}{self.stacks[place[0]]}"

    def once(self, v: SSAValue) -> str:
        """The text of a value that is used once."""
        return self._next(v) or self.operand(v)

    def operand(self, v: SSAValue) -> str:
        if (text := self._next(v)) is not None:
            self.line(f"{self.define(v, v.name_hint or 'value').name} = {text}")
        return super().operand(v)

    def name_list(self, values: ValueList, variable: ListVariable) -> None:
        """Set the variable of a list, and the texts of its values."""
        self.of_lists[values] = variable
        for k, v in enumerate(values.values):
            self.hold(Element(variable, k), v)

    def in_list(self, v: SSAValue) -> ValueList | None:
        """The list of a value, or None."""
        place = self.lists.place.get(v)
        return place[0] if place is not None else None

    def in_lists(self, values: Iterable[SSAValue]) -> bool:
        """Whether a value is in a list of arguments or of results of one op."""
        return any((of := self.in_list(v)) is not None and of.stride for v in values)

    def arguments(self) -> list[str]:
        """Return the parameters of the function; write comments with their types, and their
        lists."""
        args = self.block.args
        if not self.in_lists(args):
            for i, a in enumerate(args):
                self.define(a, a.name_hint or f"arg{i}")
            for a in args:
                self.note(f"{self.variables[a].name}: {self.describe(a)}")
            return [self.variables[a].name for a in args]
        source = self.names.new("arguments")
        self.bind(args, source, None)
        return [f"*{source}"]

    def bind(self, values: Sequence[SSAValue], source: str, op: Operation | None) -> None:
        """Write the lines that name the values of the sequence `source`: the arguments, or the
        results of an op."""
        for part in self.lists.parts(values):
            if isinstance(part, ValueList):
                self._bind_list(part, source)
                continue
            for run in _runs(part):
                self._bind_each(run, source, op)
        if op is not None:
            self.line(f"del {source}")

    def _bind_list(self, part: ValueList, source: str) -> None:
        variable = ListVariable(self.names.new(part.hint, "values"), len(part.values))
        self.name_list(part, variable)
        start = index_of(part.values[0])
        stop = index_of(part.values[-1]) + 1
        stride = f":{part.stride}" if part.stride > 1 else ""
        line = f"{variable.name} = {source}[{start}:{stop}{stride}]"
        self._write_described(line, self._describe_list(part) if variable.argument else "")

    def _describe_list(self, part: ValueList) -> str:
        """Return the type of the arguments of a list. Types of states are described only where they
        differ from their parameters' types."""
        if part.of is None:
            return f"each {self.describe(part.values[0])}"
        states_of: dict[str, list[str]] = {}
        for v, parameter in zip(part.values, part.of, strict=True):
            if (text := self.describe(v)) != self.describe(parameter):
                states_of.setdefault(text, []).append(parameter.name_hint or "a parameter")
        exceptions = [f"{text} of {listed_names(names)}" for text, names in states_of.items()]
        return "; ".join(["of each parameter, with its type and layout", *exceptions])

    def _bind_each(self, run: list[SSAValue], source: str, op: Operation | None) -> None:
        start, stop = index_of(run[0]), index_of(run[-1]) + 1
        if op is None:
            for v in run:
                name = self.define(v, v.name_hint or f"arg{index_of(v)}").name
                self._write_described(f"{name} = {source}[{index_of(v)}]", self.describe(v))
            return
        left = [self.result(v, op).name if self.is_read(v) else "_" for v in op.results[start:stop]]
        if len(run) == 1:
            self.line(f"{left[0]} = {source}[{start}]")
        else:
            self.lines += join_items("(", left, f") = {source}[{start}:{stop}]", self.indent)

    def _write_described(self, line: str, about: str) -> None:
        """Write a line with a comment after it, or before it if the line would be too long."""
        if about and self.indent + len(f"{line}  # {about}") > WIDTH:
            self.note(about)
        elif about:
            line += f"  # {about}"
        self.line(line)

    def texts(self, values: Sequence[SSAValue]) -> list[str]:
        """Return the texts of values in order; values of one list may share a text."""
        spots = [self._spot(v) for v in values]
        return texts_of(spots, lambda i: self.operand(values[i]))

    def _spot(self, v: SSAValue) -> Spot | None:
        """The place of a value in a list with a variable, or None."""
        place, variable = self.lists.place.get(v), self.variables.get(v)
        if variable is None and place is not None and place[0] in self.of_lists:
            variable = self.of_lists[place[0]]
            return Spot(variable.name, place[1], len(place[0].values), place[0] in self.stacks)
        if isinstance(variable, Element) and variable.number is not None:
            return Spot(variable.base.name, variable.number, variable.base.count)
        return None


def _runs(values: Sequence[SSAValue]) -> Iterable[list[SSAValue]]:
    """Yield groups of values with consecutive indices."""
    run: list[SSAValue] = []
    for v in values:
        if run and index_of(v) != index_of(run[-1]) + 1:
            yield run
            run = []
        run.append(v)
    yield run
