"""Triangular systems and the Cholesky factorization, column by column in blocks of a product each;
and the calls of LAPACK by which JAX computes them on a CPU."""

from shardir.build import Value, nn
from shardir.frontends.stablehlo.translation import HloEntry, OpTranslation

MAX_ROWS = 256
"""Bounds the rows of a triangular matrix: each of them is some ops."""

BLOCK = 64
"""The rows of a block."""


def check_rows(t: OpTranslation, rows: int, most: int) -> None:
    if rows > most:
        t.refuse(f"a matrix of {rows} rows, of which each is some ops; up to {most} are known")


def _square(t: OpTranslation, x: Value, rows: tuple[int, int], columns: tuple[int, int]) -> Value:
    """Return a block of matrices, of ranges of rows and columns."""
    rank = len(x.shape)
    part = t.part(x, rank - 2, rows[0], rows[1] - rows[0])
    return t.part(part, rank - 1, columns[0], columns[1] - columns[0])


def _ranges(rows: int) -> list[tuple[int, int]]:
    return [(k, min(k + BLOCK, rows)) for k in range(0, rows, BLOCK)]


def column_of(t: OpTranslation, x: Value, first: int, size: int, at: int) -> Value:
    """Return `size` elements of a column of matrices, from a row on."""
    rank = len(x.shape)
    return t.part(t.part(x, rank - 2, first, size), rank - 1, at, 1)


def transposed(t: OpTranslation, x: Value) -> Value:
    rank = len(x.shape)
    return t.transpose(x, [*range(rank - 2), rank - 1, rank - 2])


def _triangular_solve(t: OpTranslation, a: Value, b: Value) -> Value:
    is_transposed = "NO_TRANSPOSE" not in str(t["transpose_a"])
    return _solution(t, a, b, t["left_side"], t["lower"], is_transposed, t["unit_diagonal"])


def _solution(
    t: OpTranslation, a: Value, b: Value, is_left: bool, is_lower: bool, is_transposed: bool,
    has_unit_diagonal: bool,
) -> Value:  # fmt: skip
    """The solution of A X = B, or of X A = B, by substitution."""
    if is_transposed == is_left:  # X A = B is A^T X^T = B^T
        a, is_lower = transposed(t, a), not is_lower
    b = b if is_left else transposed(t, b)
    check_rows(t, a.shape[-1], MAX_ROWS)
    out = _by_blocks(t, a, b, is_lower, has_unit_diagonal)
    return out if is_left else transposed(t, out)


def _by_blocks(t: OpTranslation, a: Value, b: Value, is_lower: bool, has_unit: bool) -> Value:
    """The solution of A X = B: the rows of a block follow from those of the blocks before it."""
    rows, axis = a.shape[-1], len(a.shape) - 2
    ranges = _ranges(rows) if is_lower else _ranges(rows)[::-1]
    solved: list[Value] = []
    for first, last in ranges:
        rest = t.part(b, axis, first, last - first)
        if solved:
            known = (0, first) if is_lower else (last, rows)
            factor = _square(t, a, (first, last), known)
            rest = nn.sub(rest, nn.matmul(factor, _joined(solved, axis, is_lower)))
        block = _square(t, a, (first, last), (first, last))
        solved.append(_by_rows(t, block, rest, is_lower, has_unit))
    return _joined(solved, axis, is_lower)


def _joined(parts: list[Value], axis: int, is_lower: bool) -> Value:
    ordered = parts if is_lower else parts[::-1]
    return nn.concat(*ordered, axis=axis) if len(parts) > 1 else ordered[0]


def _by_rows(t: OpTranslation, a: Value, b: Value, is_lower: bool, has_unit: bool) -> Value:
    """The solution of A X = B: a row is known, and what it has in the others is subtracted."""
    rows, axis = a.shape[-1], len(a.shape) - 2
    solved: list[Value] = []
    rest = b
    for k in range(rows):
        left = rows - 1 - k
        i = k if is_lower else left
        row = t.part(rest, axis, 0 if is_lower else left, 1)
        if not has_unit:
            row = nn.div(row, column_of(t, a, i, 1, i))
        solved.append(row)
        if left:
            others = column_of(t, a, i + 1 if is_lower else 0, left, i)
            rest = nn.sub(t.part(rest, axis, 1 if is_lower else 0, left), nn.mul(others, row))
    return _joined(solved, axis, is_lower)


def _cholesky(t: OpTranslation, a: Value) -> Value:
    return _factor(t, a, t["lower"])


def _factor(t: OpTranslation, a: Value, is_lower: bool) -> Value:
    """The lower triangular L with L L^T = A, or its transpose. The columns of a block follow from
    its diagonal one, and their product with themselves is subtracted from the blocks after it."""
    a = a if is_lower else transposed(t, a)
    rows, axis = a.shape[-1], len(a.shape) - 2
    check_rows(t, rows, MAX_ROWS)
    columns: list[Value] = []
    for first, last in _ranges(rows):
        size, left = last - first, rows - last
        block = _factor_of_block(t, _square(t, a, (0, size), (0, size)))
        if left:
            below = _square(t, a, (size, size + left), (0, size))
            below = transposed(t, _by_rows(t, block, transposed(t, below), True, False))
            rest = _square(t, a, (size, size + left), (size, size + left))
            a = nn.sub(rest, nn.matmul(below, transposed(t, below)))
            block = nn.concat(block, below, axis=axis)
        columns.append(_from_row(block, first))
    out = _joined(columns, axis + 1, True)
    return out if is_lower else transposed(t, out)


def _from_row(x: Value, first: int) -> Value:
    """Return matrices with rows of zeros before their first one."""
    rank = len(x.shape)
    low = tuple(first if d == rank - 2 else 0 for d in range(rank))
    return nn.pad(x, low=low, high=(0,) * rank) if first else x


def _factor_of_block(t: OpTranslation, a: Value) -> Value:
    """Column by column: the product of one with itself is subtracted from the others."""
    rows, rank = a.shape[-1], len(a.shape)
    columns: list[Value] = []
    for k in range(rows):
        left = rows - k
        column = nn.div(column_of(t, a, 0, left, 0), nn.sqrt(column_of(t, a, 0, 1, 0)))
        columns.append(_from_row(column, k))
        if left > 1:
            below = t.part(column, rank - 2, 1, left - 1)
            inner = t.part(t.part(a, rank - 2, 1, left - 1), rank - 1, 1, left - 1)
            a = nn.sub(inner, nn.mul(below, transposed(t, below)))
    return _joined(columns, rank - 1, True)


def _letters(t: OpTranslation) -> dict[str, str]:
    """Return the options of a call of LAPACK, whose values are the codes of letters."""
    options = t["mhlo.backend_config"]
    if not isinstance(options, dict):
        t.refuse("a call of LAPACK without its options")
    return {name: chr(code) for name, code in options.items()}


def _trsm(t: OpTranslation, a: Value, b: Value) -> Value:
    option = _letters(t)
    return _solution(
        t, a, b, option["side"] == "L", option["uplo"] == "L", option["trans_x"] != "N",
        option["diag"] == "U",
    )  # fmt: skip


def _potrf(t: OpTranslation, a: Value) -> tuple[Value, Value]:
    """The factor, which has NaN where there is none, and no error."""
    info = t.op.results[1].type
    return _factor(t, a, _letters(t)["uplo"] == "L"), t.filled(0, info.shape, "i32")


TABLE: dict[str, HloEntry] = {
    "stablehlo.triangular_solve": _triangular_solve,
    "stablehlo.cholesky": _cholesky,
    **{f"stablehlo.custom_call @lapack_{kind}trsm_ffi": _trsm for kind in "sd"},
    **{f"stablehlo.custom_call @lapack_{kind}potrf_ffi": _potrf for kind in "sd"},
}
