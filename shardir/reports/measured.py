"""The measured run of a trace, which `shard-run --trace` writes, by the ops of a program.

The trace has an event for each run of an op on each rank, under the name that the op has in the
simulated run too. Ops of one name are told apart by their order.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from shardir.diagnostics import ShardirError
from shardir.reports.record import COMPUTES, MOVES, WAITS, EventRows, MeasuredRecord
from shardir.syntax.files import read_text

CALLS, COMPUTE = "calls", "compute"
"""The row of calls, and the row of computation and waits."""

PREFIXES = ("wait for the last rank at ", "wait for ")

MICRO = 1e-6


def read_trace(path: Path) -> dict[str, Any]:
    """Return a trace of Chrome's format.

    Raises:
        ShardirError: the file cannot be read, or is no trace.
    """
    try:
        found = json.loads(read_text(path))
        if isinstance(found, dict) and isinstance(found.get("traceEvents"), list):
            return found
    except ValueError:
        pass
    raise ShardirError(f"{path}: expected a trace that shard-run --trace wrote, got another file")


def measured_record(
    trace: Mapping[str, Any], function: str, names: Sequence[str], moves: Sequence[bool]
) -> MeasuredRecord:
    """Return the measured run of a function.

    Args:
        names: of the events of each op.
        moves: whether an op communicates.

    Raises:
        ShardirError: the trace has no measured call of the function, or of another program.
    """
    processes, rows = dict[int, str](), dict[tuple[int, int], str]()
    for e in trace["traceEvents"]:
        if e.get("ph") == "M" and e.get("name") == "process_name":
            processes[e["pid"]] = e["args"]["name"]
        elif e.get("ph") == "M" and e.get("name") == "thread_name":
            rows[e["pid"], e["tid"]] = e["args"]["name"]
    wanted = f"measured @{function}, rank "
    pids = [pid for pid, name in processes.items() if name.startswith(wanted)]
    if not pids:
        raise ShardirError(
            f"--trace: expected a measured run of @{function}, got "
            f"{', '.join(sorted(set(processes.values()))[:4]) or 'no process'}; write it with "
            "shard-run --trace"
        )
    by_rank = {pid: list[dict[str, Any]]() for pid in pids}
    for e in trace["traceEvents"]:
        if e.get("ph") == "X" and e["pid"] in by_rank:
            by_rank[e["pid"]].append(e)
    of_name = defaultdict[str, list[int]](list)
    for i, name in enumerate(names):
        of_name[name].append(i)
    taken = [list[float]() for _ in names]
    waited = [list[float]() for _ in names]
    calls, timelines, computed, exposed = (
        list[float](),
        list[EventRows](),
        list[float](),
        list[float](),
    )
    for pid in pids:
        spans = [e for e in by_rank[pid] if rows[pid, e["tid"]] == CALLS]
        calls += [e["dur"] * MICRO for e in spans]
        last: EventRows = {}
        for span in spans:
            begin, end = span["ts"], span["ts"] + span["dur"]
            seen, last = defaultdict[tuple[str, str], int](int), {}
            work = waits = 0.0
            sums, waits_of = defaultdict[int, float](float), defaultdict[int, float](float)
            mine = (e for e in by_rank[pid] if begin <= e["ts"] <= end)
            for e in sorted(mine, key=lambda e: e["ts"]):
                row = rows[pid, e["tid"]]
                is_wait = e.get("cat") in ("exposed", "skew")
                if row == CALLS or e.get("cat") not in (
                    "computation", "communication", "exposed", "skew"
                ):  # fmt: skip
                    continue
                name, seconds = e["name"], e["dur"] * MICRO
                for prefix in PREFIXES if is_wait else ():
                    name = name.removeprefix(prefix)
                group = row if row == COMPUTE else "links"
                number, ops = seen[group, name], of_name.get(name, [])
                seen[group, name] += 1
                op = ops[number % len(ops)] if ops else -1
                kind = WAITS if is_wait else COMPUTES if row == COMPUTE else MOVES
                columns = last.setdefault(row, {"begin": [], "end": [], "op": [], "kind": []})
                at = (e["ts"] - begin) * MICRO
                for column, value in zip(
                    columns.values(), (round(at, 8), round(at + seconds, 8), op, kind), strict=True
                ):
                    column.append(value)
                if kind == COMPUTES:
                    work += seconds
                elif kind == WAITS:
                    waits += seconds
                    if op >= 0:
                        waits_of[op] += seconds
                if op >= 0 and kind == (MOVES if moves[op] else COMPUTES):
                    sums[op] += seconds
            computed.append(work)
            exposed.append(waits)
            for found, by_op in ((taken, sums), (waited, waits_of)):
                for op, seconds in by_op.items():
                    found[op].append(seconds)
        timelines.append(last)
    if not calls or sum(map(bool, taken)) < len(names) / 2:
        raise ShardirError(
            f"--trace: expected the run of this program, got a trace of @{function} of another one"
        )
    return MeasuredRecord(
        len(pids), len(calls) // len(pids), mean(calls),
        [round(mean(x), 9) if x else None for x in taken],
        [round(mean(x), 9) if x else None for x in waited],
        {"computation": mean(computed), "waits": mean(exposed),
         "rest": max(mean(calls) - mean(computed) - mean(exposed), 0.0)},
        timelines,
    )  # fmt: skip
