"""What is said to the user about a program: places, carets, several faults in one run.

source = Source(text, "digits.ir")
for fault in verify_all(module, source):
    print(fault)          # digits.ir:12:8: error: ... , the line, and a caret below it
"""

import re
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches

from xdsl.dialects.builtin import (
    FileLineColLoc,
    IntAttr,
    ModuleOp,
    StringAttr,
)
from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.traits import (
    IsolatedFromAbove,
    IsTerminator,
    NoTerminator,
    SymbolOpInterface,
    SymbolTable,
)
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.errors import ShardirError
from shardir.dialects.dist import check_type
from shardir.dialects.places import file_place

MISSING = re.compile(r"\bno (?:mesh|function|symbol) @")
WORD = re.compile(r'"[^"\n]*"|[\w.$]+')


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing when no known word is near."""
    near = get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def one_of(names: Iterable[str]) -> str:
    """`a`, `a or b`, `a, b or c`; words before punctuation."""
    *most, last = sorted(set(names), key=lambda n: (n[0] == "'", n))
    return f"{', '.join(most)} or {last}" if most else last


SHOWN = 300
"""How much of a line is shown around a fault; some lines are a constant of 30,000 numbers."""


@dataclass(frozen=True)
class Diagnostic:
    """One fault and where it is; line 0 when no place is known."""

    message: str
    file: str = "<input>"
    line: int = 0
    column: int = 0
    length: int = 1
    source: str = ""
    notes: tuple[str, ...] = ()
    severity: str = "error"

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file

    def __str__(self) -> str:
        lines = [f"{self.place}: {self.severity}: {self.message}"]
        if self.source:
            first = max(0, self.column - 1 - SHOWN // 2) if len(self.source) > SHOWN else 0
            shown = self.source[first : first + SHOWN]
            before = self.source[first : self.column - 1]
            indent = "".join("\t" if c == "\t" else " " for c in before)
            room = max(1, min(self.length, len(shown) - len(before)))
            lines += [f"  {shown}", f"  {indent}{'^' * room}"]
        lines += [f"  note: {n}" for n in self.notes]
        return "\n".join(lines)


def new_location(file: StringAttr, line: IntAttr, column: IntAttr) -> FileLineColLoc:
    """A location without the checks of its constructor: one is made for each op that is read."""
    loc = object.__new__(FileLineColLoc)
    put = object.__setattr__
    put(loc, "filename", file)
    put(loc, "line", line)
    put(loc, "column", column)
    return loc


class Source:
    """A text, its name, and where its lines begin."""

    def __init__(self, text: str, name: str = "<input>"):
        self.text, self.name = text, name
        self.starts = [0, *(m.end() for m in re.finditer("\n", text))]
        self.file = StringAttr(name)
        self.places: dict[Operation, int] = {}
        """Where ops stand whose own location was written in the text."""
        self._ints: dict[int, IntAttr] = {}
        self._line = 0

    def _int(self, n: int) -> IntAttr:
        if (found := self._ints.get(n)) is None:
            found = self._ints[n] = IntAttr(n)
        return found

    def line_column(self, pos: int) -> tuple[int, int]:
        line = bisect_right(self.starts, pos)
        return line, pos - self.starts[line - 1] + 1

    def location(self, pos: int) -> FileLineColLoc:
        starts, line = self.starts, self._line
        if not (starts[line] <= pos and (line + 1 == len(starts) or pos < starts[line + 1])):
            line = self._line = bisect_right(starts, pos) - 1
        return new_location(self.file, self._int(line + 1), self._int(pos - starts[line] + 1))

    def line_text(self, line: int) -> str:
        if not 0 < line <= len(self.starts):
            return ""
        end = self.starts[line] if line < len(self.starts) else len(self.text)
        return self.text[self.starts[line - 1] : end].rstrip("\r\n")

    def at(
        self, start: int, end: int, message: str, notes: Sequence[str] = (), severity: str = "error"
    ) -> Diagnostic:
        line, column = self.line_column(start)
        return Diagnostic(
            message, self.name, line, column, max(1, end - start), self.line_text(line),
            tuple(notes), severity,
        )  # fmt: skip

    def at_op(self, op: Operation | None, message: str, notes: Sequence[str] = ()) -> Diagnostic:
        """A fault of an op, at its name in this text, or at the place that it says it is from."""
        if op is None:
            return Diagnostic(message, self.name, notes=tuple(notes))
        if (pos := self.places.get(op)) is not None:
            return self.at(pos, self._word_end(pos), message, notes)
        place = file_place(op.location)
        if place is None:
            return Diagnostic(f"{op.name}: {message}", self.name, notes=tuple(notes))
        file, line, column = place
        if file != self.name or not 0 < line <= len(self.starts):
            return Diagnostic(f"{op.name}: {message}", file, line, column, notes=tuple(notes))
        pos = self.starts[line - 1] + column - 1
        return self.at(pos, self._word_end(pos), message, notes)

    def _word_end(self, pos: int) -> int:
        m = WORD.match(self.text, pos)
        return m.end() if m else pos + 1


class Failure(ShardirError):  # noqa: N818
    """What a pass found wrong in the user's program: all faults of one run, each with its op."""

    def __init__(self, faults: Sequence[tuple[Operation | None, str]] | str):
        self.faults: list[tuple[Operation | None, str]] = (
            [(None, faults)] if isinstance(faults, str) else list(faults)
        )
        super().__init__("\n".join(message for _, message in self.faults))

    @classmethod
    def at(cls, op: Operation | None, message: str) -> "Failure":
        return cls([(op, message)])

    def diagnostics(self, source: Source) -> list[Diagnostic]:
        return [source.at_op(op, message) for op, message in self.faults]


_warnings: ContextVar[list[tuple[Operation | None, str]] | None] = ContextVar(
    "warnings", default=None
)


@contextmanager
def collect_warnings() -> Iterator[list[tuple[Operation | None, str]]]:
    """What passes warn about, for the tool around them to show."""
    found: list[tuple[Operation | None, str]] = []
    token = _warnings.set(found)
    try:
        yield found
    finally:
        _warnings.reset(token)


def warn(op: Operation | None, message: str) -> None:
    """Something of the user's program that works, and may not be meant so."""
    if (found := _warnings.get()) is not None:
        found.append((op, message))
    else:
        where = file_place(op.location) if op is not None else None
        place = ":".join(map(str, where)) + ": " if where else ""
        warnings.warn(f"{place}{message}", stacklevel=2)


_teller: ContextVar[Callable[[str], object] | None] = ContextVar("teller", default=None)


@contextmanager
def told(teller: Callable[[str], object]) -> Iterator[None]:
    """How far long passes have come goes to `teller`."""
    token = _teller.set(teller)
    try:
        yield
    finally:
        _teller.reset(token)


def tell(text: str) -> None:
    """How far a long pass has come, for the tool around it to show."""
    if (teller := _teller.get()) is not None:
        teller(text)


class ParseErrors(ShardirError):  # noqa: N818
    """Everything that is wrong in one text."""

    def __init__(self, errors: Sequence[Diagnostic]):
        self.errors = list(errors)
        super().__init__("\n".join(map(str, self.errors)))


@dataclass
class Broken:
    """What a parser lost of a faulty text, so that the rest is verified without cascades."""

    blocks: set[Block] = field(default_factory=set)
    """Blocks that miss ops."""
    ops: set[Operation] = field(default_factory=set)
    """Ops that use values which were lost."""
    symbols: set[str] = field(default_factory=set)
    """Symbols that the lost text may have defined."""


# ---- verification -------------------------------------------------------------------------------


Fault = tuple[Operation, str, tuple[str, ...]]


def verify_all(
    module: Operation, source: Source | None = None, broken: Broken | None = None
) -> list[Diagnostic]:
    """Every fault of a module, each at its op: xDSL's checks, symbols, and dominance."""
    source = source or Source("", "<module>")
    lost = broken or Broken()
    faults: list[Fault] = []

    def report(op: Operation, message: str, *notes: str) -> None:
        if op not in lost.ops and not any(
            re.search(rf"@{re.escape(s)}(?![\w$.])", message) for s in lost.symbols
        ):
            faults.append((op, message, notes))

    around: set[Operation] = set()  # they walk over their bodies, where values are missing
    for op in lost.ops:
        while (parent := op.parent_op()) is not None and parent not in around:
            around.add(parent)
            op = parent
    for op in module.walk():
        if (message := structure_fault(op, lost)) is not None:
            report(op, message)
        check_symbols(op, source, report)
        if op in lost.ops or op in around:
            continue
        try:
            op.verify_()
            check_signature(op)
        except VerifyException as e:
            if not str(e).startswith("Redefinition of symbol"):  # said above, at each redefinition
                report(op, str(e))
        except ShardirError as e:
            report(op, str(e))
        except Exception as e:
            e.add_note(f"while verifying {op.name}")
            raise
    check_dominance(module, report)
    found = [source.at_op(op, message, notes) for op, message, notes in one_for_all(faults)]
    return sorted(found, key=lambda d: (d.line, d.column))


def one_for_all(faults: Sequence[Fault]) -> Iterator[Fault]:
    """A mesh or function that is missing is one fault, however many ops feel it."""
    felt = Counter(message for _, message, _ in faults if MISSING.search(message))
    for op, message, notes in faults:
        n = felt.get(message, 1)
        if n > 0:
            yield op, message, (*notes, f"{n - 1} more ops name it") if n > 1 else notes
        if message in felt:
            felt[message] = 0


def check_signature(op: Operation) -> None:
    """Layouts of a function's arguments, which perhaps no op uses. Raises VerifyException."""
    if isinstance(op, FuncOp):
        for i, t in enumerate(op.function_type.inputs):
            check_type(op, t, f"argument {i}")


def structure_fault(op: Operation, lost: Broken) -> str | None:
    """Terminators, branches and block ends: what xDSL checks in `Operation.verify` itself."""
    block = op.parent
    region = None if block is None else block.parent
    if op.successors:
        if block is None or block.last_op is not op:
            return f"{op.name} branches, so it must end its block"
        if any(s.parent is not region for s in op.successors):
            return f"{op.name} branches to a block of another region"
    if (
        block is not None
        and region is not None
        and block.last_op is op
        and block not in lost.blocks
    ):
        parent = region.parent
        several = region.first_block is not region.last_block
        wants = several or (parent is not None and not parent.has_trait(NoTerminator))
        if wants and not op.has_trait(IsTerminator):
            return f"a block ends with a terminator such as func.return, not with {op.name}"
    for r in op.regions:
        first = r.first_block
        if (
            first is not None
            and first is r.last_block
            and first.first_op is None
            and first not in lost.blocks
            and not op.has_trait(NoTerminator)
        ):
            return f"the body of {op.name} is empty; it must end with a terminator"
    return None


def check_symbols(op: Operation, source: Source, report: Callable[..., None]) -> None:
    if op.regions and op.has_trait(SymbolTable):
        seen: dict[str, Operation] = {}
        for region in op.regions:
            for block in region.blocks:
                for inner in block.ops:
                    trait = inner.get_trait(SymbolOpInterface)
                    name = trait and trait.get_sym_attr_name(inner)
                    if name is None:
                        continue
                    if (first := seen.setdefault(name.data, inner)) is not inner:
                        note = source.at_op(first, "")
                        report(inner, f"@{name.data} is already defined", f"first at {note.place}")


def check_dominance(module: Operation, report: Callable[..., None]) -> None:
    """Every use is dominated by its definition; xDSL does not check that."""
    # A work list instead of recursion: `seen` are the ids of the values that a region may use.
    todo: list[tuple[Region, frozenset[int] | set[int]]] = [(r, set()) for r in module.regions]
    while todo:
        region, outer = todo.pop()
        for block, seen in blocks_with_scope(region, outer):
            for arg in block.args:
                seen.add(id(arg))
            for op in block.ops:
                for i, operand in enumerate(op._operands):
                    if id(operand) not in seen:
                        report(op, undominated(op, i, operand))
                if op.regions:
                    isolated = op.has_trait(IsolatedFromAbove)
                    todo += [(r, set() if isolated else set(seen)) for r in op.regions]
                for result in op.results:
                    seen.add(id(result))


def undominated(op: Operation, i: int, value: SSAValue) -> str:
    name = f"%{value.name_hint}" if value.name_hint else f"operand {i}"
    try:
        owner = value.owner
    except ValueError:
        return f"{name} has no definition"
    inside = owner if isinstance(owner, Block) else owner.parent
    if inside is op.parent:
        return f"{name} is used before it is defined"
    return f"{name} is used where its definition does not dominate it"


def blocks_with_scope(region: Region, outer: Iterable[int]) -> Iterable[tuple[Block, set[int]]]:
    """The blocks of a region, each with what it may use, filled in as the caller goes on."""
    if (first := region.first_block) is None:
        return
    if first is region.last_block:
        yield first, set(outer)
        return
    scopes: dict[Block, set[int]] = {}
    for block, above in dominator_tree(region):
        scopes[block] = set(outer) if above is None else set(scopes[above])
        yield block, scopes[block]


def dominator_tree(region: Region) -> list[tuple[Block, Block | None]]:
    """Reachable blocks, each after its immediate dominator (Cooper, Harvey and Kennedy)."""
    first = region.first_block
    assert first is not None
    order: list[Block] = []
    entered = {first}
    stack = [(first, iter(successors(first)))]
    while stack:
        block, rest = stack[-1]
        for s in rest:
            if s not in entered and s.parent is region:
                entered.add(s)
                stack.append((s, iter(successors(s))))
                break
        else:
            order.append(block)
            stack.pop()
    order.reverse()
    number = {b: i for i, b in enumerate(order)}
    before: dict[Block, list[Block]] = {b: [] for b in order}
    for b in order:
        for s in successors(b):
            if s in before:
                before[s].append(b)
    idom: dict[Block, Block] = {first: first}
    changed = True
    while changed:
        changed = False
        for b in order[1:]:
            new: Block | None = None
            for p in before[b]:
                if p in idom:
                    new = p if new is None else common(p, new, idom, number)
            assert new is not None
            if idom.get(b) is not new:
                idom[b], changed = new, True
    return [(b, None if b is first else idom[b]) for b in order]


def common(a: Block, b: Block, idom: dict[Block, Block], number: dict[Block, int]) -> Block:
    while a is not b:
        while number[a] > number[b]:
            a = idom[a]
        while number[b] > number[a]:
            b = idom[b]
    return a


def successors(block: Block) -> Sequence[Block]:
    return () if block.last_op is None else block.last_op.successors


def verify(module: ModuleOp, source: Source | None = None) -> None:
    """Raises everything that `verify_all` finds."""
    if faults := verify_all(module, source):
        raise ParseErrors(faults)
