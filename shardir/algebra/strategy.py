"""What a user says about one op: how often each dimension of its operands is cut.

`((2, 4), (4, 1))` gives numbers of slices, as `shard()` in the documents does; `({dp}, {tp})`
names the axes. Numbers become axes by dealing out the mesh's devices to the op's factors in
order, major first; devices left over repeat the calculation.
"""

from dataclasses import dataclass
from math import gcd, prod

from shardir.algebra.errors import ShardirError
from shardir.algebra.factors import FactorAxes, Factors, Placement, placed
from shardir.algebra.layout import Layout, check_sizes
from shardir.algebra.mesh import Axes, Mesh, axes_text

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

    def placement(self, factors: Factors, mesh: Mesh) -> Placement:
        """The placement that it states of an op.

        Raises:
            ShardirError: it does not fit the op or the mesh.
        """
        chosen = self.factor_axes(factors, mesh)
        partial = None
        if self.partial:
            partial = Layout(mesh.name, (), self.partial, self.reduction).simplified(mesh)
            self._check_partial(factors, partial, mesh)
        found = placed(factors, chosen, mesh, partial)
        if found is None:
            for i, dims in enumerate(factors.results):
                for d, names in enumerate(dims):
                    if factors.compose(names, chosen, mesh) is None:
                        raise ShardirError(
                            f"[S6] with the strategy {self} dimension {d} of result {i}, "
                            "which is made of several, would not be cut into runs of rows; cut the "
                            "first of them only, or into single rows"
                        )
            twice = "uses one axis twice"
            if not self.partial:
                twice = "splits two dimensions of the op over one axis"
            raise ShardirError(f"[S9] the strategy {self} {twice}")
        return found

    def _check_partial(self, factors: Factors, partial: Layout, mesh: Mesh) -> None:
        try:
            partial.check_axes(mesh)
        except ShardirError as e:
            raise ShardirError(f"[S8] {e}") from None
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
            raise ShardirError("[S1] a strategy gives numbers or axes, not both in one")
        if axes:
            return axes
        order = tuple(f for f, _ in factors.sizes if counts.get(f, 1) > 1)
        total = 1
        for f in order:
            total *= counts[f]
        if total > mesh.size:
            raise ShardirError(
                f"[S2] the strategy {_cuts_text(self.operands)} cuts into {total} parts, "
                f"but mesh {mesh} has {mesh.size} devices"
            )
        taken = mesh.take(tuple(counts[f] for f in order))
        if taken is None:
            raise ShardirError(
                f"[S3] {' x '.join(str(counts[f]) for f in order)} slices do not fit the axes of "
                f"mesh {mesh}; take numbers whose products are made of its axes' sizes"
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
                f"the op has {len(dims)}"
            )
        for i, (mine, ds) in enumerate(zip(cuts, dims, strict=True)):
            if len(mine) != len(ds):
                raise ShardirError(
                    f"[S4] the strategy cuts {len(mine)} dimensions of {what} {i}, "
                    f"which has {len(ds)}"
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
                    f"[S5] {place} is cut into {cut}, but the dimension that it must match "
                    f"is cut into {counts[f]}; give both the same number"
                )
            left //= part
        if left > 1:
            raise ShardirError(f"[S6] {place} can't be cut into {cut} parts")
        if any(f in factors.replicate for f in names) and cut > 1:
            raise ShardirError(f"[S7] {place} can't be cut: the op needs it whole")

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
            try:
                mesh.check_axis(a)
            except ShardirError as e:
                raise ShardirError(f"[S8] {place}: {e}") from None
        check_sizes(mesh, cut, prod(factors.size(f) for f in names), place)
        cut = mesh.simplify(cut)
        assigned, whole = factors.assign(names, cut, mesh)
        if not whole:
            raise ShardirError(f"[S6] {place} can't be cut over {axes_text(cut)}")
        for f in names:
            mine = assigned.get(f, ())
            if axes.setdefault(f, mine) != mine:
                raise ShardirError(
                    f"[S5] {place} is cut over {axes_text(mine)}, but the dimension that it must "
                    f"match is cut over {axes_text(axes[f])}; give both the same axes"
                )
            if mine and f in factors.replicate:
                raise ShardirError(f"[S7] {place} can't be cut: the op needs it whole")


def _cuts_text(cuts: tuple[tuple[Cut, ...], ...]) -> str:
    def cut(c: Cut) -> str:
        return str(c) if isinstance(c, int) else axes_text(c)

    def group(items: list[str]) -> str:
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"

    return group([group([cut(c) for c in dims]) for dims in cuts])
