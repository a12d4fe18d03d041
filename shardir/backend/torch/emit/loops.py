"""The loops of a function in the program, and the lists that they read and make."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from xdsl.ir import Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.analysis.loops import Loops
from shardir.analysis.repeats import common_name
from shardir.backend.torch.emit.bundles import Bundle, bundles_of
from shardir.backend.torch.emit.lists import Lists, ValueList, columns_of, index_of
from shardir.backend.torch.emit.names import WIDTH, joined, listed_names, tuple_text, wrapped
from shardir.backend.torch.emit.sequences import Spot, texts_of
from shardir.backend.torch.emit.variables import Variable, VariableScope
from shardir.dialects import dist, train

MIN_TOGETHER = 4
"""The fewest lists that one line makes."""


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


def followers(ops: Iterable[Operation], mesh: Mesh | None) -> set[SSAValue]:
    """The results of started collectives but the first of each, which have no variables: what the
    first one's holds is waited for, and has all of them."""
    found: set[SSAValue] = set()
    for op in ops:
        if isinstance(op, dist.CollectiveOp) and dist.is_started(op):
            if mesh is not None and op.moves(mesh):
                found.update(op.results[1:])
        elif isinstance(op, train.CarriedOp | train.CarryOp | train.ItemOp | train.ItemsOp):
            found.update(op.results if op.operands[0] in found else ())
    return found


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
        self.lists = Lists(self.ops, columns_of(self.f))
        self.followers = followers(self.ops, self.mesh)
        self._around = Loops(self.ops).around
        self.loops: list[OpenLoop] = []
        """The loops around the op that is being written, the outermost first."""
        self.appended: list[str] = []
        """The variables of the last loop that lists hold too."""
        self.emptied: set[str] = set()
        """The lists whose elements a loop takes out."""
        self._variables: dict[ValueList, ListVariable] = {}
        self._gathered: dict[train.ItemOp, ListVariable] = {}
        self._bundles: dict[Operation, Bundle] = {}
        """By op that adds a value to a bundle, or takes it out."""
        for bundle in bundles_of(self.ops, self.followers):
            self._bundles |= dict.fromkeys((*bundle.made, *bundle.read), bundle)
        self._unpacked: set[Bundle] = set()
        self._stacks: dict[ValueList, str] = {}
        """Of lists that are read one by one from an end, the text that takes the next value out."""

    # ---- loops ----

    def enter(self, op: train.Loop, word: str) -> None:
        """Write the head of a loop, and before it the bundles that it fills."""
        filled = (self._bundles.get(x) for x in op.body() if isinstance(x, train.ItemsOp))
        for bundle in dict.fromkeys(b for b in filled if b is not None):
            bundle.name = self.names.new("saved")
            self.emptied.add(bundle.name)
            rows = [self._row(row) for row in bundle.before()]
            self.lines += joined(f"{bundle.name} = [", rows, "]", self.indent)
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
        if len(loop.made) < MIN_TOGETHER:
            empty = [f"{space}{name} = []" for name in loop.made]
        else:
            tail = f" = ([] for _ in range({len(loop.made)}))"
            empty = joined("", loop.made, tail, self.indent)
            if len(empty) > 1:
                empty = joined("(", loop.made, f"){tail}", self.indent)
        self.lines[loop.head : loop.head] = empty

    def _row(self, values: Sequence[SSAValue]) -> str:
        """The text of one row of a bundle."""
        return tuple_text([self.operand(v) for v in values])

    # ---- what enters a loop ----

    def gather(self, items: Iterable[train.ItemOp]) -> None:
        """Write the lists of the values of a loop's items before it, of those that no list has."""
        dead, added = list[str](), set[Bundle]()
        for op in items:
            if (bundle := self._bundles.get(op)) is not None:
                for row in bundle.after() if bundle not in added else ():
                    line = f"{bundle.name}.append({self._row(row)})"
                    self.lines += wrapped(line, self.indent)
                added.add(bundle)
            if bundle is not None or self._is_ready(op):
                dead += self._released(op) if bundle is not None and self.frees else []
                continue
            given = self.texts(op.values)
            hint = common_name([v.name_hint for v in op.values])
            name = self.names.new(f"all_{hint or 'values'}")
            self.lines += joined(f"{name} = [", given, "]", self.indent)
            self._gathered[op] = ListVariable(name, len(op.values))
            self._gathered[op].argument = all(self.variables[v].base.argument for v in op.values)
            self.emptied.add(name)
            if self.frees:
                dead += self._released(op)
        if dead:
            self.lines += joined("del ", dead, "", self.indent)

    def _is_ready(self, op: train.ItemOp) -> bool:
        """Whether the values of an item are in a list in their order; or in one that is freed with
        its last element, elsewhere."""
        place = self.lists.range(op.values)
        if place is None or (variable := self._variables.get(place[0])) is None:
            return False
        return place[2] in (1, -1) or place[0] in self._stacks or variable.argument

    def _released(self, op: train.ItemOp) -> list[str]:
        """The variables of values that only lists are to hold: that nothing reads after the head of
        the item's loop but items, which have their lists by now."""
        dead, only_here = list[str](), dict[ValueList | SSAValue, bool]()
        where, loop = self.storages.at, self._around(op)
        head = where[loop] if loop is not None and not self.loops else -1
        for v in op.values:
            if v not in self.variables:  # of a bundle
                continue
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
        return dead

    def item(self, op: train.ItemOp) -> str | None:
        """The element of the run: taken out of its list, if nothing else reads that."""
        if (bundle := self._bundles.get(op)) is not None:
            if bundle not in self._unpacked:
                self._unpacked.add(bundle)
                left = [self.define(x.out, x.out.name_hint or "value").name for x in bundle.read]
                self.lines += wrapped(f"{', '.join(left)} = {bundle.name}.pop()", self.indent)
            return None
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
        if step == -1:
            index = f"-1 - {i}" if first == n - 1 else f"{first} - {i}"
        else:
            of_run = i if step == 1 else f"{step} * {i}"
            index = f"{of_run} + {first}" if first else of_run
        self.hold(Element(variable, index, place), op.out)
        return None

    # ---- what leaves a loop ----

    def collect(self, op: train.ItemsOp) -> None:
        """Write the line that adds the value of the run to a list, unless it is of a list."""
        self.operand(op.x)
        if (bundle := self._bundles.get(op)) is not None:
            if op is bundle.made[-1]:
                row = self._row([x.x for x in bundle.made])
                self.lines += wrapped(f"{bundle.name}.append({row})", self.indent)
            return
        of, _ = self.lists.place[op.outs[0]]
        source = self.variables[op.x]
        if isinstance(source, Element) and source.place is not None:
            held, first, step = source.place
            if (first, step, len(held.values)) == (0, 1, len(op.outs)):
                self._name(of, source.base)
            else:
                for k, v in enumerate(op.outs):
                    self.hold(Element(source.base, first + step * k), v)
            return
        name = self.names.new(f"all_{of.hint or 'values'}")
        variable = ListVariable(name, len(of.values))
        self.loops[-1].made.append(variable.name)
        self.line(f"{variable.name}.append({source.name})")
        if (take := self._order(of)) is not None:
            self._stacks[of] = take
            self._variables[of] = variable
            self.emptied.add(variable.name)
        else:
            self._name(of, variable)

    def _order(self, of: ValueList) -> str | None:
        """The text that takes the next value out of a list, if each has one reader, an op or a
        loop, and those read the list from one end to the other; None if they do not."""
        where, order = self.storages.at, dict[int, list[int]]()
        around = self.loops[-2].op if len(self.loops) > 1 else None
        items: dict[train.Loop, dict[train.ItemOp, None]] = {}
        for k, v in enumerate(of.values):
            users = sorted({u.operation for u in v.uses} & where.keys(), key=where.__getitem__)
            reader = users[0] if users else None
            if isinstance(reader, train.ItemOp):
                item, reader = reader, self._around(reader)
                if len(users) > 1 or reader is None:
                    return None
                items.setdefault(reader, {})[item] = None
            elif reader is None or order.setdefault(where[reader], [k]) != [k]:
                return None
            if self._around(reader) is not around:
                return None
        for loop, several in items.items():
            ranges = [self.lists.range(x.values) for x in sorted(several, key=where.__getitem__)]
            places = [place for place in ranges if place is not None]
            if len(places) < len(ranges) or where[loop] in order:
                return None
            order[where[loop]] = [
                first + step * run for run in range(loop.runs) for _, first, step in places
            ]
        taken = [k for at in sorted(order) for k in order[at]]
        ends = {".pop(0)": list(range(len(of.values)))}
        ends[".pop()"] = ends[".pop(0)"][::-1]
        return next((take for take, wanted in ends.items() if taken == wanted), None)

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

    def _name(self, of: ValueList, variable: ListVariable) -> None:
        """Give a list its variable, and its values their texts."""
        self._variables[of] = variable
        for k, v in enumerate(of.values):
            self.hold(Element(variable, k), v)

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
        variable = ListVariable(self.names.new(part.hint, "values"), len(part.values))
        self._name(part, variable)
        start = index_of(part.values[0])
        stop = index_of(part.values[-1]) + 1
        stride = f":{part.stride}" if part.stride > 1 else ""
        line = f"{variable.name} = {source}[{start}:{stop}{stride}]"
        self._described(line, self._describe_list(part) if variable.argument else "")

    def _describe_list(self, part: ValueList) -> str:
        """The type of the arguments of a list; of states, where it is another than that of their
        parameters."""
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
        """The texts of values one after the other; those of a list have one."""
        spots = [self._spot(v) for v in values]
        return texts_of(spots, lambda i: self.operand(values[i]))

    def _spot(self, v: SSAValue) -> Spot | None:
        """The place of a value in a list that has a variable."""
        place, of = self.lists.place.get(v), self.variables.get(v)
        if of is None and place is not None and place[0] in self._variables:
            of = self._variables[place[0]]
            return Spot(of.name, place[1], len(place[0].values), place[0] in self._stacks)
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
