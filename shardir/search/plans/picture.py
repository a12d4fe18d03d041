"""The cost graph as data, and the texts of its drawings.

    {"functions": [{"function": "net", "mesh": "@m <dp = 2, tp = 2>", "objective": 1.2e-4, ...,
      "nodes": [{"id": 0, "values": ["%x"], "op": null, "at": "net.ir:3",
                 "annotated": false,
                 "candidates": [{"layout": "[{dp}, {}]", "seconds": 0.0}, ...],
                 "chosen": 1},
                {"id": 1, "values": ["%h"], "op": "nn.matmul",
                 "operands": ["%x", "%w"], "at": "net.ir:4", "annotated": false,
                 "candidates": [{"strategy": "(({dp}, {}), ({}, {}))", "operands": [...],
                              "results": [...], "seconds": 2e-6}, ...], "chosen": 0}, ...],
      "edges": [{"from": 0, "to": 1, "values": ["%x"], "table": 0, "seconds": 0.0}, ...],
      "tables": [[[0.0, 3e-5], ...], ...]}]}

A node is an op with its candidates; or a value with its possible layouts: an argument, or a value
with several users. An updated parameter is one node with the old one. An edge has a table, the
times of redistributions in seconds: a row for each candidate of `from` and a column for each of
`to`. Equal tables are stored once. `sum` is that of the chosen entries of nodes and edges; the
objective is the time of the lowered program, which shares redistributions and fuses collectives.

A drawing shows the chosen candidate of a node and those nearest to it: the time of each, and after
`+` the increase of the plan's time with it and the same choice elsewhere. Of an edge it shows the
chosen redistribution, the range of its table, and the fastest ones with another candidate at one
end.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from xdsl.ir import BlockArgument, Operation, SSAValue

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.dialects.dist import sharding_of
from shardir.dialects.locations import short_location
from shardir.dialects.nn.base import TensorOp
from shardir.search.graph.candidates import Candidates
from shardir.search.graph.value_layouts import ValueLayouts
from shardir.search.measure.strategy_plan import StrategyPlan

Described = dict[str, Any]

SHOWN_CANDIDATES = 6
"""The candidates of a node that are drawn, at most."""

SHOWN_TRANSFERS = 2
"""The redistributions of an edge that are drawn besides the chosen one, at most."""


# ---- data ----


def described(
    function: str, mesh: Mesh, names: Mapping[SSAValue, str], plan: StrategyPlan
) -> Described:
    """Return the graph of a function, before its plan is written into it.

    Args:
        names: the printed names of all values, in their order.
    """
    graph, problem, choice = plan.graph, plan.problem, plan.solution.choice
    nodes: dict[int, Described] = {}
    variables = graph.op_variable
    for v, name in names.items():
        op = v.owner
        if isinstance(op, Operation) and (i := variables.get(op)) is not None and i not in nodes:
            nodes[i] = _of_op(op, names, graph.candidates[op])
        if (i := graph.value_variable.get(v)) is not None:
            nodes.setdefault(i, _of_value(v, graph.layouts[v]))["values"].append(f"%{name}")
    for i, node in nodes.items():
        for c, seconds in zip(node["candidates"], problem.unary[i].tolist(), strict=True):
            c["seconds"] = seconds
        node["chosen"] = choice[i]
    order = {i: n for n, i in enumerate(nodes)}
    carried = _carried(names, plan)
    numbers: dict[bytes, int] = {}
    tables: list[Any] = []
    edges: list[Described] = []
    for pair, table in problem.pairs.items():
        a, b = sorted(pair, key=order.__getitem__)
        rows = np.ascontiguousarray(table if (a, b) == pair else table.T)
        key = repr(rows.shape).encode() + rows.tobytes()
        if key not in numbers:
            numbers[key] = len(tables)
            tables.append(rows.tolist())
        edges.append({
            "from": order[a], "to": order[b], "values": carried[frozenset(pair)],
            "table": numbers[key], "seconds": float(rows[choice[a], choice[b]]),
        })  # fmt: skip
    s = plan.solution
    return {
        "function": function, "mesh": str(mesh),
        "objective": s.objective, "bound": s.bound, "gap": s.gap, "sum": problem.cost(choice),
        "nodes": [{"id": n, **node} for n, node in enumerate(nodes.values())],
        "edges": sorted(edges, key=lambda e: (e["from"], e["to"])),
        "tables": tables,
    }  # fmt: skip


def _of_op(op: Operation, names: Mapping[SSAValue, str], candidates: Candidates) -> Described:
    return {
        "values": [f"%{names[v]}" for v in op.results], "op": op.name,
        "operands": [f"%{names[v]}" for v in op.operands], "at": short_location(op),
        "annotated": isinstance(op, TensorOp) and op.strategy is not None,
        "candidates": [
            {
                "strategy": str(replace(c.strategy, mesh=None)),
                "operands": [_text(layout) for layout in c.operands],
                "results": [_text(layout) for layout in c.results],
            }
            for c in candidates
        ],
    }  # fmt: skip


def _of_value(v: SSAValue, layouts: ValueLayouts) -> Described:
    by = v if isinstance(v, BlockArgument) else v.owner
    return {
        "values": [], "op": None,
        "at": short_location(by) if isinstance(by, BlockArgument | Operation) else "",
        "annotated": sharding_of(v) is not None,
        "candidates": [
            {"layout": _text(layout)} for layout in layouts
        ],
    }  # fmt: skip


def _text(layout: Layout) -> str:
    return str(layout).partition(", ")[2]


def _carried(names: Mapping[SSAValue, str], plan: StrategyPlan) -> dict[frozenset[int], list[str]]:
    """Return the values that each edge carries, by its two variables."""
    graph = plan.graph
    found: dict[frozenset[int], list[str]] = {}
    for v, name in names.items():
        maker = graph.op_variable.get(v.owner) if isinstance(v.owner, Operation) else None
        source = graph.value_variable.get(v, maker)
        for end in (maker, *(graph.op_variable.get(use.operation) for use in v.uses)):
            if source is not None and end is not None:
                carried = found.setdefault(frozenset((source, end)), [])
                if f"%{name}" not in carried:
                    carried.append(f"%{name}")
    return found


# ---- the texts of drawings ----


def title(node: Described) -> str:
    made, annotated = ", ".join(node["values"]), " (annotated)" if node["annotated"] else ""
    return (f"{made} = {node['op']}" if node["op"] else made) + annotated


CandidateRow = tuple[str, str, bool]
"""A candidate that is drawn: its name, its times, and whether it is chosen."""


def rows(graph: Described) -> list[list[CandidateRow]]:
    """Return the candidates of each node that are drawn: those with which the plan would be
    fastest, with the same choice for all other nodes; with their times, and the increase of the
    plan's."""
    nodes = graph["nodes"]
    costs = [np.array([c["seconds"] for c in node["candidates"]]) for node in nodes]
    for e in graph["edges"]:
        a, b, table = e["from"], e["to"], np.array(graph["tables"][e["table"]])
        costs[a] = costs[a] + table[:, nodes[b]["chosen"]]
        costs[b] = costs[b] + table[nodes[a]["chosen"]]
    return [_rows_of(node, costs[i] - costs[i][node["chosen"]]) for i, node in enumerate(nodes)]


def _rows_of(node: Described, more: np.ndarray) -> list[CandidateRow]:
    candidates, chosen = node["candidates"], node["chosen"]
    order = sorted(range(len(candidates)), key=lambda i: (max(more[i], 0.0), i != chosen))
    rows = [
        (
            _name(candidates[i]),
            _time(candidates[i]["seconds"]) + ("" if i == chosen else f" +{_time(more[i])}"),
            i == chosen,
        )
        for i in order[:SHOWN_CANDIDATES]
    ]
    if len(candidates) > len(rows):
        rows.append((f"and {len(candidates) - len(rows)} more", "", False))
    return rows


def _name(c: Described) -> str:
    if "layout" in c:
        return c["layout"]
    return c["strategy"] if c["operands"] else "replicated"


def _time(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-9:.3g} ns" if seconds > 1e-12 else "0"


def edge_lines(graph: Described, edge: Described) -> list[str]:
    """Return the label of an edge: its values, the chosen time and the range of its table; then,
    for an edge of one value, the chosen redistribution and the fastest ones with another candidate
    at one end."""
    a, b = graph["nodes"][edge["from"]], graph["nodes"][edge["to"]]
    table = graph["tables"][edge["table"]]
    lowest, highest = min(map(min, table)), max(map(max, table))
    lines = [f"{', '.join(edge['values'])}: {_time(edge['seconds'])}"]
    if highest > lowest:
        lines[0] += f" of {_time(lowest)} to {_time(highest)}"
    if len(edge["values"]) != 1 or not highest:
        return lines
    (value,), i, j = edge["values"], a["chosen"], b["chosen"]
    transfers: dict[str, float] = {}
    for k, m in (
        (i, j),
        *((i, m) for m in range(len(table[i]))),
        *((k, j) for k in range(len(table))),
    ):
        transfer = f"{_layout(a, k, value)} -> {_layout(b, m, value)}"
        transfers.setdefault(transfer, table[k][m])
    first, *others = transfers.items()
    others.sort(key=lambda transfer: transfer[1])
    shown = first, *others[:SHOWN_TRANSFERS]
    lines += [f"{transfer}  {_time(seconds)}" for transfer, seconds in shown]
    more = len(others) - SHOWN_TRANSFERS
    return [*lines, f"and {more} more"] if more > 0 else lines


def _layout(node: Described, number: int, value: str) -> str:
    """Return the layout of a value at a node: of the op's result or operand, or the value's own."""
    c = node["candidates"][number]
    if not node["op"]:
        return _name(c)
    if value in node["values"]:
        return c["results"][node["values"].index(value)]
    return c["operands"][node["operands"].index(value)]


def heading(graph: Described) -> str:
    gap = f", gap {graph['gap']:.2g}" if graph["gap"] else ""
    return f"@{graph['function']} on {graph['mesh']}: {_time(graph['objective'])}{gap}"
