"""Triangular systems and the Cholesky factorization of small matrices, column by column; and the
calls of LAPACK by which JAX computes them on a CPU."""

from shardir.build import Value, nn
from shardir.frontends.stablehlo.translation import HloEntry, OpTranslation

MAX_ROWS = 64
"""Bounds the rows of a matrix: each of them is some ops."""


def check_rows(t: OpTranslation, rows: int) -> None:
    if rows > MAX_ROWS:
        t.refuse(f"a matrix of {rows} rows, of which each is some ops; up to {MAX_ROWS} are known")


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
    """The solution of A X = B, or of X A = B, by substitution: a row is known, and what it has in
    the other rows is subtracted."""
    if is_transposed == is_left:  # X A = B is A^T X^T = B^T
        a, is_lower = transposed(t, a), not is_lower
    b = b if is_left else transposed(t, b)
    rows, axis = a.shape[-1], len(a.shape) - 2
    check_rows(t, rows)
    solved: list[Value] = []
    rest = b
    for k in range(rows):
        left = rows - 1 - k
        i = k if is_lower else left
        row = t.part(rest, axis, 0 if is_lower else left, 1)
        if not has_unit_diagonal:
            row = nn.div(row, column_of(t, a, i, 1, i))
        solved.append(row)
        if left:
            others = column_of(t, a, i + 1 if is_lower else 0, left, i)
            rest = nn.sub(t.part(rest, axis, 1 if is_lower else 0, left), nn.mul(others, row))
    ordered = solved if is_lower else solved[::-1]
    out = nn.concat(*ordered, axis=axis) if rows > 1 else ordered[0]
    return out if is_left else transposed(t, out)


def _cholesky(t: OpTranslation, a: Value) -> Value:
    return _factor(t, a, t["lower"])


def _factor(t: OpTranslation, a: Value, is_lower: bool) -> Value:
    """The lower triangular L with L L^T = A, or its transpose. A column is known, and its product
    with itself is subtracted from the others."""
    a = a if is_lower else transposed(t, a)
    rows, rank = a.shape[-1], len(a.shape)
    check_rows(t, rows)
    columns: list[Value] = []
    for k in range(rows):
        left = rows - k
        column = nn.div(column_of(t, a, 0, left, 0), nn.sqrt(column_of(t, a, 0, 1, 0)))
        low = [0] * rank
        low[rank - 2] = k
        columns.append(nn.pad(column, low=tuple(low), high=(0,) * rank) if k else column)
        if left > 1:
            below = t.part(column, rank - 2, 1, left - 1)
            inner = t.part(t.part(a, rank - 2, 1, left - 1), rank - 1, 1, left - 1)
            a = nn.sub(inner, nn.mul(below, transposed(t, below)))
    out = nn.concat(*columns, axis=rank - 1) if rows > 1 else columns[0]
    return out if is_lower else transposed(t, out)


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
