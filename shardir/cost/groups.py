"""The ops of a function in groups: equal layers together, kinds of ops, lines of the source."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardir.algebra.mesh import axes_text
from shardir.cost.seconds import OpCost
from shardir.dialects.locations import short_location


@dataclass(frozen=True)
class CostGroup:
    """Ops together.

    Attributes:
        name: `layers.*`, a kind of op, or a kind with its line.
        count: the number of equal layers, or of ops.
        seconds: of all its ops, in computation and in communication.
        bytes: received by its collectives.
    """

    name: str
    count: int
    seconds: float
    communication: float
    bytes: int

    def __str__(self) -> str:
        return f"{self.name} x {self.count}" if self.count > 1 else self.name


def by_layer(ops: Iterable[OpCost]) -> list[CostGroup]:
    """Return the ops of equal layers together, by the paths of their values' names, and the dearest
    first."""
    groups: dict[str, list[OpCost]] = {}
    numbers: dict[str, set[str]] = {}
    for c in ops:
        path, number = layer_of(c)
        groups.setdefault(path, []).append(c)
        numbers.setdefault(path, set()).add(number)
    return _sorted(groups, {path: len(each) for path, each in numbers.items()})


def by_kind(ops: Iterable[OpCost]) -> list[CostGroup]:
    """Return the ops by their names, the dearest first."""
    groups: dict[str, list[OpCost]] = {}
    for c in ops:
        groups.setdefault(c.op.name, []).append(c)
    return _sorted(groups, dict.fromkeys(groups, 1))


def by_line(ops: Iterable[OpCost]) -> list[CostGroup]:
    """Return the ops by name and line of the source, which equal layers share, the dearest
    first."""
    groups: dict[str, list[OpCost]] = {}
    for c in ops:
        place = short_location(c.op)
        at = f" at {place}" if place else ""
        how = f" over {axes_text(c.axes)}" if c.axes else ""
        groups.setdefault(f"{c.op.name}{how}{at}", []).append(c)
    return _sorted(groups, {name: len(each) for name, each in groups.items()})


def layer_of(c: OpCost) -> tuple[str, str]:
    """Return the path of an op's layer, with a star for its number, and the number: `layers.3.up.y`
    is of `layers.*`, `layer3.y` and `layer3_y` of `layer*`."""
    hint = next((v.name_hint for v in c.op.results if v.name_hint), "").removeprefix("d_")
    *parts, last = hint.split(".")
    if parts and last.isdecimal():
        parts.append(last)  # the result of a layer
    for i, part in enumerate(parts):
        if match := re.fullmatch(r"(\D*)(\d+)", part):
            return ".".join([*parts[:i], f"{match[1]}*"]), match[2]
    if not parts and (match := re.match(r"([A-Za-z]+)(\d+)_(?=\D)", hint)):
        return f"{match[1]}*", match[2]
    return (parts[0] if parts else "other"), ""


def _sorted(groups: Mapping[str, list[OpCost]], counts: Mapping[str, int]) -> list[CostGroup]:
    totals = [
        CostGroup(
            name, counts[name], sum(c.seconds for c in each),
            sum(c.seconds for c in each if c.communicates),
            sum(c.bytes for c in each if c.communicates),
        )
        for name, each in groups.items()
    ]  # fmt: skip
    return sorted(totals, key=lambda group: -group.seconds)
