"""The variables of lists of values: arguments, results of one op, and what loops leave.

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
    """An element of a list: of a number, or for one in a loop the list, the index in the first run,
    and the step from run to run."""

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
    """The emission of the values of one function that are in lists."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.lists = Lists(self.ops, columns_of(self.f))
        self.of_lists: dict[ValueList, ListVariable] = {}
        self.stacks: dict[ValueList, str] = {}
        """Of lists that are read one by one from an end, the text that takes the next value out."""

    def _next(self, v: SSAValue) -> str | None:
        """The text that takes a value out of its list; None if it has a variable, or no list."""
        place = self.lists.place.get(v)
        if v in self.variables or place is None or place[0] not in self.stacks:
            return None
        return f"{self.of_lists[place[0]].name}{self.stacks[place[0]]}"

    def once(self, v: SSAValue) -> str:
        """The text of a value for its only use."""
        return self._next(v) or self.operand(v)

    def operand(self, v: SSAValue) -> str:
        if (text := self._next(v)) is not None:
            self.line(f"{self.define(v, v.name_hint or 'value').name} = {text}")
        return super().operand(v)

    def name_list(self, of: ValueList, variable: ListVariable) -> None:
        """Give a list its variable, and its values their texts."""
        self.of_lists[of] = variable
        for k, v in enumerate(of.values):
            self.hold(Element(variable, k), v)

    def in_list(self, v: SSAValue) -> ValueList | None:
        """The list of a value; None if it is in none."""
        place = self.lists.place.get(v)
        return place[0] if place is not None else None

    def in_lists(self, values: Iterable[SSAValue]) -> bool:
        """Whether values are in lists of arguments or of results of one op."""
        return any((of := self.in_list(v)) is not None and of.stride for v in values)

    def arguments(self) -> list[str]:
        """The parameters of the function; before its first line comments with their types, and
        lists of them."""
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
        """Write the lines that name values which a sequence has: the arguments, or the results of
        an op."""
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
        """Return the type of the arguments of a list; for states, only if it differs from the type
        of their parameters."""
        if part.of is None:
            return f"each {self.describe(part.values[0])}"
        others: dict[str, list[str]] = {}
        for v, of in zip(part.values, part.of, strict=True):
            if (text := self.describe(v)) != self.describe(of):
                others.setdefault(text, []).append(of.name_hint or "a parameter")
        but = [f"{text} of {listed_names(names)}" for text, names in others.items()]
        return "; ".join(["of each parameter, with its type and layout", *but])

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
        """Write a line with a comment after it, or before it where the line would be too long."""
        if about and self.indent + len(f"{line}  # {about}") > WIDTH:
            self.note(about)
        elif about:
            line += f"  # {about}"
        self.line(line)

    def texts(self, values: Sequence[SSAValue]) -> list[str]:
        """Return the texts of values in order; the values of a list have one text."""
        spots = [self._spot(v) for v in values]
        return texts_of(spots, lambda i: self.operand(values[i]))

    def _spot(self, v: SSAValue) -> Spot | None:
        """The place of a value in a list that has a variable."""
        place, of = self.lists.place.get(v), self.variables.get(v)
        if of is None and place is not None and place[0] in self.of_lists:
            of = self.of_lists[place[0]]
            return Spot(of.name, place[1], len(place[0].values), place[0] in self.stacks)
        if isinstance(of, Element) and of.number is not None:
            return Spot(of.base.name, of.number, of.base.count)
        return None


def _runs(values: Sequence[SSAValue]) -> Iterable[list[SSAValue]]:
    """Yield values with indices one after the other together."""
    run: list[SSAValue] = []
    for v in values:
        if run and index_of(v) != index_of(run[-1]) + 1:
            yield run
            run = []
        run.append(v)
    yield run
