"""Changes of a solution that lead to one that keeps to a limit of live bytes, and to a cheaper one.

Equal layers have equal tables, so that the cheapest solution for a price of memory changes all of
them at once, and is over the limit or far below it. Here single variables change, and single parts
of the difference of two solutions.
"""

from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from shardir.algebra.arrays import Table
from shardir.search.problem.memory import LiveBytes, live, ops_of
from shardir.search.problem.problem import CostProblem

Changes = Mapping[int, int]
"""Variables with their new values."""


class Adjuster:
    """The solutions of a problem, with a limit of live bytes on a device."""

    def __init__(self, problem: CostProblem, held: Sequence[LiveBytes], limit: int):
        self.problem, self.neighbours = problem, problem.neighbours()
        self.held, self.limit, self.ops = held, limit, ops_of(held)
        self.holding: list[list[LiveBytes]] = [[] for _ in problem.unary]
        for h in held:
            for v in h.variables:
                self.holding[v].append(h)

    def adjusted(self, choice: Sequence[int], others: Sequence[Sequence[int]]) -> list[int]:
        """Return a solution made from one. Where it keeps to the limit, no change of one variable
        makes it cheaper within the limit, and parts of the `others` have been put into it."""
        now = list(choice)
        bytes_ = self._repair(now)
        if bytes_.max() <= self.limit:
            for other in others:
                bytes_ = self._move_towards(now, bytes_, other)
            self._improve(now, bytes_)
        return now

    def _repair(self, now: list[int]) -> Table:
        """Change each variable at most once, at the lowest cost for a byte less at the peak first,
        until the limit is kept. The peak never grows. Return the live bytes."""
        bytes_ = live(self.held, now)
        changed: set[int] = set()
        while (over := float(bytes_.max()) - self.limit) > 0:
            at = int(bytes_.argmax())
            remaining = (v for v in range(len(now)) if v not in changed)
            heap = [(*found, v) for v in remaining if (found := self._saving(now, v, at, over))]
            heapify(heap)
            if not heap:
                break
            while heap and int(bytes_.argmax()) == at and bytes_[at] > self.limit:
                before, _, v = heappop(heap)
                found = self._saving(now, v, at, float(bytes_[at]) - self.limit)
                if found is None:
                    continue
                if found[0] > before:
                    heappush(heap, (*found, v))
                    continue
                changed.add(v)
                if (bytes_ + self._added_bytes(now, {v: found[1]})).max() <= bytes_[at]:
                    bytes_ = self._change(now, bytes_, {v: found[1]})
        return bytes_

    def _saving(self, now: list[int], v: int, at: int, over: float) -> tuple[float, int] | None:
        """Return the cost for each byte saved at an op, at most `over` bytes counted, and the value
        of a variable for which it is lowest; None if no value saves any."""
        held = [h for h in self.holding[v] if h.span.start < at <= h.span.end + 1]
        if not held:
            return None
        bytes_ = np.sum([h.bytes[self._row(h, now, v)] for h in held], axis=0)
        saved = bytes_[now[v]] - bytes_
        useful = np.flatnonzero(saved > 0)
        if not len(useful):
            return None
        costs = self._costs(now, v)
        each = (costs[useful] - costs[now[v]]) / np.minimum(saved[useful], over)
        best = int(each.argmin())
        return float(each[best]), int(useful[best])

    def _move_towards(self, now: list[int], bytes_: Table, other: Sequence[int]) -> Table:
        """Take over the parts of another solution that lower the cost, as far as the limit is kept:
        those first that lower it most for each byte more. Return the live bytes."""
        parts = []
        for part in self._parts(now, other):
            cost, more = self._added_cost(now, part), self._added_bytes(now, part)
            if cost < 0:
                parts.append((cost / max(float(more.max()), 1.0), len(parts), part, more))
        for _, _, part, more in sorted(parts, key=lambda p: p[:2]):
            if (bytes_ + more).max() <= self.limit:
                bytes_ = self._change(now, bytes_, part)
        return bytes_

    def _parts(self, now: Sequence[int], other: Sequence[int]) -> Iterator[Changes]:
        """Yield the differences of two solutions, by connected variables: each changes cost and
        bytes by an amount of its own."""
        remaining = {v for v, (x, y) in enumerate(zip(now, other, strict=True)) if x != y}
        while remaining:
            reached = [min(remaining)]
            remaining.discard(reached[0])
            for v in reached:
                for u in self._near(v):
                    if u in remaining:
                        remaining.discard(u)
                        reached.append(u)
            yield {v: other[v] for v in reached}

    def _improve(self, now: list[int], bytes_: Table) -> None:
        """Change one variable at a time to its cheapest value that keeps to the limit, until no
        change makes the solution cheaper."""
        waiting = set(range(len(now)))
        over: dict[int, set[int]] = {}  # where cheaper values of a variable exceed the limit most
        while waiting:
            for v in sorted(waiting):
                waiting.discard(v)
                over.pop(v, None)
                costs = self._costs(now, v)
                for value in np.argsort(costs, kind="stable"):
                    if costs[value] >= costs[now[v]]:
                        break
                    more = self._added_bytes(now, {v: int(value)})
                    if (bytes_ + more).max() > self.limit:
                        over.setdefault(v, set()).add(int((bytes_ + more).argmax()))
                        continue
                    now[v], bytes_ = int(value), bytes_ + more
                    waiting.update(self._near(v))
                    waiting.update(u for u, ops in over.items() if any(more[i] < 0 for i in ops))
                    break

    # ---- costs and bytes of changes ----

    def _costs(self, now: Sequence[int], v: int) -> Table:
        """Return the costs of a variable's values, with all others as they are."""
        return self.problem.unary[v] + sum([t[:, now[u]] for u, t in self.neighbours[v]])

    def _near(self, v: int) -> list[int]:
        """Return the variables that cost or hold bytes together with one."""
        joined = (u for u, _ in self.neighbours[v])
        return [*joined, *(u for h in self.holding[v] for u in h.variables if u != v)]

    def _row(self, held: LiveBytes, now: Sequence[int], v: int) -> tuple:
        return tuple([slice(None) if u == v else now[u] for u in held.variables])

    def _added_cost(self, now: Sequence[int], changes: Changes) -> float:
        added = 0.0
        for v, value in changes.items():
            added += self.problem.unary[v][value] - self.problem.unary[v][now[v]]
            for u, t in self.neighbours[v]:
                if u not in changes or u > v:
                    added += t[value, changes.get(u, now[u])] - t[now[v], now[u]]
        return float(added)

    def _added_bytes(self, now: Sequence[int], changes: Changes) -> Table:
        """Return the bytes that changes add: of the arguments alone, then at each op."""
        change = np.zeros(self.ops + 1)
        for h in {id(h): h for v in changes for h in self.holding[v]}.values():
            more = float(h.bytes[tuple([changes.get(v, now[v]) for v in h.variables])])
            more -= h.at(now)
            change[h.span.start + 1] += more
            change[h.span.end + 2] -= more
        return np.cumsum(change)[:-1]

    def _change(self, now: list[int], bytes_: Table, changes: Changes) -> Table:
        """Change variables, and return the live bytes then."""
        bytes_ = bytes_ + self._added_bytes(now, changes)
        for v, value in changes.items():
            now[v] = value
        return bytes_
