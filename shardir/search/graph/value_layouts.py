"""The layouts that a value may have: those in which an op makes or uses it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, Operation, OpResult, SSAValue

from shardir.algebra.layout import Layout, replicated
from shardir.algebra.mesh import Mesh
from shardir.analysis.functions import values
from shardir.analysis.groups import sharding_groups
from shardir.analysis.roles import ties
from shardir.compat.xdsl import operands_of
from shardir.dialects.dist import sharding_of
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import unsharded_type
from shardir.search.graph.candidates import Candidate, Candidates

ValueLayouts = tuple[Layout, ...]

Ties = Mapping[SSAValue, SSAValue]
"""Values that have the layout of another one, each with that other, which comes first."""


def tied_values(f: FuncOp, block: Block) -> Ties:
    """Return the ties of a function: of new values of parameters and states, and of the values of
    a sharding group."""
    order = {v: i for i, v in enumerate(values(block))}
    found: dict[SSAValue, set[SSAValue]] = {}
    for together in [*ties(f).items(), *sharding_groups(block)]:
        joined = set(together).union(*(found[v] for v in together if v in found))
        found.update(dict.fromkeys(joined, joined))
    firsts = {id(s): min(s, key=order.__getitem__) for s in found.values()}
    return {v: first for v, s in found.items() if (first := firsts[id(s)]) is not v}


def result_index(v: SSAValue) -> int:
    """Return the number of a value among its op's results."""
    assert isinstance(v, OpResult)
    return v.index


def operand_indices(op: Operation, v: SSAValue) -> tuple[int, ...]:
    """Return the numbers of the operands at which an op uses a value."""
    return tuple([i for i, w in enumerate(operands_of(op)) if w is v])


def needed(c: Candidate, at: Sequence[int]) -> tuple[Layout, ...]:
    """Return the layouts in which a candidate needs the value of these operands."""
    return tuple(dict.fromkeys(c.operands[i] for i in at))


class UserOfValue(NamedTuple):
    """An op that uses a value: its candidates and the operands."""

    candidates: Candidates
    at: tuple[int, ...]

    @property
    def needs(self) -> list[tuple[Layout, ...]]:
        """The layouts that each candidate needs."""
        return [needed(c, self.at) for c in self.candidates]


@dataclass(frozen=True)
class Uses:
    """The makers and users of a value and of those that are tied to it.

    Attributes:
        values: the value, then the tied ones.
        makers: candidates of the ops that make them, and the number of the result.
        users: of the ops that use them.
    """

    values: tuple[SSAValue, ...]
    makers: tuple[tuple[Candidates, int], ...]
    users: tuple["UserOfValue", ...]

    @staticmethod
    def of(
        v: SSAValue,
        tied: Sequence[SSAValue],
        users: Mapping[SSAValue, Sequence[Operation]],
        candidates: Mapping[Operation, Candidates],
    ) -> "Uses":
        every = (v, *tied)
        makers = [
            (candidates[w.owner], w.index)
            for w in every if isinstance(w, OpResult) and w.owner in candidates
        ]  # fmt: skip
        used = [
            UserOfValue(candidates[op], operand_indices(op, w))
            for w in every for op in users.get(w, []) if isinstance(op, TensorOp)
        ]  # fmt: skip
        return Uses(every, tuple(makers), tuple(used))

    @property
    def key(self) -> tuple:
        """Equal for values with equal layouts, as long as the candidates live."""
        users = tuple([(id(user.candidates), user.at) for user in self.users])
        makers = tuple([(id(choices), i) for choices, i in self.makers])
        return (*(v.type for v in self.values), users, makers)

    def layouts(self, mesh: Mesh) -> ValueLayouts:
        """Return the layouts that the value may have: the annotated one, or the complete ones in
        which something makes or uses it, those over most devices first. An annotation with open
        dimensions allows some of them, and its own layout."""
        annotations = [s for s in map(sharding_of, self.values) if s is not None]
        closed = next((s.layout for s in annotations if not s.open), None)
        if closed is not None:
            return (closed.simplified(mesh),)
        needs = (l for user in self.users for some in user.needs for l in some)
        found = dict.fromkeys(l for l in needs if not l.partial)
        for choices, i in self.makers:
            found.update(dict.fromkeys(c.results[i].complete for c in choices))
        if not found:  # no op uses it
            rank = len(unsharded_type(self.values[0]).get_shape())
            found[replicated(mesh.name, rank)] = None
        for s in annotations:
            allowed = [l for l in found if s.allows(l, mesh)]
            found = dict.fromkeys(allowed or [s.layout.simplified(mesh)])
        return tuple(sorted(found, key=lambda l: -mesh.extent(l.used)))
