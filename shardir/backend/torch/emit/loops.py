"""The emission of loops."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from xdsl.ir import Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.analysis.loops import Loops
from shardir.analysis.repeats import common_name
from shardir.backend.torch.emit.bundles import Bundle, bundles_of
from shardir.backend.torch.emit.list_variables import Element, ListScope, ListVariable
from shardir.backend.torch.emit.lists import ValueList
from shardir.backend.torch.emit.names import join_items, tuple_text, wrap_statement
from shardir.dialects import dist, train

MIN_TOGETHER = 4
"""The minimum number of lists that one line creates together."""


def followers(ops: Iterable[Operation], mesh: Mesh | None) -> set[SSAValue]:
    """Return the results of started collectives without variables: all but the first. The variable
    of the first result holds the pending collective, which returns all results."""
    following: set[SSAValue] = set()
    for op in ops:
        if isinstance(op, dist.CollectiveOp) and dist.is_started(op):
            if mesh is not None and op.moves(mesh):
                following.update(op.results[1:])
        elif isinstance(op, train.CarriedOp | train.CarryOp | train.ItemOp | train.ItemsOp):
            following.update(op.results if op.operands[0] in following else ())
    return following


@dataclass
class OpenLoop:
    """A loop whose body is being written."""

    op: train.Loop
    index: str
    """The loop variable: the index of the run."""
    head: int
    """The line of its `for`."""
    made: list[str] = field(default_factory=list)
    """The lists that the loop fills."""
    collected: list[str] = field(default_factory=list)
    """The variables whose values are in lists too: freed after the loop."""
    unread: list[str] = field(default_factory=list)
    """The elements of the loop's lists that nothing reads, except `ends`."""
    ends: list[str] = field(default_factory=list)
    """The unread elements before the first one that is popped, as slices of lists."""


class LoopScope(ListScope):
    """The emission of the loops of one function."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.followers = followers(self.ops, self.mesh)
        self.around = Loops(self.ops).around
        self.sums: dict[SSAValue, SSAValue] = {}
        """The sum of each addend that is added in place; returned addends map to themselves."""
        self.placeable: dict[SSAValue, bool] = {}
        """The values that can have slots in an arena (of a collective the first result), and
        whether each run of a loop has one."""
        self.loops: list[OpenLoop] = []
        """The loops around the current op, the outermost first."""
        self.appended: list[str] = []
        """The variables of the last loop whose values are in lists too."""
        self.emptied: set[str] = set()
        """The lists that loops empty by popping."""
        self._left: dict[train.Loop, list[str]] = {}
        """The lists with elements left, by the last loop that pops from them."""
        self._gathered: dict[train.ItemOp, ListVariable] = {}
        self._readers: dict[ValueList | SSAValue, tuple[int, int]] = {}
        self._bundles: dict[Operation, Bundle] = {}
        """The bundle of each op that adds a value to one, or takes a value out."""
        for bundle in bundles_of(self.ops, self.followers):
            self._bundles |= dict.fromkeys((*bundle.made, *bundle.read), bundle)
        self._unpacked: set[Bundle] = set()

    # ---- loops ----

    def enter(self, op: train.Loop, word: str) -> None:
        """Write the head of a loop, after the bundles that the loop fills."""
        filled = (self._bundles.get(x) for x in op.body() if isinstance(x, train.ItemsOp))
        for bundle in dict.fromkeys(b for b in filled if b is not None):
            bundle.name = self.names.new("saved")
            self.emptied.add(bundle.name)
            rows = [self._row(row) for row in bundle.before()]
            self.lines += join_items(f"{bundle.name} = [", rows, "]", self.indent)
        index = self.names.new(word)
        self.loops.append(OpenLoop(op, index, len(self.lines)))
        self.line(f"for {index} in range({op.runs}):")
        self.indent += 4

    def totals_of(self, op: train.MicrobatchesOp) -> list[train.OfMicrobatches]:
        """The live ops of a loop over microbatches that add to sums or collect values."""
        totals = (x for x in op.body() if isinstance(x, train.OfMicrobatches))
        return [x for x in totals if x in self.storages.at]

    def leave(self) -> None:
        """End the innermost loop."""
        if self.lines[-1].endswith(":"):
            self.line("pass")
        self.indent -= 4
        self.source_line = None
        loop = self.loops.pop()
        self.appended = [*loop.collected, *self._left.pop(loop.op, ())]
        space = " " * self.indent
        if len(loop.made) < MIN_TOGETHER:
            empty = [f"{space}{name} = []" for name in loop.made]
        else:
            tail = f" = ([] for _ in range({len(loop.made)}))"
            empty = join_items("", loop.made, tail, self.indent)
            if len(empty) > 1:
                empty = join_items("(", loop.made, f"){tail}", self.indent)
        self.lines[loop.head : loop.head] = empty
        for element in loop.unread if self.frees and not self.loops else ():
            self.line(f"{element} = None")
        for part in loop.ends:
            self.line(f"del {part}")

    def _row(self, values: Sequence[SSAValue]) -> str:
        """The text of one row of a bundle."""
        return tuple_text([self.operand(v) for v in values])

    # ---- values that enter a loop ----

    def gather(self, items: Iterable[train.ItemOp]) -> None:
        """Write lists before a loop for the values of items that are in no list yet."""
        dead, added = list[str](), set[Bundle]()
        for op in items:
            if (bundle := self._bundles.get(op)) is not None:
                for row in bundle.after() if bundle not in added else ():
                    line = f"{bundle.name}.append({self._row(row)})"
                    self.lines += wrap_statement(line, self.indent)
                added.add(bundle)
            if bundle is not None or self._is_ready(op):
                dead += self._dead_variables(op) if bundle is not None and self.frees else []
                continue
            elements = self.texts(op.values)
            hint = common_name([v.name_hint for v in op.values])
            name = self.names.new(f"all_{hint or 'values'}")
            self.lines += join_items(f"{name} = [", elements, "]", self.indent)
            self._gathered[op] = ListVariable(name, len(op.values))
            self._gathered[op].argument = all(self.variables[v].base.argument for v in op.values)
            self.emptied.add(name)
            if self.frees:
                dead += self._dead_variables(op)
        if dead:
            self.lines += join_items("del ", dead, "", self.indent)

    def _is_ready(self, op: train.ItemOp) -> bool:
        """Whether the values of an item are in a list in order, or in a list of arguments or one
        that is popped."""
        place = self.lists.range(op.values)
        if place is None or (variable := self.of_lists.get(place[0])) is None:
            return False
        return place[2] in (1, -1) or place[0] in self.stacks or variable.argument

    def _dead_variables(self, op: train.ItemOp) -> list[str]:
        """The variables of an item's values that are dead at the head of its loop: later readers
        are items, which read their lists."""
        dead, only_here = list[str](), dict[ValueList | SSAValue, bool]()
        where, loop = self.storages.at, self.around(op)
        head = where[loop] if loop is not None and not self.loops else -1
        for v in op.values:
            if v not in self.variables:  # of a bundle
                continue
            base = self.variables[v].base
            of = self.in_list(v)
            unit = of if of is not None and of in self.of_lists else v
            if base.argument or base.name in self.emptied:
                continue
            if unit not in only_here:
                item, other = self._last_readers(unit)
                only_here[unit] = other < head and (item < head or item <= where[op])
            if only_here[unit]:
                dead.append(base.name)
                self.emptied.add(base.name)
        return dead

    def _last_readers(self, unit: ValueList | SSAValue) -> tuple[int, int]:
        """The indices of the last item and of the last other op that read a value or the values of
        a list; -1 for an op that is not emitted, -2 if there is none."""
        if (readers := self._readers.get(unit)) is None:
            last = [-2, -2]
            for v in unit.values if isinstance(unit, ValueList) else [unit]:
                for use in v.uses:
                    is_other = not isinstance(use.operation, train.ItemOp)
                    at = self.storages.at.get(use.operation, -1)
                    last[is_other] = max(last[is_other], at)
            readers = self._readers[unit] = last[0], last[1]
        return readers

    def item(self, op: train.ItemOp) -> str | None:
        """The text that pops the element of the run; None if the item has a variable instead."""
        if (bundle := self._bundles.get(op)) is not None:
            if bundle not in self._unpacked:
                self._unpacked.add(bundle)
                targets = [self.define(x.out, x.out.name_hint or "value").name for x in bundle.read]
                self.lines += wrap_statement(
                    f"{', '.join(targets)} = {bundle.name}.pop()", self.indent
                )
            return None
        if (gathered := self._gathered.get(op)) is not None:
            if not gathered.argument:
                return f"{gathered.name}.pop(0)"
            place = ValueList(list(op.values), 0), 0, 1
            self.hold(Element(gathered, self.loops[-1].index, place), op.out)
            return None
        place = self.lists.range(op.values)
        assert place is not None
        values, first, step = place
        variable, n = self.of_lists[values], len(values.values)
        if (take := self.stacks.get(values)) is not None:
            return f"{variable.name}{take}"
        i = self.loops[-1].index
        if step == -1:
            index = f"-1 - {i}" if first == n - 1 else f"{first} - {i}"
        else:
            of_run = i if step == 1 else f"{step} * {i}"
            index = f"{of_run} + {first}" if first else of_run
        self.hold(Element(variable, index, place), op.out)
        return None

    # ---- values that leave a loop ----

    def collect(self, op: train.ItemsOp) -> None:
        """Write the line that appends the value of the run to a list, unless the value is an
        element of a list itself."""
        self.operand(op.x)
        if (bundle := self._bundles.get(op)) is not None:
            if op is bundle.made[-1]:
                row = self._row([x.x for x in bundle.made])
                self.lines += wrap_statement(f"{bundle.name}.append({row})", self.indent)
            return
        of, _ = self.lists.place[op.outs[0]]
        source = self.variables[op.x]
        if isinstance(source, Element) and source.place is not None:
            elements, first, step = source.place
            if (first, step, len(elements.values)) == (0, 1, len(op.outs)):
                self.name_list(of, source.base)
            else:
                for k, v in enumerate(op.outs):
                    self.hold(Element(source.base, first + step * k), v)
            return
        name = self.names.new(f"all_{of.hint or 'values'}")
        variable = ListVariable(name, len(of.values))
        self.loops[-1].made.append(variable.name)
        self.line(f"{variable.name}.append({source.name})")
        n, unread = len(of.values), self._unread(of)
        if (order := self._order(of, unread)) is not None:
            take, last, first = order
            ends = range(first) if take == ".pop(0)" else range(n - first, n)
            unread -= {*ends}
            if ends:
                part = f"[:{first}]" if ends.start == 0 else f"[{ends.start}:]"
                self.loops[-1].ends.append(f"{variable.name}{part}")
            self.stacks[of] = take
            self.of_lists[of] = variable
            if last is None:
                self.emptied.add(variable.name)
            else:
                self._left.setdefault(last, []).append(variable.name)
        else:
            self.name_list(of, variable)
        self.loops[-1].unread += [f"{variable.name}[{k}]" for k in sorted(unread)]

    def _unread(self, of: ValueList) -> set[int]:
        """The indices of the elements of a list that nothing reads."""
        where = self.storages.at
        return {
            k for k, v in enumerate(of.values) if all(use.operation not in where for use in v.uses)
        }

    def _order(
        self, of: ValueList, unread: Collection[int]
    ) -> tuple[str, train.Loop | None, int] | None:
        """Return the text that pops the next value of a list; None unless each value has one
        reader, an op or a loop, and the readers read the list from one end to the other. Return
        also the last loop that pops values, if unread values are left after it, and the number of
        unread values before the first."""
        where, order = self.storages.at, dict[int, list[int]]()
        around = self.loops[-2].op if len(self.loops) > 1 else None
        items: dict[train.Loop, dict[train.ItemOp, None]] = {}
        for k, v in enumerate(of.values):
            users = sorted({u.operation for u in v.uses} & where.keys(), key=where.__getitem__)
            reader = users[0] if users else None
            if len(users) > 1 and any(isinstance(user, train.ItemOp) for user in users):
                return None
            if isinstance(reader, train.ItemOp):
                item, reader = reader, self.around(reader)
                if reader is None:
                    return None
                items.setdefault(reader, {})[item] = None
            elif reader is None:
                continue
            elif order.setdefault(where[reader], [k]) != [k]:
                return None
            if self.around(reader) is not around:
                return None
        for loop, several in items.items():
            if loop.runs * len(several) > len(of.values):  # they read other values too
                return None
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
        for take, wanted in ends.items():
            first = next((i for i, k in enumerate(wanted) if k not in unread), 0)
            if taken == wanted[first:]:
                return take, None, first
            last = next((loop for loop in items if where[loop] == max(order)), None)
            if last is not None and taken == wanted[first : first + len(taken)]:
                return take, last, first
        return None
