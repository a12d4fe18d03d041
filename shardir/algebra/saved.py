"""Saved strategies: the layout of each value and the strategy of each op, one per line.

    dist.mesh @m <dp = 2, tp = 2>
    @step %x = argument : <@m, [{dp}, {}]>  // net.ir:4
    @step %h = nn.matmul strategy <@m, (({dp}, {}), ({}, {tp}))> : <@m, [{dp}, {tp}]>  // net.ir:9
    @step search {objective = 1.5e-4 : f64, ...}

Layouts and strategies are in their own notation. `recompute` after a strategy: the op is repeated
in the backward part. Text after `//` is a comment.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.algebra.notation import mesh_of, parse_layout, parse_strategy
from shardir.algebra.strategy import Strategy
from shardir.diagnostics import NotationError, coded

ARGUMENT = "argument"
"""Stands for the name of the op in the line of an argument."""

_NAME = r"[\w$.-]+"
_FUNCTION = rf'@(?P<function>{_NAME}|"(?:[^"\\]|\\.)*")'
MESH = re.compile(r"dist\.mesh\s+@(?P<mesh>[\w$.]+)\s*<(?P<axes>[^<>]*)>")
FOUND = re.compile(rf"{_FUNCTION}\s+search\s+(?P<found>\{{.*\}})")
LINE = re.compile(
    rf"{_FUNCTION}\s+(?P<names>%{_NAME}(?:\s*,\s*%{_NAME})*)\s*=\s*(?P<op>{_NAME})"
    r"(?:\s+strategy\s*<(?P<strategy>.*)>)?(?P<recompute>\s+recompute)?\s*:\s*(?P<layouts><[^<>]*>(?:\s*,\s*<[^<>]*>)*)"
)
COMMENT = re.compile(r'("(?:[^"\\]|\\.)*")|//.*')


@dataclass(frozen=True)
class Line:
    """The strategy of an op and the layouts of its results; or the layout of an argument."""

    function: str
    names: tuple[str, ...]
    op: str
    strategy: Strategy | None
    layouts: tuple[Layout, ...]
    place: str = ""
    """The source location of the op, written as a comment."""
    number: int = 0
    """The line in the file, from 1."""
    recompute: bool = False
    """Whether the op is repeated in the backward part."""

    def __str__(self) -> str:
        names = ", ".join(f"%{n}" for n in self.names)
        strategy = f" strategy <{self.strategy}>" if self.strategy else ""
        layouts = ", ".join(f"<{layout}>" for layout in self.layouts)
        place = f"  // {self.place}" if self.place else ""
        again = " recompute" if self.recompute else ""
        return f"@{_symbol(self.function)} {names} = {self.op}{strategy}{again} : {layouts}{place}"


@dataclass
class Saved:
    """The lines of a file."""

    meshes: dict[str, Mesh] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    found: dict[str, str] = field(default_factory=dict)
    """The attributes of a searched function: their text, by its name."""
    numbers: dict[str, int] = field(default_factory=dict)
    """The number of the line of each mesh, and of the search attributes of each function, by @ and
    its name."""

    def __str__(self) -> str:
        parts = [f"dist.mesh {mesh}" for mesh in self.meshes.values()]
        for f in dict.fromkeys(line.function for line in self.lines):
            parts += ["", *(str(line) for line in self.lines if line.function == f)]
            if f in self.found:
                parts.append(f"@{_symbol(f)} search {self.found[f]}")
        return "\n".join(parts) + "\n"


@dataclass(frozen=True, order=True)
class LineError:
    """An error in a line: its number, the column from 0, and the message."""

    number: int
    column: int
    message: str


def read(text: str) -> tuple[Saved, list[LineError]]:
    """Return the lines of a file, and the errors of those that do not parse."""
    saved, errors = Saved(), []
    for number, line in enumerate(text.splitlines(), 1):
        content = COMMENT.sub(lambda m: m[1] or "", line).rstrip()
        start = len(content) - len(content.lstrip())
        if start == len(content):
            continue
        try:
            _read_line(content, start, number, saved)
        except NotationError as e:
            errors.append(LineError(number, e.offset, coded("V1", e.message)))
    return saved, errors


def _read_line(content: str, start: int, number: int, saved: Saved) -> None:
    if m := MESH.fullmatch(content, start):
        mesh = _part(m, "axes", lambda text: mesh_of(m["mesh"], text))
        saved.meshes[mesh.name] = mesh
        saved.numbers[mesh.name] = number
    elif m := FOUND.fullmatch(content, start):
        saved.found[_function(m)] = m["found"]
        saved.numbers[f"@{_function(m)}"] = number
    elif m := LINE.fullmatch(content, start):
        strategy = _part(m, "strategy", parse_strategy) if m["strategy"] is not None else None
        layouts = tuple(
            _at(m.start("layouts") + part.start(1), parse_layout, part[1])
            for part in re.finditer(r"<([^<>]*)>", m["layouts"])
        )
        names = tuple(n.strip().removeprefix("%") for n in m["names"].split(","))
        again = m["recompute"] is not None
        line = Line(_function(m), names, m["op"], strategy, layouts, "", number, again)
        saved.lines.append(line)
    else:
        raise NotationError(
            "expected `@function %name = op strategy <...> : <layout>`, `@function search {...}` "
            "or `dist.mesh @name <axis = size>`", start,
        )  # fmt: skip


def _part(m: re.Match[str], group: str, parse: Callable[[str], Any]) -> Any:
    return _at(m.start(group), parse, m[group])


def _at(start: int, parse: Callable[[str], Any], text: str) -> Any:
    """Return the value of a part of a line; its errors get their columns."""
    try:
        return parse(text)
    except NotationError as e:
        raise NotationError(e.message, start + e.offset) from None


def _function(m: re.Match[str]) -> str:
    name = m["function"]
    return json.loads(name) if name.startswith('"') else name


def _symbol(name: str) -> str:
    return name if re.fullmatch(_NAME, name) else json.dumps(name)
