"""The text of plans: text -> the lines of shardir/algebra/plan.py, by plan.lark.

In Python a plan may be a mapping from the text before the colon of each line to the text after it,
`{"*.weight": "[{dp}]", "inputs": "[{dp}]"}`, or a list of such pairs and of lines.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from shardir.algebra.layout import Layout
from shardir.algebra.notation import NotationValues, Word, grammar
from shardir.algebra.notation import read as read_notation
from shardir.algebra.plan import (
    LayoutPlan,
    Line,
    LineError,
    NameKind,
    PlanEntry,
    PlanLine,
    PresetLine,
    SearchLine,
)
from shardir.algebra.strategy import Strategy
from shardir.diagnostics import NotationError, ShardirError, coded, describe, did_you_mean, one_of
from shardir.grammar.machine import Machine

PlanForm = str | Path | Mapping[str, str] | Sequence[str | tuple[str, str]]
"""The forms of a plan in Python: a text, a file, or lines as pairs."""

COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*")|(//|#).*')

ITEMS = {
    NameKind.PARAMETER: ("layout", "uses", "states", "recompute", "parts", "fusion"),
    NameKind.INPUT: ("layout", "uses", "recompute"),
    NameKind.VALUE: ("layout", "strategy", "recompute", "stage"),
}
"""The items that a line of each kind may have."""

FORMS = 'a text, a path, a dict {"*.weight": "[{dp}]"} or a list of such pairs as plan'

INSTEAD = {
    "offload": 'write the layout in host memory: "PATTERN" : [{axis}, ...] on host',
    "stage": 'stages are of values: values "PATTERN" : stage = 1',
    "strategy": 'strategies are of the ops of values: values "PATTERN" : strategy <...>',
}
"""The fix for an item that does not exist, or not for these names."""


def read(text: str) -> tuple[LayoutPlan, list[LineError]]:
    """Return the plan of a text, and the errors of the lines that do not parse."""
    lines, errors = list[Line](), list[LineError]()
    for number, text_line in enumerate(text.split("\n"), 1):
        content = COMMENT.sub(lambda m: m[1] or "", text_line).rstrip()
        if not content:
            continue
        try:
            lines.append(replace(parse_line(content), number=number))
        except NotationError as e:
            errors.append(LineError(number, e.offset, _coded(content, e)))
    return LayoutPlan(tuple(lines)), errors


def _coded(content: str, error: NotationError) -> str:
    """Return the message of a line that does not parse, with the word of an unknown item."""
    item = re.match(r"[A-Za-z_]\w*", content[error.offset :])
    if item is None or not re.search(r"[:,]\s*$", content[: error.offset]):
        return coded("N1", error.message) if "[N1]" not in error.message else error.message
    words = sorted({name for of in ITEMS.values() for name in of} - {"layout"})
    message = f"expected a layout, or one of {', '.join(words)}, got {item[0]}"
    near = did_you_mean(item[0], words).removeprefix("; ")
    return coded("N1", message, use=INSTEAD.get(item[0]) or near or None)


def is_plan(text: str) -> bool:
    """Whether a text is a plan, not the name of a file: it has a `:`, several lines, or presets."""
    if ":" in text or "\n" in text:
        return True
    try:
        return isinstance(parse_line(text), PresetLine)
    except NotationError:
        return False


def parse_line(text: str) -> Line:
    """`"*.weight" : [{tp}], recompute` or `megatron(tp) * fsdp(dp)`. Raises NotationError."""
    return read_notation(_machine(), text, "line", "a pattern with layouts or marks, or presets")


def text_of(plan: Any) -> str:
    """Return the text of a plan in Python.

    Raises:
        ShardirError: the plan is neither a mapping of texts nor a list of pairs and texts.
    """
    lines = list(plan.items()) if isinstance(plan, Mapping) else plan
    if not isinstance(lines, list | tuple):
        raise ShardirError(f"expected {FORMS}, got {describe(plan)}")
    return "".join(f"{_text_line(line)}\n" for line in lines)


def _text_line(line: Any) -> str:
    match line:
        case str():
            return line
        case (str(head), str(items)):
            quoted = '"' in head or head == "inputs" or head.startswith("@")
            return f"{head} : {items}" if quoted else f'"{head}" : {items}'
    raise ShardirError(
        f'expected a line of a plan, "fsdp(dp)", or a pair, ("*.weight", "[{{dp}}]"), got '
        f"{describe(line)}"
    )


class _PlanValues(NotationValues):
    """The reductions of plan.lark."""

    def line(self, c: list[Any]) -> Line:
        return c[0]

    def parameters(self, c: list[Any]) -> PlanLine:
        return _line(NameKind.PARAMETER, c)

    def inputs(self, c: list[Any]) -> PlanLine:
        return _line(NameKind.INPUT, c)

    def values(self, c: list[Any]) -> PlanLine:
        return _line(NameKind.VALUE, c)

    def found(self, c: list[Any]) -> SearchLine:
        function, *pairs = c
        return SearchLine(_function(function), self.options(["search", *pairs])[1])

    def at(self, c: list[Any]) -> tuple[str, Any]:
        return "layout", c[0]

    def place(self, c: list[Any]) -> Layout:
        dims, partial, host = c
        return Layout("", dims, *(partial or ()), host=host is not None)

    def left(self, c: list[Any]) -> Any:
        return self.partial(c)

    def uses(self, c: list[Any]) -> tuple[str, Any]:
        return "uses", Layout("", c[0])

    def states(self, c: list[Any]) -> tuple[str, Any]:
        return "states", c[0]

    def recompute(self, c: list[Any]) -> tuple[str, Any]:
        return "recompute", True

    def parts(self, c: list[Any]) -> tuple[str, Any]:
        return "parts", tuple([Layout("", dims) for dims in c])

    def fusion(self, c: list[Any]) -> tuple[str, Any]:
        return "fusion", int(c[0])

    def stage(self, c: list[Any]) -> tuple[str, Any]:
        return "stage", int(c[0])

    def computed(self, c: list[Any]) -> tuple[str, Strategy]:
        return "strategy", c[0]

    def presets(self, c: list[Any]) -> PresetLine:
        return PresetLine(tuple(c))

    def preset(self, c: list[Any]) -> tuple[str, tuple[str, ...]]:
        name = re.sub(r"\s", "", c[0])
        return name, tuple([str(a) for a in c[1:] if a is not None])


@cache
def _machine() -> Machine:
    text = grammar("plan.lark") + grammar("notation.lark")
    return Machine(text, ["line"], _PlanValues(), token=Word)


def _line(kind: NameKind, c: list[Any]) -> PlanLine:
    """Return a line of its function, its pattern and its items. Raises NotationError."""
    function, word, *items = c
    start = 0 if word is None else word.start_pos
    said = [name for name, _ in items]
    for i, name in enumerate(said):
        what = "one layout" if name == "layout" else f"{name} once"
        if name in said[:i]:
            raise NotationError(f"expected {what} in a line, got it twice", start)
        if name not in ITEMS[kind]:
            message = f"expected {one_of(ITEMS[kind])} of {kind}s, got {name}"
            raise NotationError(coded("N1", message, use=INSTEAD.get(name)), start)
    pattern = "*" if word is None else str(word)[1:-1]
    scope = None if function is None else _function(function)
    return PlanLine(kind, pattern, PlanEntry(**dict(items)), function=scope)


def _function(word: str) -> str:
    name = word.removeprefix("@")
    return json.loads(name) if name.startswith('"') else name
