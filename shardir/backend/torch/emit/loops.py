"""The loops of a function in the program, and the lists that they read and make."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from xdsl.ir import Operation, SSAValue

from shardir.analysis.loops import Loops
from shardir.analysis.repeats import common_name
from shardir.backend.torch.emit.lists import Lists, ValueList, index_of, rows
from shardir.backend.torch.emit.names import WIDTH, joined
from shardir.backend.torch.emit.variables import Variable, VariableScope
from shardir.dialects import train


class Element(Variable):
    """An element of a list, and for one in a loop the list, the index in the first run, and the
    step from run to run."""

    def __init__(self, of: Variable, index: str, place: tuple[ValueList, int, int] | None = None):
        super().__init__(f"{of.name}[{index}]")
        self._of, self.place = of, place

    @property
    def base(self) -> Variable:
        return self._of


@dataclass
class OpenLoop:
    """A loop whose body is being written."""

    op: train.Loop
    index: str
    """The variable of the number of the run."""
    head: int
    """The line of its `for`."""
    made: list[str] = field(default_factory=list)
    """The lists that it fills."""
    collected: list[str] = field(default_factory=list)
    """The variables that lists hold too: free after the loop."""


class ListScope(VariableScope):
    """The emission of the loops of one function."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.lists = Lists(self.ops)
        self._around = Loops(self.ops).around
        self.loops: list[OpenLoop] = []
        """The loops around the op that is being written, the outermost first."""
        self.appended: list[str] = []
        """The variables of the last loop that lists hold too."""
        self.emptied: set[str] = set()
        """The lists whose elements a loop takes out."""
        self._variables: dict[ValueList, Variable] = {}
        self._gathered: dict[train.ItemOp, Variable] = {}
        self._stacks: dict[ValueList, str] = {}
        """Of lists that are read one by one from an end, the text that takes the next value out."""

    # ---- loops ----

    def enter(self, op: train.Loop, word: str) -> None:
        """Write the head of a loop."""
        index = self.names.new(word)
        self.loops.append(OpenLoop(op, index, len(self.lines)))
        self.line(f"for {index} in range({op.runs}):")
        self.indent += 4

    def leave(self) -> None:
        """End the innermost loop."""
        if self.lines[-1].endswith(":"):
            self.line("pass")
        self.indent -= 4
        self.source_line = None
        loop = self.loops.pop()
        self.appended = loop.collected
        space = " " * self.indent
        empty = (f"{space}{name} = []" for name in loop.made)
        self.lines[loop.head : loop.head] = empty

    # ---- what enters a loop ----

    def gather(self, op: train.ItemOp) -> None:
        """Write the list of an item's values before its loop, if none has them."""
        place = self.lists.range(op.values)
        if place is not None and place[0] in self._variables:
            return
        given = self.texts(op.values)
        name = self.names.new(f"all_{common_name([v.name_hint for v in op.values]) or 'values'}")
        self.lines += joined(f"{name} = [", given, "]", self.indent)
        self._gathered[op] = Variable(name)
        self._gathered[op].argument = all(self.variables[v].base.argument for v in op.values)
        self.emptied.add(name)
        if self.frees:
            self._release(op)

    def _release(self, op: train.ItemOp) -> None:
        """Delete the variables of values that only lists are to hold: that nothing reads after the
        head of the item's loop but items, which have their lists by now."""
        dead, only_here = [], dict[ValueList | SSAValue, bool]()
        where, loop = self.storages.at, self._around(op)
        head = where[loop] if loop is not None and not self.loops else -1
        for v in op.values:
            base = self.variables[v].base
            of = self.in_list(v)
            held = of if of is not None and of in self._variables else v
            if held not in only_here:
                values = held.values if isinstance(held, ValueList) else [held]
                readers = {use.operation for x in values for use in x.uses}
                only_here[held] = all(
                    where.get(r, -1) < head
                    or (isinstance(r, train.ItemOp) and where[r] <= where[op])
                    for r in readers
                )
            if not base.argument and only_here[held] and base.name not in self.emptied:
                dead.append(base.name)
                self.emptied.add(base.name)
        if dead:
            self.lines += joined("del ", dead, "", self.indent)

    def item(self, op: train.ItemOp) -> str | None:
        """The element of the run: taken out of its list, if nothing else reads that."""
        if (gathered := self._gathered.get(op)) is not None:
            if not gathered.argument:
                return f"{gathered.name}.pop(0)"
            place = ValueList(list(op.values), 0), 0, 1
            self.hold(Element(gathered, self.loops[-1].index, place), op.out)
            return None
        place = self.lists.range(op.values)
        assert place is not None
        of, first, step = place
        variable, n = self._variables[of], len(of.values)
        if (take := self._stacks.get(of)) is not None:
            return f"{variable.name}{take}"
        i = self.loops[-1].index
        if step == 1:
            index = f"{i} + {first}" if first else i
        else:
            index = f"-1 - {i}" if first == n - 1 else f"{first} - {i}"
        self.hold(Element(variable, index, place), op.out)
        return None

    # ---- what leaves a loop ----

    def collect(self, op: train.ItemsOp) -> None:
        """Write the line that adds the value of the run to a list, unless it is of a list."""
        self.operand(op.x)
        of, _ = self.lists.place[op.outs[0]]
        source = self.variables[op.x]
        place = source.place if isinstance(source, Element) else None
        if place is not None and place[1:] == (0, 1) and len(place[0].values) == len(op.outs):
            variable = source.base
        else:
            variable = Variable(self.names.new(f"all_{of.hint or 'values'}"))
            self.loops[-1].made.append(variable.name)
            self.line(f"{variable.name}.append({source.name})")
            if (take := self._order(of)) is not None:
                self._stacks[of] = take
                self._variables[of] = variable
                self.emptied.add(variable.name)
                return
        self._name(of, variable)

    def _order(self, of: ValueList) -> str | None:
        """The text that takes the next value out of a list, if each has one reader, an op or a
        loop, and those read the list from one end to the other; None if they do not."""
        where, readers = self.storages.at, dict[int, list[int]]()
        around = self.loops[-2].op if len(self.loops) > 1 else None
        taken: dict[train.ItemOp, tuple[list[int], train.Loop]] = {}
        for k, v in enumerate(of.values):
            users = sorted({u.operation for u in v.uses} & where.keys(), key=where.__getitem__)
            indices, reader = [k], users[0] if users else None
            if isinstance(reader, train.ItemOp):
                if len(users) > 1:
                    return None
                if reader not in taken:
                    place, loop = self.lists.range(reader.values), self._around(reader)
                    if place is None or loop is None:
                        return None
                    numbers = [place[1] + place[2] * i for i in range(len(reader.values))]
                    taken[reader] = numbers, loop
                indices, reader = taken[reader]
            if reader is None or self._around(reader) is not around:
                return None
            before = readers.setdefault(where[reader], indices)
            if before is not indices and before != indices:
                return None
        order = [k for at in sorted(readers) for k in readers[at]]
        ends = {".pop(0)": list(range(len(of.values)))}
        ends[".pop()"] = ends[".pop(0)"][::-1]
        return next((take for take, wanted in ends.items() if order == wanted), None)

    def _next(self, v: SSAValue) -> str | None:
        """The text that takes a value out of its list; None if it has a variable, or no list."""
        place = self.lists.place.get(v)
        if v in self.variables or place is None or place[0] not in self._stacks:
            return None
        return f"{self._variables[place[0]].name}{self._stacks[place[0]]}"

    def once(self, v: SSAValue) -> str:
        """The text of a value for its only use."""
        return self._next(v) or self.operand(v)

    def operand(self, v: SSAValue) -> str:
        if (text := self._next(v)) is not None:
            self.line(f"{self.define(v, v.name_hint or 'value').name} = {text}")
        return super().operand(v)

    def _name(self, of: ValueList, variable: Variable) -> None:
        """Give a list its variable, and its values their texts."""
        self._variables[of] = variable
        for k, v in enumerate(of.values):
            self.hold(Element(variable, str(k)), v)

    # ---- several values at once ----

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
        variable = Variable(self.names.new(part.hint, "values"))
        self._name(part, variable)
        first, start = part.values[0], index_of(part.values[0])
        stop = index_of(part.values[-1]) + 1
        stride = f":{part.stride}" if part.stride > 1 else ""
        line = f"{variable.name} = {source}[{start}:{stop}{stride}]"
        self._described(line, f"each {self.describe(first)}" if variable.argument else "")

    def _bind_each(self, run: list[SSAValue], source: str, op: Operation | None) -> None:
        start, stop = index_of(run[0]), index_of(run[-1]) + 1
        if op is None:
            for v in run:
                name = self.define(v, v.name_hint or f"arg{index_of(v)}").name
                self._described(f"{name} = {source}[{index_of(v)}]", self.describe(v))
            return
        left = [self.result(v, op).name if self.is_read(v) else "_" for v in op.results[start:stop]]
        if len(run) == 1:
            self.line(f"{left[0]} = {source}[{start}]")
        else:
            self.lines += joined("(", left, f") = {source}[{start}:{stop}]", self.indent)

    def _described(self, line: str, about: str) -> None:
        """Write a line with a comment after it, or before it where the line would be too long."""
        if about and self.indent + len(f"{line}  # {about}") > WIDTH:
            self.note(about)
        elif about:
            line += f"  # {about}"
        self.line(line)

    def texts(self, values: Sequence[SSAValue]) -> list[str]:
        """The texts of values one after the other; all values of a list have one."""
        out = []
        for part in rows(values, self.lists):
            if isinstance(part, SSAValue):
                out.append(self.operand(part))
                continue
            lists, n = part
            if not all(of in self._variables for of in lists):  # each value has a variable as yet
                heads = (of.values[: abs(n)] for of in lists)
                some = [v for row in zip(*heads, strict=True) for v in row]
                out += map(self.operand, some if n > 0 else reversed(some))
                continue
            if n < 0:
                out.append(f"*reversed({self._variables[lists[0]].name})")
                continue
            names = [
                self._variables[of].name + (f"[:{n}]" if len(of.values) > n else "") for of in lists
            ]
            if len(names) == 1:
                out.append(f"*{names[0]}")
            else:
                out.append(f"*(x for of_each in zip({', '.join(names)}) for x in of_each)")
        return out


def _runs(values: Sequence[SSAValue]) -> Iterable[list[SSAValue]]:
    """Yield values with indices one after the other together."""
    run: list[SSAValue] = []
    for v in values:
        if run and index_of(v) != index_of(run[-1]) + 1:
            yield run
            run = []
        run.append(v)
    yield run
