"""The cost graph as a file: JSON, or dot for Graphviz."""

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from shardir.diagnostics import ShardirError
from shardir.search.plans.picture import CandidateRow, Described, edge_lines, heading, rows, title

CHOSEN_COLOUR = "#ffe08a"
"""The colour of the chosen candidates."""


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
            label = _quoted("\n".join(edge_lines(graph, e)))
            lines.append(f"    n{k}_{e['from']} -> n{k}_{e['to']} [label={label}]")
        lines.append("  }")
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _table(node: Described, found: Sequence[CandidateRow]) -> str:
    cells = [f'<TR><TD COLSPAN="2"><B>{escape(title(node))}</B></TD></TR>']
    for name, time, chosen in found:
        colour = f' BGCOLOR="{CHOSEN_COLOUR}"' if chosen else ""
        cells.append(
            f'<TR><TD ALIGN="LEFT"{colour}>{escape(name)}</TD>'
            f'<TD ALIGN="RIGHT"{colour}>{escape(time)}</TD></TR>'
        )
    shape = ' STYLE="ROUNDED"' if node["op"] is None else ""
    return f'<TABLE BORDER="1" CELLBORDER="0" CELLSPACING="0"{shape}>{"".join(cells)}</TABLE>'


Writer = Callable[[Sequence[Described]], str]
"""Returns the text of a file."""

WRITERS: dict[str, Writer] = {
    ".json": as_json,
    ".dot": as_dot,
}
"""By the suffix of the file."""


def writer_of(path: Path) -> Writer:
    """Return the writer for a file, by its suffix.

    Raises:
        ShardirError: there is none.
    """
    if path.suffix not in WRITERS:
        raise ShardirError(f"{path}: expected a cost graph as {', '.join(WRITERS)}")
    return WRITERS[path.suffix]
