"""The moves that several ops share beyond the copies of a value.

    %s: [{a}, {}]    all_to_all over <a>    [{}, {a}]    for two einsums: made once
                                            [{a}, {}]    for a third op

A sum over pairs has the redistribution of a value for each op that uses it. With copies (copies.py)
it has what they share once, but not all values have copies, nor all that may be shared. So what is
left is subtracted from the cost of a solution: moves with which several redistributions of one
value begin, for ops before the update.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from xdsl.ir import SSAValue

from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Mesh
from shardir.algebra.redistribution import plan
from shardir.algebra.steps import step_seconds
from shardir.dialects.nn.types import itemsize
from shardir.search.copies import source
from shardir.search.operand_credits import Use
from shardir.search.value_layouts import needed


class SharedMoves:
    """The moves that are shared by the uses of the same value, of all uses by some ops."""

    def __init__(self, mesh: Mesh, ops: Iterable[Sequence[Use]]):
        self.mesh = mesh
        of: dict[SSAValue, list[Use]] = {}
        for use in (use for uses in ops for use in uses):
            of.setdefault(use.value, []).append(use)
        self._shared = [uses for uses in of.values() if len(uses) > 1]

    def seconds(self, choice: Sequence[int]) -> float:
        """Return the seconds of a solution's moves that its cost has for each of several ops,
        without those for the first one."""
        return sum(self._of_value(uses, choice) for uses in self._shared)

    def _of_value(self, uses: Sequence[Use], choice: Sequence[int]) -> float:
        total, made = 0.0, set[tuple[Layout | CollectiveStep, ...]]()
        for use in uses:
            (i, j), of = use.ends, use.moved
            for need in needed(use.candidates[choice[j]], use.at):
                have = source(self.mesh, of.type, use.layouts[choice[i]], need)
                t, *ends = of.transfer(have, need)
                way: tuple[Layout | CollectiveStep, ...] = (ends[0],)
                for step, seconds in moves_of(self.mesh, t.get_shape(), itemsize(t), *ends):
                    way = (*way, step)
                    total += use.runs * seconds if way in made else 0.0
                    made.add(way)
        return total


@lru_cache(maxsize=65536)
def moves_of(
    mesh: Mesh, shape: Shape, itemsize: int, source: Layout, target: Layout
) -> tuple[tuple[CollectiveStep, float], ...]:
    """Return the moves of a redistribution, with their seconds."""
    steps = plan(shape, mesh, source, target, itemsize) if source != target else []
    before = [source, *(step.layout for step in steps)]
    return tuple([
        (step, step_seconds(mesh, shape, have, step, itemsize))
        for have, step in zip(before, steps, strict=False)
    ])  # fmt: skip
