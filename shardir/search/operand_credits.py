"""What fuse-communication may gain by one collective for several operands of an op.

    %x1 = dist.all_gather %x over <a>        %x1, %w1 = dist.all_gather %x, %w over <a>
    %w1 = dist.all_gather %w over <a>    ->  %y = nn.matmul %x1, %w1
    %y = nn.matmul %x1, %w1

Before the update redistributions are priced one by one. Those of an op's operands are at the same
place, so those of one kind may become one, which has one latency. For a bound all of them but one
get their latencies back. Of a candidate of the op and a kind, the operand that keeps its latency is
the one that needs such a collective from most of its layouts: one whose layout is annotated always
does, or never. Any other gets it back if some operand may keep it. What it gets is a cost of the
operand's layout and the candidate, as its redistribution is; of a copy that several ops share it is
one of the copy, since that is made once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from xdsl.dialects.builtin import TensorType

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.algebra.routes import Table
from shardir.dialects.nn.types import itemsize
from shardir.search.bucket_kinds import ALL_KINDS, Kinds, packed, rates_of
from shardir.search.candidates import Candidates
from shardir.search.transfer_costs import numbered, transfer_seconds
from shardir.search.value_layouts import ValueLayouts, needed


class Use(NamedTuple):
    """The use of a value by an op, at the operands `at`.

    Attributes:
        ends: the variables of the value or of its maker, and of the op.
        key: equal for equal tables.
        runs: how often the value changes.
    """

    ends: tuple[int, int]
    key: tuple
    type: TensorType
    layouts: ValueLayouts
    candidates: Candidates
    at: Sequence[int]
    runs: int

    @property
    def sources(self) -> list[Layout]:
        return list(dict.fromkeys(l for l, _ in self.layouts))

    @property
    def needs(self) -> list[tuple[Layout, ...]]:
        return [needed(c, self.at) for c in self.candidates]


class Credits:
    """The credits of uses on a mesh.

    Args:
        table: returns the table of a key, made once.
    """

    def __init__(self, mesh: Mesh, table: Callable[[tuple, Callable[[], Table]], Table]):
        self.mesh, self.table = mesh, table
        self._rates: dict[tuple, Table] = {}
        self._copies: dict[int, list[Table]] = {}
        self._found: list[tuple[tuple[int, int], Table]] = []

    def add(self, uses: Sequence[Use]) -> None:
        """Add the operands of an op."""
        for use in uses:
            others = [u for u in uses if u.type.element_type == use.type.element_type]
            if len(others) == 1 and all(len(need) == 1 for need in use.needs):
                continue
            key = others.index(use), *(u.key for u in others)
            full = self.table((*key, "full"), partial(self.full, use, others))
            if not full.any():
                continue
            copied = np.array([[l in need for need in use.needs] for _, l in use.layouts])
            own = self.table((*key, "own"), lambda c=copied, full=full: np.where(c, 0.0, -full))
            self._found.append((use.ends, own))
            if copied.any():
                copy = self.table(
                    (*key, "copy"), lambda c=copied, full=full: np.where(c, full, 0.0).max(axis=1)
                )
                self._copies.setdefault(use.ends[0], []).append(copy)

    def tables(self) -> list[tuple[tuple[int, int], Table]]:
        """Return the credits as negative costs of two variables, which may be the same one."""
        found = [*self._found]
        for v, copies in self._copies.items():
            key = "copies", *map(id, copies)
            found.append(((v, v), self.table(key, lambda c=copies: np.diag(-np.max(c, axis=0)))))
        return found

    def full(self, use: Use, others: Sequence[Use]) -> Table:
        """Return the credit of a use among others: [layout, candidate]."""
        rates = np.stack([self.rates(other) for other in others])
        keeps, needs = rates.argmax(axis=0) == others.index(use), use.needs
        several = np.array([len(need) > 1 for need in needs])  # they may be of a kind too
        kinds = packed((rates.max(axis=0) > 0) & (~keeps | several[:, None, None]))
        sources = use.sources
        found, row = np.zeros((len(sources), len(needs))), {l: i for i, l in enumerate(sources)}
        pairs = [(i, l) for i, need in enumerate(needs) for l in need if kinds[i].any()]
        if pairs:
            of, targets = np.array([i for i, _ in pairs]), [l for _, l in pairs]
            credit = path_latencies(self.mesh, use.type, sources, targets, kinds[of])
            np.add.at(found, (slice(None), of), use.runs * credit)
        return found[[row[l] for l, _ in use.layouts]]

    def rates(self, use: Use) -> Table:
        """Return from which part of its layouts a use needs collectives of each kind: [candidate,
        collective, bit]."""
        if use.key not in self._rates:
            needs = use.needs
            column = {l: i for i, l in enumerate(dict.fromkeys(l for need in needs for l in need))}
            kinds = path_kinds(self.mesh, use.type, use.sources, [*column])
            of_target = rates_of(kinds)
            self._rates[use.key] = np.array(
                [of_target[[column[l] for l in need]].max(axis=0) for need in needs]
            )
        return self._rates[use.key]


def path_kinds(
    mesh: Mesh, t: TensorType, sources: Sequence[Layout], targets: Sequence[Layout]
) -> Kinds:
    """Return the kinds of the fusible collectives on the paths from each source to each target:
    [source, target, collective]; all of them where the planner has no path in a table."""
    found = np.tile(ALL_KINDS, (len(sources), len(targets), 1))
    for costs, rows, columns, among in numbered(mesh, t, sources, targets):
        found[among] = costs.on_paths(t.get_shape(), itemsize(t), rows, columns)[0]
    return found


def path_latencies(
    mesh: Mesh, t: TensorType, sources: Sequence[Layout], targets: Sequence[Layout], kinds: Kinds
) -> Table:
    """Return the latencies of the fusible collectives on the path from each source to each target
    that are of the kinds of the target, [target, collective], in seconds: of each no more than the
    redistribution takes; all that it takes where the planner has no path in a table."""
    found = transfer_seconds(mesh, t, sources, targets)
    for costs, rows, columns, among in numbered(mesh, t, sources, targets):
        of_targets = kinds[among[1][0]]
        seconds = costs.on_paths(t.get_shape(), itemsize(t), rows, columns, of_targets)[1]
        found[among] = np.minimum(found[among], seconds)
    return found
