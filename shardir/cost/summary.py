"""The cost of a function in at most 25 lines, for people; report.py has the table of all ops.

@step on @m <dp = 2, tp = 8> of 16 devices: 78.2 ms, 93.7% of the peak rate
  computation    72.1 ms   92%  ##################
  communication   6.1 ms    8%  ##  2.3 ms exposed; {dp} 2.6 GiB
  memory          2.7 GiB   2%  of 141.0 GiB: activations 1.9 GiB, parameters 0.5 GiB, ...
  by layer  layers.* x 32 61.0 ms 78%; head 9.1 ms 12%; other 8.1 ms 10%
  by kind  nn.matmul 44.0 ms 56%; ...
  the dearest
     9.1 ms   12%  ##  nn.matmul at model.py:31
"""

import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import PurePath
from textwrap import TextWrapper
from typing import Any

from shardir.algebra.mesh import axes_text
from shardir.cost.seconds import OpCost
from shardir.diagnostics import seconds_text, size_text
from shardir.dialects.locations import file_location

LINES, DEAREST, GROUPS, BAR = 25, 10, 4, 20
"""The numbers of lines, ops and groups that are shown, and the characters of a bar of 100%."""


def summary(cost: Any) -> str:
    """Return the summary of a function's cost, a `FunctionCost` of report.py, in the width of the
    terminal."""
    width = max(shutil.get_terminal_size((100, 24)).columns, 60)
    wrapper = TextWrapper(width, subsequent_indent=" " * 18, break_on_hyphens=False)
    lines = [part for line in _lines(cost) for part in wrapper.wrap(line)]
    return "\n".join(lines[:LINES])


def _lines(cost: Any) -> Iterator[str]:
    total, share = cost.seconds, cost.peak_share
    of_peak = "" if share is None else f", {share:.1%} of the peak rate"
    yield f"@{cost.name} on {cost.mesh}: {seconds_text(total)}{of_peak}"
    yield from cost.parts()
    yield from memory_lines(cost)
    work = sum(c.seconds for c in cost.ops)
    layers, count = _by_layer(cost.ops)
    if len(layers) > 1 or count > 1:
        yield f"  by layer  {_groups(layers, work)}"
    if not work:
        return
    yield f"  by kind  {_groups(_sums((c.op.name, c.seconds) for c in cost.ops), work)}"
    yield "  the dearest"
    counts = Counter(map(_op, cost.ops))
    sums = _sums((_op(c), c.seconds) for c in cost.ops)
    for text, seconds in islice(sums.items(), DEAREST):
        if seconds:
            times = f" x {counts[text]}" if counts[text] > 1 else ""
            yield f"  {seconds_line('', seconds, work, 0)}  {text}{times}"


def communication_line(cost: Any) -> str:
    """Return the line of a function's communication."""
    exposed = seconds_text(sum(cost.exposed.values()))
    over = "; ".join(
        f"{axes_text(axes) if axes else 'hosts'} {size_text(n)}"
        for axes, (n, _) in cost.communication.items()
    )
    seconds = sum(c.seconds for c in cost.ops if c.communicates)
    return f"{seconds_line('communication', seconds, cost.seconds)}  {exposed} exposed; {over}"


def seconds_line(name: str, seconds: float, total: float, width: int = 14) -> str:
    share = seconds / total if total else 0.0
    return f"  {name:<{width}}{seconds_text(seconds):>9}  {share:>4.0%}  {_bar(share)}"


def _bar(share: float) -> str:
    return "#" * round(min(share, 1.0) * BAR)


def memory_lines(cost: Any) -> Iterator[str]:
    use, holds = cost.memory, cost.mesh.cluster_or_default.memory
    parts = sorted(use.parts.items(), key=lambda part: -part[1])
    held = ", ".join(f"{part} {size_text(n)}" for part, n in parts if n)
    if not holds:
        yield f"  {'memory':<14}{size_text(use.peak):>9}  {held}"
        return
    share = use.peak / holds
    over = ", more than it has" if share > 1 else ""
    yield (
        f"  {'memory':<14}{size_text(use.peak):>9}  {share:>4.0%}  {_bar(share)}  of "
        f"{size_text(int(holds))}{over}: {held}"
    )


def _sums(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums = defaultdict[str, float](float)
    for name, seconds in pairs:
        sums[name] += seconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _groups(sums: dict[str, float], total: float) -> str:
    """Return the largest groups with their seconds, and the rest."""
    shown = list(islice(sums.items(), GROUPS))
    rest = sum(sums.values()) - sum(seconds for _, seconds in shown)
    if len(sums) > GROUPS:
        shown.append((f"{len(sums) - GROUPS} more", rest))
    return "; ".join(
        f"{name} {seconds_text(s)} {s / total if total else 0:.0%}" for name, s in shown
    )


def _by_layer(ops: Iterable[OpCost]) -> tuple[dict[str, float], int]:
    """Return the seconds of equal layers together, by the paths of their values' names, and the
    largest number of equal layers."""
    numbers, pairs = defaultdict[str, set[str]](set), []
    for c in ops:
        hint = next((v.name_hint for v in c.op.results if v.name_hint), "")
        path, index = _layer(hint.removeprefix("d_"))
        numbers[path].add(index)
        pairs.append((path, c.seconds))
    counts = Counter({path: len(found) for path, found in numbers.items()})
    names = {p: f"{p} x {n}" if n > 1 else p for p, n in counts.items()}
    return _sums((names[path], seconds) for path, seconds in pairs), max(counts.values(), default=0)


def _layer(hint: str) -> tuple[str, str]:
    """Return the path of a value's layer, with a star for its number, and the number:
    `layers.3.up.y` is of `layers.*`, `layer3.y` of `layer*`."""
    *parts, _ = hint.split(".")
    for i, part in enumerate(parts):
        if match := re.fullmatch(r"(\D*)(\d+)", part):
            return ".".join([*parts[:i], f"{match[1]}*"]), match[2]
    return (parts[0] if parts else "other"), ""


def _op(c: OpCost) -> str:
    """Return an op with its place in the source, equal for the ops of equal layers."""
    place = file_location(c.op.location)
    at = f" at {PurePath(place[0]).name}:{place[1]}" if place else ""
    how = f" over {axes_text(c.axes)}" if c.axes else ""
    return f"{c.op.name}{how}{at}"
