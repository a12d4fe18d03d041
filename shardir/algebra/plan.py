"""Plans: layouts and marks of a program's values, by patterns of their names; one line each.

    megatron(tp) * fsdp(dp)                                     // presets
    inputs : [{dp}]                                             // each input
    "*.attn.{q,k,v}_proj.weight" : [{tp}], states [{tp, dp}]    // parameters of these names
    "*.wte.weight" : [{dp}], uses [], recompute                 // gathered where it is used, twice
    "*.w" : [], states [{dp}] on host                           // updated on the host
    values "*.mlp" : [{dp}]                                     // results of ops
    values "layers.{2,3}.*" : stage = 1

A layout with fewer dimensions than the value is of the leading ones; the others are unsharded. Of
the lines that match a name, the first with a layout decides on the layout, the first with `uses` on
that, and so on. In a pattern `*` is any text, `?` any character, `{a,b}` one of several texts, and
a character in brackets, `[*]`, stands for itself. Text after `//` or `#` is a comment.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache, cached_property
from typing import Any

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, axes_text
from shardir.algebra.notation import NotationValues, Word, grammar
from shardir.algebra.notation import read as read_notation
from shardir.algebra.saved import LineError
from shardir.algebra.sharding import DimAxes
from shardir.diagnostics import NotationError, coded, one_of
from shardir.grammar.machine import Machine


class NameKind(StrEnum):
    """The kinds of names that lines are for. Parameters include states."""

    PARAMETER = "parameter"
    INPUT = "input"
    VALUE = "value"


class HostDims(tuple[Axes, ...]):
    """The axes that split each dimension of a value `on host`."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostDims) and tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(("host", *self))

    def __str__(self) -> str:
        return f"{_dims_text(tuple(self))} on host"


@dataclass(frozen=True)
class PlanEntry:
    """The layouts and marks that a plan has for a value; None for those that it has not.

    Attributes:
        layout: the axes of the leading dimensions.
        uses: those of an argument where it is used; it is redistributed to them.
        states: those of the optimizer's states of a parameter.
        recompute: whether the value, or the argument as it is used, is made again in the backward
            part.
        parts: those of the parts that a parameter is cut in, in place of its product.
        fusion: the index of the buffer of a parameter's gradient.
        stage: that of a value's op, in a pipelined step.
    """

    layout: DimAxes | None = None
    uses: DimAxes | None = None
    states: DimAxes | None = None
    recompute: bool | None = None
    fusion: int | None = None
    stage: int | None = None
    parts: DimAxes | None = None

    def __str__(self) -> str:
        parts = [] if self.layout is None else [_dims_text(self.layout)]
        named = ("uses", self.uses), ("parts", self.parts), ("states", self.states)
        for word, dims in named:
            parts += [] if dims is None else [f"{word} {_dims_text(dims)}"]
        parts += ["recompute"] if self.recompute else []
        for word, number in (("fusion", self.fusion), ("stage", self.stage)):
            parts += [] if number is None else [f"{word} = {number}"]
        return ", ".join(parts)

    @property
    def said(self) -> frozenset[str]:
        """The fields that are not None."""
        return frozenset(f.name for f in fields(self) if getattr(self, f.name) is not None)


@dataclass(frozen=True)
class PlanLine:
    """A pattern of names, and what the plan says of them."""

    kind: NameKind
    pattern: str
    entry: PlanEntry
    number: int = field(default=1, compare=False)
    """The line in the text, from 1."""

    def __str__(self) -> str:
        match self.kind:
            case NameKind.PARAMETER:
                head = f'"{self.pattern}"'
            case NameKind.INPUT if self.pattern == "*":
                head = "inputs"
            case _:
                head = f'{self.kind}s "{self.pattern}"'
        return f"{head} : {self.entry}"

    def says(self, kind: NameKind, name: str) -> PlanEntry | None:
        """Return what the line says of a name; None if its pattern is not of that name."""
        matches = kind is self.kind and self._regex.fullmatch(name) is not None
        return self.entry if matches else None

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return _regex(self.pattern)


@dataclass(frozen=True)
class PresetLine:
    """A product of presets, each with its axes; with none where the text names none."""

    factors: tuple[tuple[str, tuple[str, ...]], ...]
    number: int = field(default=1, compare=False)

    def __str__(self) -> str:
        return " * ".join(n + (f"({', '.join(axes)})" if axes else "") for n, axes in self.factors)


@dataclass(frozen=True)
class ExpandedLine:
    """A line of presets, with the entry of each name of a program."""

    entries: Mapping[tuple[NameKind, str], PlanEntry]
    number: int

    def says(self, kind: NameKind, name: str) -> PlanEntry | None:
        return self.entries.get((kind, name))


@dataclass(frozen=True)
class LayoutPlan:
    """The lines of a plan, in their order."""

    lines: tuple[PlanLine | PresetLine, ...]

    def __str__(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)

    @staticmethod
    def of(entries: Mapping[NameKind, Mapping[str, PlanEntry]]) -> "LayoutPlan":
        """Return a short plan that says of these names what the entries are."""
        return LayoutPlan(
            tuple([line for kind, of in entries.items() for line in _short(kind, of)])
        )


def padded(dims: DimAxes, mesh: str, shape: Shape) -> Layout:
    """Return the layout of a value of a shape, whose leading dimensions are split as `dims`."""
    unsplit = ((),) * (len(shape) - len(dims))
    return Layout(mesh, (*dims, *unsplit), host=isinstance(dims, HostDims))


def trimmed(layout: Layout) -> DimAxes:
    """Return the dimensions of a layout up to the last that is split."""
    dims = layout.dims
    while dims and not dims[-1]:
        dims = dims[:-1]
    return HostDims(dims) if layout.host else dims


# ---- text -> plan ----

COMMENT = re.compile(r'("[^"\n]*")|(//|#).*')


def read(text: str) -> tuple[LayoutPlan, list[LineError]]:
    """Return the plan of a text, and the errors of the lines that do not parse."""
    lines, errors = list[PlanLine | PresetLine](), list[LineError]()
    for number, text_line in enumerate(text.splitlines(), 1):
        content = COMMENT.sub(lambda m: m[1] or "", text_line).rstrip()
        if not content:
            continue
        try:
            lines.append(_numbered(parse_line(content), number))
        except NotationError as e:
            errors.append(LineError(number, e.offset, coded("N1", e.message)))
    return LayoutPlan(tuple(lines)), errors


def _numbered(line: PlanLine | PresetLine, number: int) -> PlanLine | PresetLine:
    if isinstance(line, PresetLine):
        return PresetLine(line.factors, number)
    return PlanLine(line.kind, line.pattern, line.entry, number)


def is_plan(text: str) -> bool:
    """Whether a text is a plan, and not the name of a file: it has a `:`, several lines, or
    presets."""
    if ":" in text or "\n" in text:
        return True
    try:
        return isinstance(parse_line(text), PresetLine)
    except NotationError:
        return False


def parse_line(text: str) -> PlanLine | PresetLine:
    """`"*.weight" : [{tp}], recompute` or `megatron(tp) * fsdp(dp)`. Raises NotationError."""
    return read_notation(_machine(), text, "line", "a pattern with layouts or marks, or presets")


class _PlanValues(NotationValues):
    """The reductions of plan.lark."""

    def line(self, c: list[Any]) -> PlanLine | PresetLine:
        return c[0]

    def parameters(self, c: list[Any]) -> PlanLine:
        said = {"layout", "uses", "states", "recompute", "parts", "fusion"}
        return _line(NameKind.PARAMETER, c, frozenset(said))

    def inputs(self, c: list[Any]) -> PlanLine:
        return _line(NameKind.INPUT, c, frozenset({"layout", "uses", "recompute"}))

    def values(self, c: list[Any]) -> PlanLine:
        return _line(NameKind.VALUE, c, frozenset({"layout", "recompute", "stage"}))

    def at(self, c: list[Any]) -> tuple[str, Any]:
        return "layout", c[0]

    def place(self, c: list[Any]) -> DimAxes:
        dims, host = c
        return HostDims(dims) if host else dims

    def uses(self, c: list[Any]) -> tuple[str, Any]:
        return "uses", c[0]

    def states(self, c: list[Any]) -> tuple[str, Any]:
        return "states", c[0]

    def recompute(self, c: list[Any]) -> tuple[str, Any]:
        return "recompute", True

    def parts(self, c: list[Any]) -> tuple[str, Any]:
        return "parts", c[0]

    def fusion(self, c: list[Any]) -> tuple[str, Any]:
        return "fusion", int(c[0])

    def stage(self, c: list[Any]) -> tuple[str, Any]:
        return "stage", int(c[0])

    def presets(self, c: list[Any]) -> PresetLine:
        return PresetLine(tuple(c))

    def preset(self, c: list[Any]) -> tuple[str, tuple[str, ...]]:
        return str(c[0]), tuple([str(a) for a in c[1:] if a is not None])


@cache
def _machine() -> Machine:
    text = grammar("plan.lark") + grammar("notation.lark")
    return Machine(text, ["line"], _PlanValues(), token=Word)


def _line(kind: NameKind, c: list[Any], allowed: frozenset[str]) -> PlanLine:
    """Return a line of its pattern and its items. Raises NotationError."""
    word, *items = c
    start = 0 if word is None else word.start_pos
    said = [name for name, _ in items]
    for i, name in enumerate(said):
        what = "one layout" if name == "layout" else f"{name} once"
        if name in said[:i]:
            raise NotationError(f"expected {what} in a line, got it twice", start)
        if name not in allowed:
            raise NotationError(f"expected {one_of(allowed)} of {kind}s, got {name}", start)
    return PlanLine(kind, "*" if word is None else str(word)[1:-1], PlanEntry(**dict(items)))


# ---- patterns ----

_PART = re.compile(r"\[(?P<itself>.)\]|\{(?P<one_of>[^{}]*)\}|(?P<any>[*?])|(?P<plain>.)")


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile("".join(_parts(pattern)), re.DOTALL)


def _parts(pattern: str) -> Iterator[str]:
    """Yield the regular expression of each part of a pattern."""
    for m in _PART.finditer(pattern):
        match m.lastgroup:
            case "one_of":
                yield f"(?:{'|'.join(''.join(_parts(p)) for p in m['one_of'].split(','))})"
            case "any":
                yield ".*" if m["any"] == "*" else "."
            case _:
                yield re.escape(m["itself"] or m["plain"])


def exactly(name: str) -> str:
    """Return the pattern of a name: it matches another one only where a pattern can't be written
    in quotes."""
    escaped = re.sub(r"[*?\[{]", lambda m: f"[{m[0]}]", name)
    return re.sub(r'["\n]', "?", escaped)


# ---- entries -> plan ----

_NUMBERS = re.compile(r"\d+"), re.compile(r"(?<![^.])\d+(?![^.])")
"""The numbers in a name: all of them, or those between dots."""

_PLAIN = re.compile(r"((?:.*\.)?)([\w*]+)", re.DOTALL)
"""A pattern up to its last dot, and a rest that may be one of several in braces."""


def _short(kind: NameKind, entries: Mapping[str, PlanEntry]) -> Iterator[PlanLine]:
    """Yield lines for the names: one for names that differ in their numbers or after the last dot
    only, if their entries are equal; at the end one for the names of the shortest entry, if they
    are several and no other line says less."""
    found: dict[str, PlanEntry] = {}
    for name, entry in entries.items():
        if entry.said:
            found[_pattern(kind, name, entries, found)] = entry
    counts = Counter(entry for entry in entries.values() if entry.said)
    rest = min(counts, key=lambda entry: len(str(entry)), default=None)
    if rest is not None and (
        (counts[rest] == 1 and kind is not NameKind.INPUT)
        or not all(rest.said <= entry.said for entry in entries.values())
    ):
        rest = None
    together: dict[tuple[str, PlanEntry], list[str]] = {}
    for pattern, entry in found.items():
        if entry != rest:
            m = _PLAIN.fullmatch(pattern)
            before, last = (m[1], m[2]) if m else (pattern, "")
            together.setdefault((before, entry), []).append(last)
    for (before, entry), ends in together.items():
        pattern = before + (f"{{{','.join(ends)}}}" if len(ends) > 1 else ends[0])
        yield PlanLine(kind, pattern, entry)
    if rest is not None:
        yield PlanLine(kind, "*", rest)


def _pattern(
    kind: NameKind, name: str, entries: Mapping[str, PlanEntry], found: Mapping[str, PlanEntry]
) -> str:
    """Return a pattern of a name, of others that differ in numbers too if no entry contradicts."""
    for numbers in _NUMBERS:
        pattern = "*".join(map(exactly, numbers.split(name)))
        if pattern in found and found[pattern] == entries[name]:
            return pattern
        line = PlanLine(kind, pattern, entries[name])
        if not any(e != entries[name] and line.says(kind, n) for n, e in entries.items()):
            return pattern
    return exactly(name)


def _dims_text(dims: Iterable[Axes]) -> str:
    if isinstance(dims, HostDims):
        return str(dims)
    return f"[{', '.join(map(axes_text, dims))}]"
