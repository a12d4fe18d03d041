"""The graph of costs that a search makes least, as data, and what a drawing says of it.

    {"functions": [{"function": "net", "mesh": "@m <dp = 2, tp = 2>", "objective": 1.2e-4, ...,
      "nodes": [{"id": 0, "values": ["%x"], "op": null, "at": "net.ir:3", "stated": false,
                 "choices": [{"layout": "[{dp}, {}]", "shared": null, "seconds": 0.0}, ...],
                 "chosen": 1},
                {"id": 1, "values": ["%h"], "op": "nn.matmul", "takes": ["%x", "%w"],
                 "at": "net.ir:4", "stated": false,
                 "choices": [{"strategy": "(({dp}, {}), ({}, {}))", "operands": [...],
                              "results": [...], "seconds": 2e-6}, ...], "chosen": 0}, ...],
      "edges": [{"from": 0, "to": 1, "values": ["%x"], "table": 0, "seconds": 0.0}, ...],
      "tables": [[[0.0, 3e-5], ...], ...]}]}

A node is an op with the ways to calculate it; or a value with the layouts in which it may lie, and
those in which several users may share it: an argument, or what has several users. The two ends of a
step's update are one. An edge has a table: the seconds of redistributions, a row for each choice of
`from` and a column for each of `to`. Equal tables are there once. The objective is the sum of what
the chosen ones take, of nodes and edges.

A drawing shows the choice of a node that is taken and those next to it: what each takes, and by how
much more the plan would take with it, all else as it is; and of an edge the redistribution that is
taken, the range of its table, and the least that there would be with another choice at one end.
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
from shardir.search.choices import Candidates
from shardir.search.graph import StrategyPlan, ValueLayouts

Described = dict[str, Any]

SHOWN, MOVES = 6, 2
"""How many choices of a node are drawn, and how many redistributions beside that which is taken."""


# ---- data ----


def described(
    function: str, mesh: Mesh, names: Mapping[SSAValue, str], plan: StrategyPlan
) -> Described:
    """A function's graph, as long as the plan is not written into the function.

    Args:
        names: of all values, in their order, as they are printed.
    """
    graph, choice = plan.graph, plan.solution.choice
    nodes: dict[int, Described] = {}
    for v, name in names.items():
        op = v.owner
        if isinstance(op, Operation) and (i := graph.of_op.get(op)) is not None and i not in nodes:
            nodes[i] = _of_op(op, names, graph.choices[op])
        if (i := graph.of_value.get(v)) is not None:
            nodes.setdefault(i, _of_value(v, graph.places[v]))["values"].append(f"%{name}")
    for i, node in nodes.items():
        for c, seconds in zip(node["choices"], graph.problem.unary[i].tolist(), strict=True):
            c["seconds"] = seconds
        node["chosen"] = choice[i]
    order = {i: n for n, i in enumerate(nodes)}
    carried = _carried(names, plan)
    kept: dict[bytes, int] = {}
    tables: list[Any] = []
    edges: list[Described] = []
    for pair, table in graph.problem.pairs.items():
        a, b = sorted(pair, key=order.__getitem__)
        rows = np.ascontiguousarray(table if (a, b) == pair else table.T)
        key = repr(rows.shape).encode() + rows.tobytes()
        if key not in kept:
            kept[key] = len(tables)
            tables.append(rows.tolist())
        edges.append({
            "from": order[a], "to": order[b], "values": carried[frozenset(pair)],
            "table": kept[key], "seconds": float(rows[choice[a], choice[b]]),
        })  # fmt: skip
    s = plan.solution
    return {
        "function": function, "mesh": str(mesh),
        "objective": s.objective, "bound": s.bound, "gap": s.gap,
        "nodes": [{"id": n, **node} for n, node in enumerate(nodes.values())],
        "edges": sorted(edges, key=lambda e: (e["from"], e["to"])),
        "tables": tables,
    }  # fmt: skip


def _of_op(op: Operation, names: Mapping[SSAValue, str], choices: Candidates) -> Described:
    return {
        "values": [f"%{names[v]}" for v in op.results], "op": op.name,
        "takes": [f"%{names[v]}" for v in op.operands], "at": short_location(op),
        "stated": isinstance(op, TensorOp) and op.strategy is not None,
        "choices": [
            {
                "strategy": str(replace(c.strategy, mesh=None)),
                "operands": [_text(layout) for layout in c.operands],
                "results": [_text(layout) for layout in c.results],
            }
            for c in choices
        ],
    }  # fmt: skip


def _of_value(v: SSAValue, places: ValueLayouts) -> Described:
    by = v if isinstance(v, BlockArgument) else v.owner
    return {
        "values": [], "op": None,
        "at": short_location(by) if isinstance(by, BlockArgument | Operation) else "",
        "stated": sharding_of(v) is not None,
        "choices": [
            {"layout": _text(layout), "shared": None if shared is None else _text(shared)}
            for layout, shared in places
        ],
    }  # fmt: skip


def _text(layout: Layout) -> str:
    return str(layout).partition(", ")[2]


def _carried(names: Mapping[SSAValue, str], plan: StrategyPlan) -> dict[frozenset[int], list[str]]:
    """By the two nodes of an edge, the values that go along it."""
    graph = plan.graph
    found: dict[frozenset[int], list[str]] = {}
    for v, name in names.items():
        by = graph.of_op.get(v.owner) if isinstance(v.owner, Operation) else None
        lies = graph.of_value.get(v, by)
        for end in (by, *(graph.of_op.get(use.operation) for use in v.uses)):
            if lies is not None and end is not None:
                along = found.setdefault(frozenset((lies, end)), [])
                if f"%{name}" not in along:
                    along.append(f"%{name}")
    return found


# ---- what a drawing says ----


def title(node: Described) -> str:
    made = ", ".join(node["values"])
    return f"{made} = {node['op']}" if node["op"] else made


Row = tuple[str, str, bool]
"""A choice that is drawn: what it is, its times, and whether it is taken."""


def rows(graph: Described) -> list[list[Row]]:
    """Of each node the choices that are drawn: those with which the plan would cost least, if all
    other nodes stayed as they are, with their own times and by how much more that would be."""
    nodes = graph["nodes"]
    costs = [np.array([c["seconds"] for c in node["choices"]]) for node in nodes]
    for e in graph["edges"]:
        a, b, table = e["from"], e["to"], np.array(graph["tables"][e["table"]])
        costs[a] = costs[a] + table[:, nodes[b]["chosen"]]
        costs[b] = costs[b] + table[nodes[a]["chosen"]]
    return [_rows_of(node, costs[i] - costs[i][node["chosen"]]) for i, node in enumerate(nodes)]


def _rows_of(node: Described, more: np.ndarray) -> list[Row]:
    choices, chosen = node["choices"], node["chosen"]
    order = sorted(range(len(choices)), key=lambda i: (max(more[i], 0.0), i != chosen))
    rows = [
        (
            _choice(choices[i]),
            _time(choices[i]["seconds"]) + ("" if i == chosen else f" +{_time(more[i])}"),
            i == chosen,
        )
        for i in order[:SHOWN]
    ]
    if len(choices) > len(rows):
        rows.append((f"and {len(choices) - len(rows)} more", "", False))
    return rows


def _choice(c: Described) -> str:
    if "layout" in c:
        return c["layout"] if c["shared"] is None else f"{c['layout']}, shared as {c['shared']}"
    return c["strategy"] if c["operands"] else "whole"


def _time(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-9:.3g} ns" if seconds > 1e-12 else "0"


def along(graph: Described, edge: Described) -> list[str]:
    """What an edge says: the values, what is taken and the range of its table; then, of one value,
    the redistributions, that which is taken and some that there would be if one end were placed
    otherwise."""
    a, b = graph["nodes"][edge["from"]], graph["nodes"][edge["to"]]
    table = graph["tables"][edge["table"]]
    least, most = min(map(min, table)), max(map(max, table))
    lines = [f"{', '.join(edge['values'])}: {_time(edge['seconds'])}"]
    if most > least:
        lines[0] += f" of {_time(least)} to {_time(most)}"
    if len(edge["values"]) != 1 or not most:
        return lines
    (value,), i, j = edge["values"], a["chosen"], b["chosen"]
    moves: dict[str, float] = {}
    for k, m in (
        (i, j),
        *((i, m) for m in range(len(table[i]))),
        *((k, j) for k in range(len(table))),
    ):
        move = f"{_lies(a, k, value)} -> {_lies(b, m, value)}"
        moves.setdefault(move, table[k][m])
    first, *others = moves.items()
    others.sort(key=lambda move: move[1])
    lines += [f"{move}  {_time(seconds)}" for move, seconds in (first, *others[:MOVES])]
    return [*lines, f"and {len(others) - MOVES} more"] if len(others) > MOVES else lines


def _lies(node: Described, choice: int, value: str) -> str:
    """How a value lies at a node: as the op makes or takes it, or where it is kept."""
    c = node["choices"][choice]
    if not node["op"]:
        return _choice(c)
    if value in node["values"]:
        return c["results"][node["values"].index(value)]
    return c["operands"][node["takes"].index(value)]


def heading(graph: Described) -> str:
    gap = f", gap {graph['gap']:.2g}" if graph["gap"] else ""
    return f"@{graph['function']} on {graph['mesh']}: {_time(graph['objective'])}{gap}"
