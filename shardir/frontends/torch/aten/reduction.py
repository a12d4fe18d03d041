"""Reductions, statistics, softmax, and sorting along a dimension."""

from collections.abc import Sequence
from functools import wraps
from math import inf, prod, sqrt
from typing import Any

from shardir.build import Value, nn
from shardir.frontends.torch.aten.elementwise import binary, truth
from shardir.frontends.torch.translation import AtenEntry, Translation

AtenDims = int | Sequence[int] | None


def dims_of(x: Value, dim: AtenDims) -> tuple[int, ...]:
    """The dimensions of a reduction; all if it names none."""
    rank = len(x.shape)
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return tuple(range(rank))
    return tuple(d % rank for d in ([dim] if isinstance(dim, int) else dim)) if rank else ()


def reduction(kind: str) -> AtenEntry:
    """A reduction over dimensions (`dims` in prims), computed in the result's dtype."""

    def entry(
        t: Translation, x: Value, dim: AtenDims = None, keepdim: bool = False,
        dims: AtenDims = None,
    ) -> Value:  # fmt: skip
        return t.value(x).reduce(kind, dims_of(x, dim if dims is None else dims), keepdim)

    return entry


def _of_rows(entry: AtenEntry) -> AtenEntry:
    """Extend an entry for tensors with dimensions to scalars, with scalar results."""

    @wraps(entry)
    def with_scalars(t: Translation, x: Value, *args: Any, **named: Any) -> Any:
        if x.shape:
            return entry(t, x, *args, **named)
        out = entry(t, x.reshape(1), *args, **named)
        if isinstance(out, tuple):
            return tuple(y.reshape() for y in out)
        return out if out is NotImplemented else out.reshape()

    return with_scalars


def _extreme(kind: str) -> AtenEntry:
    """`max` and `min` of a dimension, with indices. The first of equal elements gets the
    cotangent."""
    argument = nn.argmax if kind == "max" else nn.argmin

    def entry(t: Translation, x: Value, dim: int, keepdim: bool = False):
        axis = dim % len(x.shape)
        if not x.dtype.startswith(("f", "bf")):
            numbers = x.to("i32") if x.dtype == "i1" else x
            return x.reduce(kind, axis, keepdim), argument(numbers, axis=axis, keep=keepdim)
        at = argument(x, axis=axis, keep=True)
        values = nn.take_along_axis(x, at, axis=axis)
        shape = values.shape if keepdim else (*x.shape[:axis], *x.shape[axis + 1 :])
        return values.reshape(*shape), at.reshape(*shape)

    return _of_rows(entry)


def _argument(kind: str) -> AtenEntry:
    def entry(t: Translation, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        if dim is None:
            return getattr(nn, kind)(x.reshape(-1), axis=0).reshape(*t.shape)
        return getattr(nn, kind)(x, axis=dim % len(x.shape), keep=keepdim)

    return _of_rows(entry)


def _holds(kind: str) -> AtenEntry:
    """`any` and `all`; an empty list of dimensions tests each element."""

    def entry(t: Translation, x: Value, dim: AtenDims = None, keepdim: bool = False) -> Value:
        is_true = truth(t, x)
        if dim is None or isinstance(dim, int) or len(dim):
            is_true = is_true.to("i32").reduce(kind, dims_of(x, dim), keepdim) > 0
        return is_true.to(t.dtype)

    return entry


def _variance(op: AtenEntry) -> AtenEntry:
    def entry(
        t: Translation, x: Value, dim: Any = None, unbiased: bool = True, keepdim: bool = False,
        correction: float | None = None,
    ) -> Value:  # fmt: skip
        by, dims = correction if correction is not None else int(unbiased), dims_of(x, dim)
        if by == int(by):
            return op(x, dims=dims, correction=int(by), keep=keepdim)
        n = prod(x.shape[d] for d in dims)
        scale = n / (n - by) if n > by else inf
        y = op(x, dims=dims, correction=0, keep=keepdim)
        return y * (scale if op is VAR else sqrt(scale))

    return _of_rows(entry)


VAR, STD = nn.var, nn.std


def _with_mean(op: AtenEntry) -> AtenEntry:
    spread = _variance(op)

    def entry(
        t: Translation, x: Value, dim: Any = None, unbiased: bool = True, keepdim: bool = False,
        correction: float | None = None,
    ) -> tuple[Value, Value]:  # fmt: skip
        y = spread(t, x, dim, unbiased, keepdim, correction)
        return y, x.mean(dims_of(x, dim), keepdim)

    return entry


def norm(
    t: Translation, x: Value, order: float | None, dim: AtenDims = None, keepdim: bool = False
) -> Value:  # fmt: skip
    """The norm over dimensions. As in torch, the gradient is 0 where the norm is 0."""
    x, dims = t.value(x), dims_of(x, dim)
    if order in (inf, -inf):
        return nn.abs(x).reduce("max" if order == inf else "min", dims, keepdim)
    if order == 0:
        return x.compare("ne", 0).to(t.dtype).sum(dims, keepdim)
    if order == 1:
        return nn.abs(x).sum(dims, keepdim)
    if order in (None, 2):
        return root(t, nn.square(x).sum(dims, keepdim), 0.5)
    powers, p = nn.abs(x), float(order)
    powers = root(t, powers, p) if 0 < p < 1 else powers**p
    return root(t, powers.sum(dims, keepdim), 1 / p)


def _distances(t: Translation, x: Value, p: float = 2) -> Value:
    """The norms of the differences of all pairs of rows."""
    n = x.shape[0]
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    left, right = (t.function.constant([pair[k] for pair in pairs], dtype="i64") for k in (0, 1))
    return norm(t, nn.gather(x, left, axis=0) - nn.gather(x, right, axis=0), p, 1)


def root(t: Translation, x: Value, power: float) -> Value:
    """A root of non-negative numbers. The gradient at 0, where the slope is infinite, is 0."""
    zero = x.compare("eq", 0.0)
    nonzero = nn.select(zero, t.value(1.0).broadcast_to(*x.shape), x)
    return nn.select(
        zero, nn.stop_gradient(x), nn.sqrt(nonzero) if power == 0.5 else nonzero**power
    )


def _softmax(op: AtenEntry) -> AtenEntry:
    return _of_rows(lambda t, x, dim: op(t.value(x), axis=dim % len(x.shape)))


def _logsumexp(t: Translation, x: Value, dim: AtenDims, keepdim: bool = False) -> Value:
    return nn.logsumexp(t.value(x), dims=dims_of(x, dim), keep=keepdim)


def _cumsum(t: Translation, x: Value, dim: int) -> Value:
    return nn.cumsum(t.value(x), axis=dim % len(x.shape))


def _sort(
    t: Translation, x: Value, dim: int = -1, descending: bool = False, stable: bool | None = None
) -> tuple[Value, ...]:  # fmt: skip
    del stable  # it always is
    return nn.sort(x, axis=dim % len(x.shape), descending=descending)


def _argsort(
    t: Translation, x: Value, dim: int = -1, descending: bool = False, stable: bool = False
) -> Value:
    del stable  # it always is
    return nn.argsort(x, axis=dim % len(x.shape), descending=descending)


def _topk(
    t: Translation, x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Value, ...]:  # fmt: skip
    del sorted  # it always is
    return nn.topk(x, k=k, axis=dim % len(x.shape), smallest=not largest)


TABLE: dict[str, AtenEntry] = {
    "sum": reduction("sum"),
    "mean": reduction("mean"),
    "prod": reduction("prod"),
    "amax": reduction("max"),
    "amin": reduction("min"),
    **{
        f"{kind}{overload}": entry
        for kind, op, of_bools in (("max", nn.max, nn.or_), ("min", nn.min, nn.and_))
        for overload, entry in (
            ("", reduction(kind)),
            (".dim", _extreme(kind)),
            (".other", binary(op, of_bools)),
        )
    },
    "argmax": _argument("argmax"),
    "argmin": _argument("argmin"),
    "any": _holds("max"),
    "all": _holds("min"),
    "_is_all_true": _holds("min"),
    "_is_any_true": _holds("max"),
    "count_nonzero": lambda t, x, dim=None: truth(t, x).to("i64").sum(dims_of(x, dim)),
    "var": _variance(VAR),
    "std": _variance(STD),
    "var_mean": _with_mean(VAR),
    "std_mean": _with_mean(STD),
    "norm": lambda t, x, p=2, dim=None, keepdim=False: norm(t, x, p, dim, keepdim),
    "linalg_vector_norm": lambda t, x, ord=2, dim=None, keepdim=False: norm(
        t, x, ord, dim, keepdim
    ),
    "frobenius_norm": lambda t, x, dim=None, keepdim=False: norm(t, x, 2, dim, keepdim),
    "pdist": _distances,
    "_pdist_forward": _distances,
    "softmax": _softmax(nn.softmax),
    "_softmax": _softmax(nn.softmax),
    "log_softmax": _softmax(nn.log_softmax),
    "_log_softmax": _softmax(nn.log_softmax),
    "logsumexp": _of_rows(_logsumexp),
    "cumsum": _of_rows(_cumsum),
    "sort": _of_rows(_sort),
    "argsort": _of_rows(_argsort),
    "topk": _of_rows(_topk),
    "numel": lambda t, x: prod(x.shape),
}
