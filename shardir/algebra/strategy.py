"""What a user says about one op: how often each dimension of its operands is cut.

`((2, 4), (4, 1))` gives numbers of slices, as `shard()` in the documents does; `({dp}, {tp})`
names the axes. Numbers become axes by dealing out the mesh's devices to the op's factors in
order, major first; devices left over repeat the calculation.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import gcd, prod

from shardir.algebra.factors import FactorAxes, Factors, OpSharding, try_op_sharding
from shardir.algebra.layout import Layout, check_sizes
from shardir.algebra.mesh import Axes, Axis, Mesh, axes_text
from shardir.diagnostics import ShardirError

Cut = int | Axes
"""A number of slices, or the axes that cut."""


@dataclass(frozen=True)
class Strategy:
    """One tuple of cuts per operand, optionally one per result; `mesh` None is the only mesh. A
    linear op may take operands that are `partial`, and pass that on."""

    mesh: str | None
    operands: tuple[tuple[Cut, ...], ...]
    results: tuple[tuple[Cut, ...], ...] | None = None
    partial: Axes = ()
    reduction: str = "sum"

    def __str__(self) -> str:
        mesh = f"@{self.mesh}, " if self.mesh else ""
        results = "" if self.results is None else f" -> {_cuts_text(self.results)}"
        kept = f", partial {self.reduction} {axes_text(self.partial)}" if self.partial else ""
        return f"{mesh}{_cuts_text(self.operands)}{results}{kept}"

    def op_sharding(self, factors: Factors, mesh: Mesh) -> OpSharding:
        """The placement that it states of an op.

        Raises:
            ShardirError: it does not fit the op or the mesh.
        """
        chosen = self.factor_axes(factors, mesh)
        partial = None
        if self.partial:
            self._check_partial(factors, mesh)
            partial = Layout(mesh.name, (), self.partial, self.reduction).simplified(mesh)
        found = try_op_sharding(factors, chosen, mesh, partial)
        if found is None:
            self._check_twice(factors, chosen, mesh)
            place = next(
                place
                for place, names in _dimensions(factors)
                if factors.compose(names, chosen, mesh) is None
            )
            raise ShardirError(
                f"[S6] with the strategy {self} {place}, which is made of several, would not be "
                "cut into runs of rows; cut the first of them only, or into single rows"
            )
        return found

    def _check_twice(self, factors: Factors, chosen: FactorAxes, mesh: Mesh) -> None:
        places = [(_place(factors, f), a) for f, axes in chosen.items() for a in axes]
        places += [(f"partial {self.reduction}", a) for a in self.partial]
        for (first, a), (second, b) in combinations(places, 2):
            if mesh.overlap(a, b):
                raise ShardirError(
                    f"[S9] the strategy {self} uses one axis twice: {a} for {first}, and {b} for "
                    f"{second}; take different axes, or leave one out"
                )

    def _check_partial(self, factors: Factors, mesh: Mesh) -> None:
        for a in self.partial:
            _check_axis(mesh, a, "partial")
        if not (factors.linear and (factors.linear == "any" or self.reduction == "sum")):
            raise ShardirError(
                f"[S10] the op does not pass a partial {self.reduction} on; "
                "leave it out of the strategy, and it is reduced before"
            )

    def factor_axes(self, factors: Factors, mesh: Mesh) -> FactorAxes:
        """The axes of each factor of an op.

        Raises:
            ShardirError: the arity is wrong, an axis is unknown, sizes of one factor disagree,
                or the slices exceed (or do not fit) the devices.
        """
        counts: dict[str, int] = {}
        axes: dict[str, Axes] = {}
        self._read(factors, "operand", self.operands, factors.operands, mesh, counts, axes)
        if self.results is not None:
            self._read(factors, "result", self.results, factors.results, mesh, counts, axes)
        axes = {f: a for f, a in axes.items() if a}
        if counts and axes:
            raise ShardirError(
                "[S1] a strategy gives numbers or axes, not both in one: "
                f"{_place(factors, next(iter(counts)))} has a number, "
                f"{_place(factors, next(iter(axes)))} has axes; write axes for both"
            )
        if axes:
            return axes
        order = tuple(f for f, _ in factors.sizes if counts.get(f, 1) > 1)
        total = 1
        for f in order:
            total *= counts[f]
        if total > mesh.size:
            raise ShardirError(
                f"[S2] the strategy {_cuts_text(self.operands)} cuts into {total} parts, "
                f"{_cut_places(factors, order, counts)}, but mesh {mesh} has {mesh.size} devices; "
                f"take numbers whose product is {mesh.size} at most"
            )
        taken = mesh.take(tuple(counts[f] for f in order))
        if taken is None:
            raise ShardirError(
                f"[S3] {' x '.join(str(counts[f]) for f in order)} slices, "
                f"{_cut_places(factors, order, counts)}, do not fit the axes of mesh {mesh}; take "
                "numbers whose products are made of its axes' sizes"
            )
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
            raise ShardirError(
                f"[S4] the strategy {_cuts_text(cuts)} is for {len(cuts)} {what}s, "
                f"the op has {len(dims)}; write a group for each"
            )
        for i, (mine, ds) in enumerate(zip(cuts, dims, strict=True)):
            if len(mine) != len(ds):
                raise ShardirError(
                    f"[S4] the strategy cuts {len(mine)} dimensions of {what} {i}, "
                    f"which has {len(ds)}; write a number or axes for each"
                )
            for d, (cut, names) in enumerate(zip(mine, ds, strict=True)):
                place = f"dimension {d} of {what} {i}"
                if isinstance(cut, int):
                    self._read_count(factors, place, cut, names, counts)
                else:
                    self._read_axes(factors, place, cut, names, mesh, axes)

    def _read_count(
        self, factors: Factors, place: str, cut: int, names: tuple[str, ...], counts: dict[str, int]
    ) -> None:
        left = cut
        for f in names:
            part = left if len(names) == 1 else gcd(left, factors.size(f))
            if counts.setdefault(f, part) != part:
                raise ShardirError(
                    f"[S5] {place} is cut into {cut}, but {_place(factors, f)}, which it must "
                    f"match, is cut into {counts[f]}; give both the same number"
                )
            left //= part
        if left > 1:
            why = _why(factors, names)
            raise ShardirError(f"[S6] {place} can't be cut into {cut} parts: {why}")
        if any(f in factors.replicate for f in names) and cut > 1:
            raise ShardirError(f"[S7] {place} can't be cut: the op needs it whole; leave it at 1")

    def _read_axes(
        self,
        factors: Factors,
        place: str,
        cut: Axes,
        names: tuple[str, ...],
        mesh: Mesh,
        axes: dict[str, Axes],
    ) -> None:
        for a in cut:
            _check_axis(mesh, a, place)
        check_sizes(mesh, cut, prod(factors.size(f) for f in names), place)
        cut = mesh.simplify(cut)
        assigned, whole = factors.assign(names, cut, mesh)
        if not whole:
            why = _why(factors, names)
            raise ShardirError(f"[S6] {place} can't be cut over {axes_text(cut)}: {why}")
        for f in names:
            mine = assigned.get(f, ())
            if axes.setdefault(f, mine) != mine:
                raise ShardirError(
                    f"[S5] {place} is cut over {axes_text(mine)}, but {_place(factors, f)}, which "
                    f"it must match, is cut over {axes_text(axes[f])}; give both the same axes"
                )
            if mine and f in factors.replicate:
                raise ShardirError(f"[S7] {place} can't be cut: the op needs it whole; write {{}}")


def _check_axis(mesh: Mesh, a: Axis, place: str) -> None:
    try:
        mesh.check_axis(a)
    except ShardirError as e:
        raise ShardirError(f"[S8] {place}: {e}") from None


def _dimensions(factors: Factors) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every dimension of an op's values, as messages call it, with its factors."""
    for what, values in (("operand", factors.operands), ("result", factors.results)):
        for i, dims in enumerate(values):
            for d, names in enumerate(dims):
                yield f"dimension {d} of {what} {i}", names


def _place(factors: Factors, factor: str) -> str:
    """The first dimension that has a factor."""
    return next(place for place, names in _dimensions(factors) if factor in names)


def _cut_places(factors: Factors, order: Sequence[str], counts: Mapping[str, int]) -> str:
    return ", ".join(f"{_place(factors, f)} into {counts[f]}" for f in order)


def _why(factors: Factors, names: tuple[str, ...]) -> str:
    """Why a dimension can't be cut so, and how it can."""
    if not names:
        return "no other dimension of the op is cut with it; leave it whole"
    parts = " x ".join(str(factors.size(f)) for f in names)
    return f"the op has it as {parts}, which are cut in this order; take numbers that divide them"


def _cuts_text(cuts: tuple[tuple[Cut, ...], ...]) -> str:
    def cut(c: Cut) -> str:
        return str(c) if isinstance(c, int) else axes_text(c)

    def group(items: list[str]) -> str:
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"

    return group([group([cut(c) for c in dims]) for dims in cuts])
