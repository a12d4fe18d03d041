"""The cost of a function as values of JSON: seconds, bytes, flops, and shares from 0 to 1."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shardir.algebra.mesh import axes_text
from shardir.cost.groups import by_kind, by_layer, layer_of
from shardir.cost.seconds import OpCost
from shardir.dialects.locations import file_location


def record(cost: Any) -> dict[str, Any]:
    """Return the record of a function's cost, a `FunctionCost` of report.py."""
    use, mesh = cost.memory, cost.mesh
    cluster = mesh.cluster_or_default
    return {
        "function": cost.name,
        "mesh": dict(mesh.axes),
        "devices": mesh.size,
        "seconds": cost.seconds,
        "peak_share": cost.peak_share,
        "flops": cost.flops,
        "computation": cost.computation,
        "communication": [
            {
                "axes": axes_text(axes) if axes else "hosts", "bytes": received, "seconds": seconds,
                "exposed": cost.exposed_over(axes),
            }
            for axes, (received, seconds) in cost.communication.items()
        ],
        "exposed": sum(cost.exposed.values()),
        "late": cost.late,
        "overlapped": cost.overlapped,
        "memory": {
            "peak": use.peak, "device": cluster.memory, "host": use.host, "at": _op(use.op),
            "parts": use.parts,
            "largest": [
                {"name": s.value.name_hint, "bytes": s.bytes, "part": s.part}
                for s in use.storages[:20]
            ],
        },
        "recomputed": None if cost.recomputed is None else asdict(cost.recomputed),
        "planned": None if cost.planned is None else cost.planned._asdict(),
        "ranks": [
            {"rank": i, "busy": busy, "memory": memory.peak}
            for i, (busy, memory) in enumerate(zip(cost.busy, cost.memories, strict=True))
        ],
        "layers": [asdict(group) for group in by_layer(cost.ops)],
        "kinds": [asdict(group) for group in by_kind(cost.ops)],
        "ops": [_of_op(c, cost) for c in cost.ops if c.seconds],
    }  # fmt: skip


def csv_text(costs: Sequence[Any]) -> str:
    """Return a table of the ops of functions as CSV."""
    rows = [
        {"function": cost.name, **_of_op(c, cost)} for cost in costs for c in cost.ops if c.seconds
    ]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else ["function"])
    writer.writeheader()
    writer.writerows({**row, "results": " ".join(row["results"])} for row in rows)
    return out.getvalue()


def _of_op(c: OpCost, cost: Any) -> dict[str, Any]:
    return {
        **_op(c.op),
        "layer": layer_of(c)[0],
        "flops": None if c.communicates else c.flops,
        "bytes": c.bytes,
        "seconds": c.seconds,
        "exposed": cost.exposed.get(c.op),
        "axes": axes_text(c.axes) if c.axes else None,
        "form": c.form or None,
    }


def _op(op: Any) -> dict[str, Any]:
    place = file_location(op.location)
    return {
        "results": [v.name_hint for v in op.results if v.name_hint],
        "op": op.name,
        "file": place[0] if place else None,
        "line": place[1] if place else None,
    }
