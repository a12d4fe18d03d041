"""LU and QR factorizations of small matrices, column by column: the calls of LAPACK by which JAX
solves systems, inverts matrices, and draws orthogonal ones on a CPU; and approximate maxima."""

from math import inf

from shardir.build import Value, nn
from shardir.frontends.stablehlo.ops.triangular import BLOCK, check_rows, column_of, transposed
from shardir.frontends.stablehlo.translation import HloEntry, OpTranslation


def _getrf(t: OpTranslation, a: Value) -> tuple[Value, Value, Value]:
    """P A = L U in one matrix, whose diagonal is that of U; the row that each step swaps with its
    own, from 1; and 0, as of a matrix that has a factorization, or the first pivot that is 0."""
    *batch, rows, columns = a.shape
    check_rows(t, min(rows, columns), BLOCK)
    axis, shape = len(batch), tuple(batch)
    ids = t.iota((rows, 1), 0)
    pivots: list[Value] = []
    info = t.filled(0, shape, "i32")
    for k in range(min(rows, columns)):
        below = nn.abs(t.reshape(column_of(t, a, k, rows - k, k), (*shape, rows - k)))
        pivot = nn.argmax(below, axis=axis)
        pivot = nn.add(t.reshape(pivot, (*shape, 1, 1)), k)
        t.facts.bounds[pivot.ssa] = k, rows - 1
        pivots.append(pivot)
        if rows - k > 1:  # row k and that of the pivot, in each other's place
            order = nn.select(nn.compare(ids, k, how="eq"), pivot, ids)
            order = nn.select(nn.compare(ids, pivot, how="eq"), t.constant(k, "i64"), order)
            a = nn.take_along_axis(a, t.spread(order, a.shape), axis=axis)
        diagonal = column_of(t, a, k, 1, k)
        is_zero = nn.compare(diagonal, 0.0, how="eq")
        info = nn.select(
            nn.and_(t.reshape(is_zero, shape), nn.compare(info, 0, how="eq")),
            t.constant(k + 1, "i32"), info,
        )  # fmt: skip
        if rows - k == 1:
            break
        lower = column_of(t, a, k + 1, rows - k - 1, k)
        lower = nn.div(lower, nn.select(is_zero, t.constant(1.0), diagonal))
        top, rest = t.part(a, axis, 0, k + 1), t.part(a, axis, k + 1, rows - k - 1)
        parts = [t.part(rest, axis + 1, 0, k)] if k else []
        parts.append(lower)
        if columns - k > 1:
            row = t.part(t.part(a, axis, k, 1), axis + 1, k + 1, columns - k - 1)
            right = t.part(rest, axis + 1, k + 1, columns - k - 1)
            parts.append(nn.sub(right, nn.mul(lower, row)))
        rest = nn.concat(*parts, axis=axis + 1) if len(parts) > 1 else parts[0]
        a = nn.concat(top, rest, axis=axis)
    swapped = nn.concat(*pivots, axis=axis) if len(pivots) > 1 else pivots[0]
    swapped = nn.add(t.reshape(swapped, (*shape, len(pivots))), 1).to("i32")
    t.facts.bounds[swapped.ssa] = 1, rows
    return a, swapped, info


def _geqrf(t: OpTranslation, a: Value) -> tuple[Value, Value]:
    """R, with the vectors v of reflections I - tau v v^T below its diagonal, of which the first
    element is 1; and each tau, 0 where a column needs none."""
    *batch, rows, columns = a.shape
    count, axis, shape = min(rows, columns), len(batch), tuple(batch)
    check_rows(t, count, BLOCK)
    taus: list[Value] = []
    for k in range(count):
        left = rows - k
        first = column_of(t, a, k, 1, k)
        if left == 1:
            taus.append(t.filled(0, (*shape, 1)))
            break
        below = column_of(t, a, k + 1, left - 1, k)
        norm = nn.reduce(nn.square(below), kind="sum", dims=(axis, axis + 1))
        norm = t.reshape(norm, (*shape, 1, 1))
        is_done = nn.compare(norm, 0.0, how="eq")
        size = nn.sqrt(nn.add(nn.square(first), norm))
        beta = nn.select(nn.compare(first, 0.0, how="ge"), nn.neg(size), size)
        beta = nn.select(is_done, first, beta)
        safe = nn.select(is_done, t.constant(1.0), beta)
        tau = nn.select(is_done, t.constant(0.0), nn.div(nn.sub(beta, first), safe))
        gap = nn.select(is_done, t.constant(1.0), nn.sub(first, beta))
        v = nn.div(below, gap)
        taus.append(t.reshape(tau, (*shape, 1)))
        top, rest = t.part(a, axis, 0, k), t.part(a, axis, k, left)
        parts = [t.part(rest, axis + 1, 0, k)] if k else []
        parts.append(nn.concat(beta, v, axis=axis))
        if columns - k > 1:
            right = t.part(rest, axis + 1, k + 1, columns - k - 1)
            parts.append(_reflected(t, right, v, tau))
        rest = nn.concat(*parts, axis=axis + 1) if len(parts) > 1 else parts[0]
        a = nn.concat(top, rest, axis=axis) if k else rest
    tau = nn.concat(*taus, axis=axis) if count > 1 else taus[0]
    return a, tau


def _reflected(t: OpTranslation, x: Value, v: Value, tau: Value) -> Value:
    """Return (I - tau v v^T) x, of v without its first element, which is 1."""
    axis, rows = len(x.shape) - 2, x.shape[-2]
    first, rest = t.part(x, axis, 0, 1), t.part(x, axis, 1, rows - 1)
    projection = nn.mul(nn.add(first, nn.matmul(transposed(t, v), rest)), tau)
    return nn.concat(
        nn.sub(first, projection), nn.sub(rest, nn.mul(v, projection)), axis=axis
    )  # fmt: skip


def _orgqr(t: OpTranslation, a: Value, taus: Value) -> Value:
    """The first columns of the product of reflections, the last of which is applied first."""
    *batch, rows, columns = a.shape
    check_rows(t, columns, BLOCK)
    axis, shape = len(batch), tuple(batch)
    is_diagonal = nn.compare(t.iota((rows, 1), 0), t.iota((columns,), 0), how="eq")
    q = t.spread(is_diagonal.to(a.dtype), a.shape)
    for k in reversed(range(taus.shape[-1])):
        tau = t.reshape(t.part(taus, axis, k, 1), (*shape, 1, 1))
        rest = t.part(q, axis, k, rows - k)
        if rows - k > 1:
            rest = _reflected(t, rest, column_of(t, a, k + 1, rows - k - 1, k), tau)
        else:
            rest = nn.sub(rest, nn.mul(rest, tau))
        q = nn.concat(t.part(q, axis, 0, k), rest, axis=axis) if k else rest
    return q


def _approximate_top_k(
    t: OpTranslation, x: Value, indices: Value, first: Value, first_index: Value
) -> tuple[Value, Value]:
    """The greatest or the least elements of a dimension, which are all found."""
    options = t["mhlo.backend_config"]
    end = t.number(first)
    is_least = end == inf
    if end not in (inf, -inf) or not options["aggregate_to_topk"]:
        t.refuse("approximate maxima that are not aggregated; use aggregate_to_topk=True")
    axis = options["reduction_dim"]
    values, at = nn.topk(nn.neg(x) if is_least else x, k=options["top_k"], axis=axis)
    t.facts.bounds[at.ssa] = 0, x.shape[axis] - 1
    at = at.to("i32")
    return nn.neg(values) if is_least else values, at


TABLE: dict[str, HloEntry] = {
    f"stablehlo.custom_call @lapack_{kind}{name}_ffi": entry
    for name, entry in (("getrf", _getrf), ("geqrf", _geqrf), ("orgqr", _orgqr))
    for kind in "sd"
} | {"stablehlo.custom_call @ApproxTopK": _approximate_top_k}
