"""Reductions, statistics, softmax, and orders along a dimension."""

from collections.abc import Sequence
from math import inf, prod
from typing import Any

from shardir.build import Value, nn
from shardir.frontends.torch.aten.elementwise import truth
from shardir.frontends.torch.translation import AtenEntry, Translation

AtenDims = int | Sequence[int] | None


def dims_of(x: Value, dim: AtenDims) -> tuple[int, ...]:
    """The dimensions that a reduction names; all without."""
    rank = len(x.shape)
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return tuple(range(rank))
    return tuple(d % rank for d in ([dim] if isinstance(dim, int) else dim)) if rank else ()


def reduction(kind: str) -> AtenEntry:
    """A reduction of some dimensions, computed in the result's dtype."""

    def entry(t: Translation, x: Value, dim: AtenDims = None, keepdim: bool = False, **_: Any):
        return t.value(x).reduce(kind, dims_of(x, dim), keepdim)

    return entry


def _extreme(kind: str) -> AtenEntry:
    """`max` and `min`: of all elements, of a dimension with the indices, or of two tensors."""

    def entry(t: Translation, x: Value, dim: Any = None, keepdim: bool = False):
        if dim is None:
            return x.reduce(kind)
        if isinstance(dim, Value):
            return t.binary(nn.max if kind == "max" else nn.min, x, dim)
        assert isinstance(dim, int)
        if not x.shape:
            return x, t.value(0, "i64")
        at = (nn.argmax if kind == "max" else nn.argmin)(x, axis=dim % len(x.shape), keep=keepdim)
        return x.reduce(kind, dim, keepdim), at

    return entry


def _argument(kind: str) -> AtenEntry:
    def entry(t: Translation, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        if dim is None:
            return getattr(nn, kind)(x.reshape(-1), axis=0).reshape(*t.shape)
        return getattr(nn, kind)(x, axis=dim % len(x.shape), keep=keepdim)

    return entry


def _any(t: Translation, x: Value, dim: AtenDims = None, keepdim: bool = False) -> Value:
    return truth(t, x).to("i32").reduce("max", dims_of(x, dim), keepdim) > 0


def _all(t: Translation, x: Value, dim: AtenDims = None, keepdim: bool = False) -> Value:
    return truth(t, x).to("i32").reduce("min", dims_of(x, dim), keepdim) > 0


def _variance(op: AtenEntry) -> AtenEntry:
    def entry(
        t: Translation, x: Value, dim: Any = None, unbiased: bool = True, keepdim: bool = False,
        *, correction: float | None = None,
    ) -> Value:  # fmt: skip
        if isinstance(dim, bool):  # var(x, unbiased)
            dim, unbiased = None, dim
        by = correction if correction is not None else int(unbiased)
        dims = dims_of(x, dim)
        y = op(x, dims=dims, correction=int(by))
        return y.reshape(*(1 if d in dims else n for d, n in enumerate(x.shape))) if keepdim else y

    return entry


def _with_mean(op: AtenEntry) -> AtenEntry:
    spread = _variance(op)

    def entry(t: Translation, x: Value, *args: Any, **named: Any) -> tuple[Value, Value]:
        y = spread(t, x, *args, **named)
        dim = args[0] if args and not isinstance(args[0], bool) else None
        return y, x.mean(dims_of(x, dim)).reshape(*y.shape)

    return entry


def _norm(
    t: Translation,
    x: Value,
    ord: float | None = 2,
    dim: AtenDims = None,
    keepdim: bool = False,
    **_: Any,
):
    x, dims = t.value(x), dims_of(x, dim)
    if ord is None or ord == 2:
        return nn.sqrt(nn.square(x).sum(dims, keepdim))
    if ord == 1:
        return nn.abs(x).sum(dims, keepdim)
    if ord in (inf, -inf):
        return nn.abs(x).reduce("max" if ord > 0 else "min", dims, keepdim)
    if ord == 0:
        return x.compare("ne", 0).to(t.dtype).sum(dims, keepdim)
    return (nn.abs(x) ** float(ord)).sum(dims, keepdim) ** (1 / ord)


def _softmax(op: AtenEntry) -> AtenEntry:
    return lambda t, x, dim, dtype=None, *_: op(t.value(x), axis=dim % max(len(x.shape), 1))


def _logsumexp(t: Translation, x: Value, dim: AtenDims, keepdim: bool = False) -> Value:
    return nn.logsumexp(t.value(x), dims=dims_of(x, dim)).reshape(*t.shape)


def _cumsum(t: Translation, x: Value, dim: int, **_: Any) -> Value:
    return nn.cumsum(t.value(x), axis=dim % len(x.shape)) if x.shape else t.value(x)


def _sort(t: Translation, x: Value, dim: int = -1, descending: bool = False, **_: Any):
    return nn.sort(x, axis=dim % len(x.shape), descending=descending)


def _topk(
    t: Translation, x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
):
    return nn.topk(x, k=k, axis=dim % len(x.shape), smallest=not largest)


def _normalize(t: Translation, x: Value, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Value:
    return x / nn.clamp(_norm(t, x, p, dim, True), min=eps)


TABLE: dict[str, AtenEntry] = {
    "sum": reduction("sum"),
    "mean": reduction("mean"),
    "prod": reduction("prod"),
    "amax": reduction("max"),
    "amin": reduction("min"),
    "max": _extreme("max"),
    "min": _extreme("min"),
    "argmax": _argument("argmax"),
    "argmin": _argument("argmin"),
    "any": _any,
    "all": _all,
    "_is_all_true": _all,
    "_is_any_true": _any,
    "count_nonzero": lambda t, x, dim=None: truth(t, x).to("i64").sum(dims_of(x, dim)),
    "var": _variance(nn.var),
    "std": _variance(nn.std),
    "var_mean": _with_mean(nn.var),
    "std_mean": _with_mean(nn.std),
    "norm": _norm,
    "linalg_vector_norm": _norm,
    "frobenius_norm": lambda t, x, dim=None, keepdim=False: _norm(t, x, 2, dim, keepdim),
    "softmax": _softmax(nn.softmax),
    "_softmax": _softmax(nn.softmax),
    "log_softmax": _softmax(nn.log_softmax),
    "_log_softmax": _softmax(nn.log_softmax),
    "logsumexp": _logsumexp,
    "cumsum": _cumsum,
    "sort": _sort,
    "argsort": lambda t, x, dim=-1, descending=False: nn.argsort(
        x, axis=dim % len(x.shape), descending=descending
    ),
    "topk": _topk,
    "numel": lambda t, x: prod(x.shape),
}
