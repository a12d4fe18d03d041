"""Bytes that a device receives in one call of a program of JAX: in XLA's program, and in ours.

python test/bench/jax_bytes.py              # or the names of programs

The rule is that of rings: of a result of s bytes in a group of n, an all-reduce receives
2 s (n - 1) / n, an all-gather and an all-to-all s (n - 1) / n, a reduce-scatter s (n - 1), a
permute s; in whole elements. A collective in a loop counts as often as the loop runs.
"""

import os
import re
import sys
from math import ceil, prod
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support.jax_programs import PROGRAMS

import shardir

SIZES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "s64": 8, "f64": 8, "bf16": 2}
COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
HEAD = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
CALLED = re.compile(r"(?:body|condition|to_apply|calls|branch_computations)=(\{[^}]*\}|%?[\w.-]+)")
NAME = re.compile(r"[\w.-]+")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
OF_GROUPS = re.compile(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]+)\})")


def bytes_of(text: str, n: int, kind: str) -> int:
    """Return what a device receives in a collective over n devices with results of these types."""
    total = 0
    for element, sizes in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", text):
        count = prod(int(size) for size in sizes.split(",") if size)
        share = ceil(count * (n - 1) / n)
        total += SIZES[element] * {
            "all-reduce": 2 * share, "reduce-scatter": count * (n - 1), "collective-permute": count,
        }.get(kind, share)  # fmt: skip
    return total


def runs_of(text: str) -> dict[str, int]:
    """Return how often each computation of a compiled module runs: the body of a loop as often as
    XLA knows it to run."""
    edges: dict[str, list[tuple[str, int]]] = {}
    entry = current = ""
    for line in text.splitlines():
        if head := HEAD.match(line):
            current = head[2]
            entry = current if head[1] else entry
        runs = int(found[1]) if (found := TRIPS.search(line)) else 1
        for names in CALLED.findall(line):
            edges.setdefault(current, []).extend((n, runs) for n in NAME.findall(names))
    counts = {entry: 1}
    todo = [(entry, 1)]
    while todo:
        name, runs = todo.pop()
        for callee, times in edges.get(name, ()):
            counts[callee] = counts.get(callee, 0) + runs * times
            todo.append((callee, runs * times))
    return counts


def of_xla(f: Any, args: Any, layouts: Any) -> tuple[int, int]:
    """Return the bytes and the number of collectives of XLA's program."""
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)

    def spread(spec: Any, argument: Any) -> Any:
        sharding = NamedSharding(mesh, spec or PartitionSpec())
        return jax.tree.map(lambda _: sharding, argument)

    def is_entry(x: Any) -> bool:
        return x is None or isinstance(x, PartitionSpec)

    shardings = jax.tree.map(spread, layouts, args, is_leaf=is_entry)
    text = jax.jit(f, in_shardings=shardings).lower(*args).compile().as_text() or ""
    runs = runs_of(text)
    total, count, current = 0, 0, ""
    for line in text.splitlines():
        if head := HEAD.match(line):
            current = head[2]
        if (found := COLLECTIVE.search(line)) is None:
            continue
        times, groups = runs[current], OF_GROUPS.search(line)
        n = 8 if groups is None else int(groups[1] or len(groups[2].split(",")))
        total += times * bytes_of(found[1], n, found[2])
        count += times
    return total, count


def of_shardir(f: Any, args: Any, layouts: Any) -> tuple[int, int]:
    """Return the bytes and the number of collectives of our program."""
    layouts = tuple(PartitionSpec() if entry is None else entry for entry in layouts)
    cost = shardir.from_jax(f, *args, in_shardings=layouts, mesh="dp = 2, tp = 4").cost()
    received = sum(received for received, _ in cost.communication.values())
    return round(received), sum(c.communicates for c in cost.ops)


def title(program: Any) -> str:
    """Return the description of a program, in a line."""
    words = " ".join(program.__doc__.split())
    return words.partition(":")[0].partition(". ")[0].removesuffix(".")


if __name__ == "__main__":
    print("| program | XLA: bytes, collectives | shardir |\n| --- | --- | --- |")
    for name in sys.argv[1:] or PROGRAMS:
        program = PROGRAMS[name]()
        (theirs, n), (own, m) = of_xla(*program), of_shardir(*program)
        row = f"`{name}`: {title(PROGRAMS[name])}", f"{theirs:,} in {n}", f"{own:,} in {m}"
        print(f"| {' | '.join(row)} |", flush=True)
