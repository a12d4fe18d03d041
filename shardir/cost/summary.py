"""The cost of a function in at most 25 lines, for people; report.py has the table of all ops.

@step on @m <dp = 2, tp = 8>: 78.2 ms, 93.7% of the peak rate
  computation    72.1 ms   92%  ██████████████████▍
  communication   6.1 ms    8%  █▌                   2.3 ms exposed; {dp} 2.6 GiB
  memory          2.7 GiB   2%  ▍                    of 141.0 GiB: activations 1.9 GiB, ...
  by layer
    layers.* x 32  61.0 ms  78%  ███████████████▌
    head            9.1 ms  12%  ██▎
  by kind
    nn.matmul      44.0 ms  56%  ███████████▎
  the dearest
       9.1 ms   12%  ██▎  nn.matmul at model.py:31 x 64
"""

from collections.abc import Iterator, Sequence
from html import escape
from textwrap import TextWrapper
from typing import Any, NamedTuple

from shardir.algebra.mesh import axes_text
from shardir.cost.groups import CostGroup, by_kind, by_layer, by_line
from shardir.diagnostics import seconds_text, size_text, width

LINES, DEAREST, GROUPS, BAR = 25, 10, 3, 20
"""The numbers of lines, of lines of the source and of groups that are shown, and the characters of
a bar of 100%."""

EIGHTHS = " ▏▎▍▌▋▊▉"


class SummaryRow(NamedTuple):
    """A row of a summary.

    Attributes:
        share: of the whole, from 0 to 1; None has no bar.
        note: what stands behind the bar.
    """

    name: str
    amount: str
    share: float | None
    note: str = ""


class Section(NamedTuple):
    title: str
    rows: Sequence[SummaryRow]


def summary(cost: Any) -> str:
    """Return the summary of a function's cost, a `FunctionCost` of report.py, in the width of the
    terminal."""
    columns = width()
    wrapper = TextWrapper(columns, subsequent_indent=" " * 18, break_on_hyphens=False)
    lines = wrapper.wrap(title(cost))
    for section in sections(cost):
        indent = "    " if section.title else "  "
        lines += [f"  {section.title}"] * bool(section.title)
        name_width = max((len(row.name) for row in section.rows), default=0)
        bar_width = max((len(_bar(row.share)) for row in section.rows), default=0)
        for row in section.rows:
            line = f"{indent}{_text(row, name_width, bar_width)}"
            lines += [_cut(line, columns)] if section.title else wrapper.wrap(line)
    return "\n".join(lines[:LINES])


def html(cost: Any) -> str:
    """Return the summary as a table in HTML."""
    rows = [f"<caption>{escape(title(cost))}</caption>"]
    for section in sections(cost):
        if section.title:
            rows.append(f'<tr><th colspan="4" style="text-align: left">{section.title}</th></tr>')
        rows += map(_html_row, section.rows)
    return f"<table>{''.join(rows)}</table>"


def title(cost: Any) -> str:
    share = cost.peak_share
    of_peak = "" if share is None else f", {share:.1%} of the peak rate"
    return f"@{cost.name} on {cost.mesh}: {seconds_text(cost.seconds)}{of_peak}"


def sections(cost: Any) -> Iterator[Section]:
    """Yield the parts of the time and the memory, the layers, the kinds of ops, and the lines."""
    yield Section("", [*cost.parts(), memory_row(cost)])
    work = sum(c.seconds for c in cost.ops)
    layers = by_layer(cost.ops)
    if len(layers) > 1 or any(group.count > 1 for group in layers):
        yield _groups("by layer", layers, work)
    if not work:
        return
    yield _groups("by kind", by_kind(cost.ops), work)
    dearest = [group for group in by_line(cost.ops)[:DEAREST] if group.seconds]
    yield Section(
        "the dearest",
        [SummaryRow("", seconds_text(g.seconds), g.seconds / work, str(g)) for g in dearest],
    )


def communication_row(cost: Any) -> SummaryRow:
    """Return the row of a function's communication."""
    exposed = seconds_text(sum(cost.exposed.values()))
    over = "; ".join(
        f"{axes_text(axes) if axes else 'hosts'} {size_text(n)}"
        for axes, (n, _) in cost.communication.items()
    )
    seconds = sum(c.seconds for c in cost.ops if c.communicates)
    return seconds_row("communication", seconds, cost.seconds, f"{exposed} exposed; {over}")


def seconds_row(name: str, seconds: float, total: float, note: str = "") -> SummaryRow:
    return SummaryRow(name, seconds_text(seconds), seconds / total if total else 0.0, note)


def memory_row(cost: Any) -> SummaryRow:
    use, holds = cost.memory, cost.mesh.cluster_or_default.memory
    parts = sorted(use.parts.items(), key=lambda part: -part[1])
    held = ", ".join(f"{part} {size_text(n)}" for part, n in parts if n)
    if not holds:
        return SummaryRow("memory", size_text(use.peak), None, held)
    share = use.peak / holds
    over = ", more than it has" if share > 1 else ""
    return SummaryRow(
        "memory", size_text(use.peak), share, f"of {size_text(int(holds))}{over}: {held}"
    )


def _groups(title: str, groups: Sequence[CostGroup], total: float) -> Section:
    """Return the section of the largest groups, whose title has the rest."""
    rest = sum(group.seconds for group in groups[GROUPS:])
    if rest:
        others = f"{len(groups) - GROUPS} more, {seconds_text(rest)}, {rest / total:.0%}"
        title = f"{title} (and {others})"
    return Section(title, [seconds_row(str(g), g.seconds, total) for g in groups[:GROUPS]])


def _text(row: SummaryRow, name_width: int, bar_width: int) -> str:
    share = "" if row.share is None else f"{row.share:.0%}"
    name = f"{row.name:<{name_width}} " if name_width else ""
    bar = f"{_bar(row.share):<{bar_width}}"
    return f"{name}{row.amount:>9}  {share:>4}  {bar}  {row.note}".rstrip()


def _bar(share: float | None) -> str:
    eighths = round(min(share or 0.0, 1.0) * BAR * 8)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _cut(line: str, columns: int) -> str:
    return line if len(line) <= columns else f"{line[: columns - 1]}…"


def _html_row(row: SummaryRow) -> str:
    share = "" if row.share is None else f"{row.share:.0%}"
    bar = "" if row.share is None else (
        '<div style="background: #4477aa; height: 0.8em; '
        f'width: {min(row.share, 1.0) * 10:.2f}em"></div>'
    )  # fmt: skip
    left, right = 'style="text-align: left"', 'style="text-align: right"'
    return (
        f"<tr><td {left}>{escape(row.name)}</td><td {right}>{escape(row.amount)}</td>"
        f"<td {right}>{share}</td><td {left}>{bar}{escape(row.note)}</td></tr>"
    )
