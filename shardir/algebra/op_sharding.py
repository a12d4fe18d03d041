"""The choice of an op's sharding from the layouts of its operands."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import fsum

from shardir.algebra.estimates import ranked
from shardir.algebra.factors import FactorAxes, Factors, OpSharding, try_op_sharding
from shardir.algebra.layout import Layout, Shape, varying_over
from shardir.algebra.mesh import Axes, Mesh, sizes_of
from shardir.algebra.redistribution import estimated_seconds

MAX_CHOICES = 256
"""Bounds the shardings of an op that are compared if layouts disagree: each costs the plans of
all operands and results."""


@lru_cache(maxsize=65536)
def choose_op_sharding(
    factors: Factors,
    operands: tuple[Layout, ...],
    hints: tuple[Layout | None, ...],
    mesh: Mesh,
    shapes: tuple[Shape, ...],
    itemsizes: tuple[int, ...],
    shared: tuple[tuple[Layout, ...], ...] = (),
    converts: bool = False,
) -> OpSharding:
    """Return the cheapest sharding of an op.

    1. A factor on which all layouts agree is split so.
    2. For other factors, combinations of the proposed axes are compared by the estimated seconds of
       redistributions: of operands to the layouts that the op needs, and of results to their hints
       (without a hint, partial results are reduced).
    3. Partial operands of a linear op stay partial or are reduced first. Partial operands of a
       conversion stay partial: the program chooses the type in which they are added.
    4. Operands that vary over axes (`partial any`) stay so, and so do the results.
    5. Among equal times the finest split wins, then the one that keeps partial operands.

    Args:
        operands: the current layouts of the operands.
        hints: for each result, the desired layout or None.
        shapes: global shapes of the operands, then of the results.
        itemsizes: bytes of an element of each.
        shared: for each operand, layouts to which other ops have it redistributed anyway.
        converts: operands and results have several element types.
    """
    if varying := varying_over(operands, mesh):  # the op of each device's own values
        complete = tuple(l.complete if l.varying else l for l in operands)
        hints = tuple(None if h is None else h.complete for h in hints)
        found = choose_op_sharding(
            factors, complete, hints, mesh, shapes, itemsizes, shared, converts
        )
        kept = tuple(
            new.with_partial(old.varying, "any") if old.varying else new
            for new, old in zip(found.operands, operands, strict=True)
        )
        results = tuple(r.with_partial(varying, "any") for r in found.results)
        return OpSharding(found.axes, kept, results)
    partial = _kept_partial(factors, operands)
    wanted: dict[str, list[Axes]] = {f: [] for f, _ in factors.sizes}
    dims = [None if l is None else l.dims for l in (*operands, *hints)]
    for _, _, f, axes in factors.assignments(dims, mesh):
        proposal = () if f in factors.replicate else axes
        if proposal not in wanted[f]:
            wanted[f].append(proposal)
    if partial is None and all(len(w) <= 1 for w in wanted.values()):
        agreed = {f: w[0] for f, w in wanted.items() if w and w[0]}
        found = try_op_sharding(factors, agreed, mesh)
        if found is not None:
            return found

    def seconds(sharding: OpSharding) -> float:
        have = (*operands, *sharding.results)
        completed = [h or l.complete for h, l in zip(hints, sharding.results, strict=True)]
        return fsum(
            estimated_seconds(shape, mesh, source, target, size)
            for i, (shape, size, source, target) in enumerate(
                zip(shapes, itemsizes, have, (*sharding.operands, *completed), strict=True)
            )
            if source != target and not (i < len(shared) and target in shared[i])
        )

    def split(sharding: OpSharding) -> int:
        return mesh.extent(tuple(a for axes in sharding.axes.values() for a in axes))

    wider = {f: [*dict.fromkeys((*proposals, ()))] for f, proposals in wanted.items()}
    for proposals in (wanted, wider):  # the agreed axes may use an axis twice
        options = [
            found
            for chosen in _choices(factors, mesh, proposals)
            for keep in dict.fromkeys((partial, partial if converts else None))
            if (found := try_op_sharding(factors, chosen, mesh, keep)) is not None
        ]
        if options:
            return ranked(options, seconds, lambda option: -split(option))[0][1]
    unsharded = try_op_sharding(factors, {}, mesh)
    assert unsharded is not None, "every op can be computed unsharded"
    return unsharded


def _kept_partial(factors: Factors, operands: tuple[Layout, ...]) -> Layout | None:
    """Return a layout with the partial axes that pass through the op; None if none do."""
    if not factors.linear or not operands or not operands[0].partial:
        return None
    first = operands[0]
    equal = all(o.partial == first.partial and o.reduction == first.reduction for o in operands)
    if equal and (first.reduction == "sum" or factors.linear == "any"):
        return first
    return None


def _choices(factors: Factors, mesh: Mesh, wanted: dict[str, list[Axes]]) -> Iterator[FactorAxes]:
    """Yield the combinations of the factors' proposals.

    A factor with several proposals or none may stay unsharded. A factor with one proposal is split:
    redundant computation costs more than the communication that it saves. But a sparse and another
    factor may give up an axis for each other.
    """
    choices: dict[str, list[Axes]] = {}
    of_sparse, of_others = (
        [
            a
            for f, proposals in wanted.items()
            if (f in factors.sparse) == sparse
            for axes in proposals
            for a in axes
        ]
        for sparse in (True, False)
    )
    agreed: dict[str, Axes] = {}
    count = 1
    for f, proposals in wanted.items():
        options = {*proposals, ()}
        if f in factors.replicate:
            options = {()}
        elif len(proposals) == 1:
            (agreed[f],) = proposals
            others = of_others if f in factors.sparse else of_sparse
            if not any(mesh.overlap(a, b) for a in agreed[f] for b in others):
                options = {agreed[f]}
        choices[f] = sorted(options, key=lambda a: (-mesh.extent(a), a, sizes_of(a)))
        if count * len(options) > MAX_CHOICES:
            choices[f] = choices[f][:1]
        count *= len(choices[f])
    for combo in product(*choices.values()):
        chosen = {f: a for f, a in zip(choices, combo, strict=True) if a}
        used = [a for axes in chosen.values() for a in axes]
        given_up = [a for f, axes in agreed.items() if f not in chosen for a in axes]
        if all(any(mesh.overlap(a, b) for b in used) for a in given_up):
            yield chosen
