"""The reductions of several addends that the program makes once.

    %p1 = dist.all_reduce <sum> %p over <a>         %s = nn.add %p, %q
    %q1 = dist.all_reduce <sum> %q over <a>    ->   %s1 = dist.all_reduce <sum> %s over <a>
    %y = nn.add %z, %p1                             %t = nn.add %s1, %z
    %t = nn.add %y, %q1

A sum over pairs has a reduction for each addend that is partial where the other one is not. Of the
addends of a tree of sums, all in one layout, `simplify-communication` adds those first that equal
reductions end with, in the layout before. So what it saves is subtracted from the cost of a
solution: all but one of these reductions, less what the sums take longer.
"""

from collections.abc import Mapping, Sequence

from xdsl.ir import Attribute, Operation

from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.dialects.nn import AddOp
from shardir.dialects.nn.types import itemsize, unsharded_type
from shardir.search.candidates import OpFacts
from shardir.search.copies import source
from shardir.search.operand_credits import Use
from shardir.search.shared_moves import moves_of
from shardir.search.value_layouts import needed


class SummedMoves:
    """The reductions of the addends of sums, of which the uses of each op are given."""

    def __init__(self, mesh: Mesh, uses: Mapping[tuple[Operation, Attribute], Sequence[Use]]):
        self.mesh = mesh
        self._sums = {
            op: both for (op, _), both in uses.items()
            if isinstance(op, AddOp) and len(both) == 2
            and all(unsharded_type(use.value) == unsharded_type(op.out) for use in both)
        }  # fmt: skip

    def seconds(self, choice: Sequence[int]) -> float:
        """Return the seconds that the program of a solution takes less."""
        inside, total = set[Operation](), 0.0
        for op in reversed(self._sums):
            if op not in inside:
                tree, addends = [op], list[Use]()
                for sum in tree:
                    for use in self._sums[sum]:
                        inner = use.value.owner
                        if inner in self._sums and self._is_in_place(use, inner, choice):
                            tree.append(inner)
                        else:
                            addends.append(use)
                inside.update(tree)
                total += self._of_addends(op, addends, choice) if len(addends) > 1 else 0.0
        return total

    def _is_in_place(self, use: Use, inner: AddOp, choice: Sequence[int]) -> bool:
        """Whether a sum is used once, in the layout in which it is made."""
        has_no_other = use.ends[0] == self._sums[inner][0].ends[1]
        return has_no_other and self._ends(use, choice)[0] == self._ends(use, choice)[1]

    def _ends(self, use: Use, choice: Sequence[int]) -> tuple[Layout, Layout]:
        """Return the layouts from which and to which the value of a use is redistributed."""
        i, j = use.ends
        (need,) = needed(use.candidates[choice[j]], use.at)
        return source(self.mesh, use.moved.type, use.layouts[choice[i]], need), need

    def _of_addends(self, op: AddOp, addends: Sequence[Use], choice: Sequence[int]) -> float:
        """Return the seconds that are saved of the addends of a tree whose last sum is an op."""
        total, made, facts = 0.0, set[tuple[tuple[Layout, CollectiveStep], ...]](), OpFacts.of(op)
        for use in addends:
            have, need = self._ends(use, choice)
            way: tuple[tuple[Layout, CollectiveStep], ...] = ()
            for now, step, seconds in reversed(self._moves(use, have, need)):
                if not (step.record.reduces and now.reduction == "sum"):
                    break
                way = (*way, (now, step))
                if way in made:
                    longer = self._add(facts, now) - self._add(facts, step.layout)
                    total += use.runs * (seconds - longer)
                made.add(way)
        return total

    def _moves(
        self, use: Use, have: Layout, need: Layout
    ) -> list[tuple[Layout, CollectiveStep, float]]:
        """Return the moves of an addend's own redistribution, each with the layout before it and
        its seconds."""
        if use.moved.dims is not None:
            return []  # a broadcast is between it and the sum
        t = use.moved.type
        moves = moves_of(self.mesh, t.get_shape(), itemsize(t), have, need)
        before = [have, *(step.layout for step, _ in moves)]
        return [(now, *move) for now, move in zip(before, moves, strict=False)]

    def _add(self, facts: OpFacts, layout: Layout) -> float:
        """Return the time of a sum of values of a layout."""
        axes = facts.factors.axes_of([layout] * len(facts.types), self.mesh)
        return facts.seconds(facts.factors, axes, self.mesh)
