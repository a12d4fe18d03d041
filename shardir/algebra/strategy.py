"""Strategies: the number of slices of each dimension of an op's operands, or its axes.

`((2, 4), (4, 1))` has numbers of slices, as MindSpore's `shard()`; `({dp}, {tp})` names the axes.
Numbers become axes by dealing out the mesh's devices to the op's factors, major first, in the order
`Factors.dealt`; devices left over compute redundantly.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import gcd

from shardir.algebra.factors import FactorAxes, Factors, OpSharding, try_op_sharding
from shardir.algebra.layout import Layout, check_sizes
from shardir.algebra.mesh import Axes, Axis, Mesh, axes_text
from shardir.algebra.slices import SlicedDim
from shardir.diagnostics import ShardirError, coded

Cut = int | Axes
"""A number of slices, or the axes that split."""


@dataclass(frozen=True)
class Strategy:
    """The cuts of an op's operands.

    Attributes:
        mesh: its name; None stands for the only mesh.
        operands: a cut for each dimension of each operand.
        results: the same for results; None if not given.
        partial: axes over which the operands of a linear op, and so its results, are partial.
        reduction: of partial operands.
    """

    mesh: str | None
    operands: tuple[tuple[Cut, ...], ...]
    results: tuple[tuple[Cut, ...], ...] | None = None
    partial: Axes = ()
    reduction: str = "sum"

    def __str__(self) -> str:
        mesh = f"@{self.mesh}, " if self.mesh else ""
        results = "" if self.results is None else f" -> {_cuts_text(self.results)}"
        partial = f", partial {self.reduction} {axes_text(self.partial)}" if self.partial else ""
        return f"{mesh}{_cuts_text(self.operands)}{results}{partial}"

    def op_sharding(self, factors: Factors, mesh: Mesh) -> OpSharding:
        """Return the sharding of an op with this strategy.

        Raises:
            ShardirError: the strategy does not fit the op or the mesh.
        """
        chosen = self.factor_axes(factors, mesh)
        partial = None
        if self.partial:
            self._check_partial(factors, mesh)
            partial = Layout(mesh.name, (), self.partial, self.reduction).simplified(mesh)
        found = try_op_sharding(factors, chosen, mesh, partial)
        if found is None:
            self._check_overlap(factors, chosen, mesh)
            where, names = next(
                (where, names)
                for where, names in _dimensions(factors)
                if factors.compose(names, chosen, mesh) is None
            )
            if isinstance(names, SlicedDim):
                raise ShardirError(_cannot_split(factors, names, where, f"strategy {self}"))
            message = f"{where}: expected consecutive elements in each shard, got strategy {self}"
            fix = "split its major factor only, or into single elements"
            raise ShardirError(coded("S6", message, use=fix))
        return found

    def _check_overlap(self, factors: Factors, chosen: FactorAxes, mesh: Mesh) -> None:
        """Raise ShardirError if two factors use overlapping axes (S9)."""
        uses = [(_first_dimension(factors, f), a) for f, axes in chosen.items() for a in axes]
        uses += [(f"partial {self.reduction}", a) for a in self.partial]
        for (first, a), (second, b) in combinations(uses, 2):
            if mesh.overlap(a, b):
                message = (
                    f"expected an axis for one factor only, got {a} for {first} and {b} for "
                    f"{second} in strategy {self}"
                )
                raise ShardirError(coded("S9", message))

    def _check_partial(self, factors: Factors, mesh: Mesh) -> None:
        """Raise ShardirError unless the op may have partial operands (S10)."""
        for a in self.partial:
            _check_axis(mesh, a, "partial")
        if not (factors.linear and (factors.linear == "any" or self.reduction == "sum")):
            message = (
                "expected complete operands of an op that is not linear in them, got partial "
                f"{self.reduction}"
            )
            raise ShardirError(coded("S10", message))

    def factor_axes(self, factors: Factors, mesh: Mesh) -> FactorAxes:
        """Return the axes of each factor of an op.

        Raises:
            ShardirError: a number of groups or entries is wrong, an axis is unknown, entries of one
                factor disagree, or the slices do not fit the devices.
        """
        counts: dict[str, int] = {}
        axes: dict[str, Axes] = {}
        self._read(factors, "operand", self.operands, factors.operands, mesh, counts, axes)
        if self.results is not None:
            self._read(factors, "result", self.results, factors.results, mesh, counts, axes)
        axes = {f: a for f, a in axes.items() if a}
        if counts and axes:
            number, named = (_first_dimension(factors, next(iter(d))) for d in (counts, axes))
            message = f"expected numbers or axes, got a number for {number} and axes for {named}"
            raise ShardirError(coded("S1", message))
        if axes:
            return axes
        dealt = factors.dealt or [f for f, _ in factors.sizes]
        order = tuple(f for f in dealt if counts.get(f, 1) > 1)
        total = 1
        for f in order:
            total *= counts[f]
        if total > mesh.size:
            message = (
                f"expected at most {mesh.size} slices on mesh {mesh}, got {total} in strategy "
                f"{_cuts_text(self.operands)}: {_slices_text(factors, order, counts)}"
            )
            raise ShardirError(coded("S2", message))
        taken = mesh.take(tuple(counts[f] for f in order))
        if taken is None:
            message = (
                f"expected numbers that divide the axes of mesh {mesh} in order, got "
                f"{' x '.join(str(counts[f]) for f in order)} slices: "
                f"{_slices_text(factors, order, counts)}"
            )
            raise ShardirError(coded("S3", message))
        return dict(zip(order, taken, strict=True))

    def _read(
        self,
        factors: Factors,
        what: str,
        cuts: tuple[tuple[Cut, ...], ...],
        dims: tuple[tuple[tuple[str, ...], ...], ...],
        mesh: Mesh,
        counts: dict[str, int],
        axes: dict[str, Axes],
    ) -> None:
        if len(cuts) != len(dims):
            message = (
                f"expected a group for each of the op's {len(dims)} {what}s, got {len(cuts)} in "
                f"strategy {_cuts_text(cuts)}"
            )
            raise ShardirError(coded("S4", message, use="write a group for each"))
        for i, (mine, ds) in enumerate(zip(cuts, dims, strict=True)):
            if len(mine) != len(ds):
                message = (
                    f"{what} {i}: expected an entry for each of its {len(ds)} dimensions, got "
                    f"{len(mine)}"
                )
                raise ShardirError(coded("S4", message, use="write a number or axes for each"))
            for d, (cut, names) in enumerate(zip(mine, ds, strict=True)):
                where = f"dimension {d} of {what} {i}"
                if isinstance(cut, int):
                    self._read_count(factors, where, cut, names, counts)
                else:
                    self._read_axes(factors, where, cut, names, mesh, axes)

    def _read_count(
        self, factors: Factors, where: str, cut: int, names: tuple[str, ...], counts: dict[str, int]
    ) -> None:
        left = cut
        for f in names:
            part = left if len(names) == 1 else gcd(left, factors.size(f))
            if counts.setdefault(f, part) != part:
                message = (
                    f"{where}: expected {counts[f]} slices, as of {_first_dimension(factors, f)}, "
                    f"which has the same factor, got {cut}"
                )
                raise ShardirError(coded("S5", message))
            left //= part
        if left > 1:
            raise ShardirError(_cannot_split(factors, names, where, f"{cut} slices"))
        if any(f in factors.replicate for f in names) and cut > 1:
            message = f"{where}: expected an unsharded dimension, got {cut} slices"
            raise ShardirError(coded("S7", message))

    def _read_axes(
        self,
        factors: Factors,
        where: str,
        cut: Axes,
        names: tuple[str, ...],
        mesh: Mesh,
        axes: dict[str, Axes],
    ) -> None:
        for a in cut:
            _check_axis(mesh, a, where)
        check_sizes(mesh, cut, factors.dim_size(names), where)
        cut = mesh.simplify(cut)
        assigned, is_all = factors.assign(names, cut, mesh)
        if not is_all:
            raise ShardirError(_cannot_split(factors, names, where, axes_text(cut)))
        for f in names:
            mine = assigned.get(f, ())
            if axes.setdefault(f, mine) != mine:
                message = (
                    f"{where}: expected {axes_text(axes[f])}, as of "
                    f"{_first_dimension(factors, f)}, which has the same factor, got "
                    f"{axes_text(mine)}"
                )
                raise ShardirError(coded("S5", message))
            if mine and f in factors.replicate:
                message = f"{where}: expected an unsharded dimension, got {axes_text(mine)}"
                raise ShardirError(coded("S7", message, use="write {}"))


def _check_axis(mesh: Mesh, a: Axis, where: str) -> None:
    try:
        mesh.check_axis(a)
    except ShardirError as e:
        raise ShardirError(coded("S8", f"{where}: {e}")) from None


def _dimensions(factors: Factors) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each dimension of an op's values, as text for messages, with its factors."""
    for what, values in (("operand", factors.operands), ("result", factors.results)):
        for i, dims in enumerate(values):
            for d, names in enumerate(dims):
                yield f"dimension {d} of {what} {i}", names


def _first_dimension(factors: Factors, factor: str) -> str:
    """Return the first dimension that has a factor, as text for messages."""
    return next(where for where, names in _dimensions(factors) if factor in names)


def _slices_text(factors: Factors, order: Sequence[str], counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[f]} of {_first_dimension(factors, f)}" for f in order)


def _cannot_split(factors: Factors, names: tuple[str, ...], where: str, got: str) -> str:
    """Return the message for a split that a dimension's factors do not allow."""
    if not names:
        message = f"{where}: expected no split of a dimension without a factor, got {got}"
        return coded("S6", message, use="leave it unsharded")
    if isinstance(names, SlicedDim):
        slices = ", ".join(map(str, names.slices))
        message = f"{where}: expected equally many of its slices <{slices}> per shard, got {got}"
        return coded("S6", message, use="write a number, or the sizes of the shards")
    sizes = " x ".join(str(factors.size(f)) for f in names)
    message = f"{where}: expected a split of its factors {sizes} in this order, got {got}"
    return coded("S6", message, use="use numbers that divide them")


def _cuts_text(cuts: tuple[tuple[Cut, ...], ...]) -> str:
    def cut(c: Cut) -> str:
        return str(c) if isinstance(c, int) else axes_text(c)

    def group(items: list[str]) -> str:
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"

    return group([group([cut(c) for c in dims]) for dims in cuts])
