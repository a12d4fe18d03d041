"""The graph of costs as a file: JSON, dot for Graphviz, or SVG."""

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from shardir.diagnostics import ShardirError
from shardir.search.picture import Described, Row, along, heading, rows, title
from shardir.search.svg import TAKEN, as_svg


def as_json(graphs: Sequence[Described]) -> str:
    return json.dumps({"functions": graphs}, indent=1, allow_nan=False) + "\n"


def as_dot(graphs: Sequence[Described]) -> str:
    lines = ["digraph costs {", '  node [shape=plain, fontname="monospace", fontsize=10]',
             '  edge [fontname="monospace", fontsize=9]']  # fmt: skip
    for k, graph in enumerate(graphs):
        lines += [f"  subgraph cluster_{k} {{", f"    label={_quoted(heading(graph))}"]
        for node, found in zip(graph["nodes"], rows(graph), strict=True):
            lines.append(f"    n{k}_{node['id']} [label=<{_table(node, found)}>]")
        for e in graph["edges"]:
            label = _quoted("\n".join(along(graph, e)))
            lines.append(f"    n{k}_{e['from']} -> n{k}_{e['to']} [label={label}]")
        lines.append("  }")
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _table(node: Described, found: Sequence[Row]) -> str:
    stated = " (stated)" if node["stated"] else ""
    cells = [f'<TR><TD COLSPAN="2"><B>{escape(title(node))}</B>{stated}</TD></TR>']
    for what, time, taken in found:
        color = f' BGCOLOR="{TAKEN}"' if taken else ""
        cells.append(
            f'<TR><TD ALIGN="LEFT"{color}>{escape(what)}</TD>'
            f'<TD ALIGN="RIGHT"{color}>{escape(time)}</TD></TR>'
        )
    shape = ' STYLE="ROUNDED"' if node["op"] is None else ""
    return f'<TABLE BORDER="1" CELLBORDER="0" CELLSPACING="0"{shape}>{"".join(cells)}</TABLE>'


FORMS: dict[str, Callable[[Sequence[Described]], str]] = {
    ".json": as_json,
    ".dot": as_dot,
    ".svg": as_svg,
}
"""By the ending of the file."""


def form_of(path: Path) -> Callable[[Sequence[Described]], str]:
    """What makes the text of a file.

    Raises:
        ShardirError: the name has none of the endings.
    """
    if path.suffix not in FORMS:
        raise ShardirError(f"{path}: a graph of costs is written as {', '.join(FORMS)}")
    return FORMS[path.suffix]
