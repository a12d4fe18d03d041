"""Plans: layouts and marks of a program's values, by patterns of their names; one line each.

    megatron(tp) * fsdp(dp)                                     // presets
    inputs : [{dp}]                                             // each input
    "*.attn.{q,k,v}_proj.weight" : [{tp}], states [{tp, dp}]    // parameters of these names
    "*.wte.weight" : [{dp}], uses [], recompute                 // gathered where it is used, twice
    "*.w" : [], states [{dp}] on host                           // updated on the host
    values "*.mlp" : [{dp}]                                     // results of ops
    values "layers.{2,3}.*" : stage = 1
    @step values "h" : [{dp}], strategy <(({dp}, {}), ({}, {}))>    // of one function
    @step : search<objective = 0.00015, bound = 0.00015, gap = 0.0>  // as a search left it

1. A layout with fewer dimensions than the value is of the leading dimensions; the rest is
   unsharded.
2. Each field of a name comes from the first matching line that has it: the layout from the first
   line with a layout, `uses` from the first line with `uses`, and so on.
3. In a pattern `*` is any text, `?` any character, `{a,b}` one of several texts, and a character in
   brackets, `[*]`, stands for itself. Text after `//` or `#` is a comment.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import axes_text
from shardir.algebra.notation import nested_text
from shardir.algebra.strategy import Strategy
from shardir.diagnostics import size_text


class NameKind(StrEnum):
    """The kinds of names that lines are for. Parameters include states."""

    PARAMETER = "parameter"
    INPUT = "input"
    VALUE = "value"


@dataclass(frozen=True)
class PlanEntry:
    """The layouts and marks of a value in a plan; None for a missing field. Layouts are of the
    leading dimensions, and of no mesh in particular.

    Attributes:
        uses: the layout to which an argument is redistributed before its uses.
        states: the layout of the optimizer's states of a parameter.
        recompute: the value, or the argument in the layout `uses`, is rematerialised in the
            backward part.
        parts: the layouts of the parts of a parameter whose product is cut; one layout serves all.
        fusion: the index of the buffer of a parameter's gradient.
        stage: of a value's op, in a pipelined step.
        strategy: of a value's op; the first of several results has it.
    """

    layout: Layout | None = None
    uses: Layout | None = None
    states: Layout | None = None
    recompute: bool | None = None
    fusion: int | None = None
    stage: int | None = None
    parts: tuple[Layout, ...] | None = None
    strategy: Strategy | None = None

    def __str__(self) -> str:
        parts = [] if self.layout is None else [layout_text(self.layout)]
        parts += [] if self.strategy is None else [f"strategy <{self.strategy}>"]
        parts += [] if self.uses is None else [f"uses {layout_text(self.uses)}"]
        parts += [f"parts {' '.join(map(layout_text, self.parts))}"] if self.parts else []
        parts += [] if self.states is None else [f"states {layout_text(self.states)}"]
        parts += ["recompute"] if self.recompute else []
        for word, number in (("fusion", self.fusion), ("stage", self.stage)):
            parts += [] if number is None else [f"{word} = {number}"]
        return ", ".join(parts)

    @property
    def said(self) -> frozenset[str]:
        """The fields that are not None."""
        return frozenset(f.name for f in fields(self) if getattr(self, f.name) is not None)


@dataclass(frozen=True)
class UnshardedParameter:
    """A large parameter that is replicated along axes of presets.

    Attributes:
        bytes: of the parameter.
        reason: why it is not split over these axes.
        is_meant: the presets should split such parameters.
    """

    bytes: int
    reason: str
    is_meant: bool

    def __str__(self) -> str:
        return f"({size_text(self.bytes)}): {self.reason}"


@dataclass(frozen=True)
class PlanLine:
    """A pattern of names, and its entry."""

    kind: NameKind
    pattern: str
    entry: PlanEntry
    number: int = field(default=1, compare=False)
    """The line in the text, from 1."""
    function: str | None = None
    """The function of the names; None: all."""

    def __str__(self) -> str:
        match self.kind:
            case NameKind.PARAMETER:
                head = f'"{self.pattern}"'
            case NameKind.INPUT if self.pattern == "*":
                head = "inputs"
            case _:
                head = f'{self.kind}s "{self.pattern}"'
        scope = "" if self.function is None else f"{symbol(self.function)} "
        return f"{scope}{head} : {self.entry}"

    def says(self, function: str, kind: NameKind, name: str) -> PlanEntry | None:
        """Return the entry for a name; None unless the pattern matches it."""
        if self.function not in (None, function):
            return None
        matches = kind is self.kind and self._regex.fullmatch(name) is not None
        return self.entry if matches else None

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return _regex(self.pattern)


@dataclass(frozen=True)
class SearchLine:
    """The record of a search: its function, and the figures that it reported."""

    function: str
    found: tuple[tuple[str, Any], ...]
    number: int = field(default=1, compare=False)

    def __str__(self) -> str:
        return f"{symbol(self.function)} : {nested_text(('search', self.found))}"


@dataclass(frozen=True)
class PresetLine:
    """A product of presets, each with its axes; empty if the text names none."""

    factors: tuple[tuple[str, tuple[str, ...]], ...]
    number: int = field(default=1, compare=False)

    def __str__(self) -> str:
        return " * ".join(n + (f"({', '.join(axes)})" if axes else "") for n, axes in self.factors)


Line = PlanLine | SearchLine | PresetLine


@dataclass(frozen=True)
class ExpandedLine:
    """A line of presets for a program: the entry of each name, and the parameters that it leaves
    unsharded."""

    entries: Mapping[tuple[NameKind, str], PlanEntry]
    unsharded: Mapping[str, UnshardedParameter]
    number: int

    def says(self, function: str, kind: NameKind, name: str) -> PlanEntry | None:
        return self.entries.get((kind, name))


@dataclass(frozen=True)
class LayoutPlan:
    """The lines of a plan, in their order."""

    lines: tuple[Line, ...]
    comments: tuple[str, ...] = ()

    def __str__(self) -> str:
        comments = (f"# {comment}" for comment in self.comments)
        return "".join(f"{line}\n" for line in (*self.lines, *comments))

    @staticmethod
    def of(
        entries: Mapping[NameKind, Mapping[str, PlanEntry]], function: str | None = None
    ) -> "LayoutPlan":
        """Return a short plan with these entries.

        Args:
            function: of the names; all functions if None.
        """
        lines = [line for kind, of in entries.items() for line in _short(kind, of)]
        return LayoutPlan(tuple([replace(line, function=function) for line in lines]))


@dataclass(frozen=True, order=True)
class LineError:
    """An error in a line of a text: its number from 1, the column from 0, and the message."""

    number: int
    column: int
    message: str


def padded(layout: Layout, mesh: str, shape: Shape) -> Layout:
    """Return the layout of a value on a mesh from a layout of its leading dimensions."""
    unsplit = ((),) * (len(shape) - len(layout.dims))
    return replace(layout, mesh=mesh, dims=(*layout.dims, *unsplit))


def trimmed(layout: Layout) -> Layout:
    """Return a layout up to the last dimension that is split, of no mesh in particular."""
    dims = layout.dims
    while dims and not dims[-1]:
        dims = dims[:-1]
    return replace(layout, mesh="", dims=dims)


def one_if_equal(layouts: Sequence[Layout]) -> tuple[Layout, ...]:
    """Return the layouts of parts for a plan: one if all are equal."""
    return tuple(layouts[:1] if len({*layouts}) == 1 else layouts)


def layout_text(layout: Layout) -> str:
    """Return the text of a layout in a plan: `[{dp}, {tp}] partial sum {ep} on host`."""
    dims = ", ".join(map(axes_text, layout.dims))
    partial = f" partial {layout.reduction} {axes_text(layout.partial)}" if layout.partial else ""
    return f"[{dims}]{partial}{' on host' if layout.host else ''}"


def symbol(function: str) -> str:
    """Return the text of the name of a function."""
    plain = re.fullmatch(r"[\w$.-]+", function)
    return f"@{function if plain else json.dumps(function)}"


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
    """Return the pattern of a name. It matches only this name, unless the name has a character that
    a quoted pattern cannot have."""
    escaped = re.sub(r"[*?\[{]", lambda m: f"[{m[0]}]", name)
    return re.sub(r'["\\\n]', "?", escaped)


# ---- entries -> plan ----

_NUMBERS = re.compile(r"\d+"), re.compile(r"(?<![^.])\d+(?![^.])")
"""The numbers in a name: all of them, or those between dots."""

_PLAIN = re.compile(r"((?:.*\.)?)([\w*]+)", re.DOTALL)
"""A pattern up to its last dot, and a rest that may be one of several in braces."""


def _short(kind: NameKind, entries: Mapping[str, PlanEntry]) -> Iterator[PlanLine]:
    """Yield short lines for entries.

    1. Names with equal entries that differ only in numbers or after the last dot share a line.
    2. The last line, `*`, has the shortest entry, if several names have it and no entry has fewer
       fields.
    """
    by_pattern: dict[str, PlanEntry] = {}
    refused = set[str]()
    for name, entry in entries.items():
        if entry.said:
            by_pattern[_pattern(name, entries, by_pattern, refused)] = entry
    counts = Counter(entry for entry in entries.values() if entry.said)
    rest = min(counts, key=lambda entry: len(str(entry)), default=None)
    if rest is not None and (
        (counts[rest] == 1 and kind is not NameKind.INPUT)
        or not all(rest.said <= entry.said for entry in entries.values())
    ):
        rest = None
    by_prefix: dict[tuple[str, PlanEntry], list[str]] = {}
    for pattern, entry in by_pattern.items():
        if entry != rest:
            m = _PLAIN.fullmatch(pattern)
            before, last = (m[1], m[2]) if m else (pattern, "")
            by_prefix.setdefault((before, entry), []).append(last)
    for (before, entry), all_ends in by_prefix.items():
        ends = [e for e in all_ends if not any(e != f and _regex(f).fullmatch(e) for f in all_ends)]
        pattern = before + (f"{{{','.join(ends)}}}" if len(ends) > 1 else ends[0])
        yield PlanLine(kind, pattern, entry)
    if rest is not None:
        yield PlanLine(kind, "*", rest)


def unsharded_texts(of: Mapping[str, UnshardedParameter | None]) -> list[str]:
    """Return texts for the parameters that have an entry. Names with equal entries that differ only
    in numbers share a text."""
    by_pattern: dict[str, UnshardedParameter] = {}
    refused = set[str]()
    for name, entry in of.items():
        if entry is not None:
            by_pattern[_pattern(name, of, by_pattern, refused)] = entry
    return [f"{pattern} {entry}" for pattern, entry in by_pattern.items()]


def _pattern(
    name: str, entries: Mapping[str, object], found: Mapping[str, object], refused: set[str]
) -> str:
    """Return a pattern of a name that also matches names with other numbers, unless their entries
    differ.

    Args:
        found: the patterns so far.
        refused: patterns of names whose entries differ; extended.
    """
    exact = exactly(name)
    for numbers in _NUMBERS:
        pattern = "*".join(map(exactly, numbers.split(name)))
        if pattern == exact or pattern in refused:
            continue
        if pattern in found:
            return pattern
        matches = _regex(pattern).fullmatch
        if not any(e != entries[name] and matches(n) for n, e in entries.items()):
            return pattern
        refused.add(pattern)
    return exact
