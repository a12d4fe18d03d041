"""Tensors from numbers, and random ones."""

from collections.abc import Callable, Sequence
from typing import Any

from shardir.build import Value, nn
from shardir.build.values import Real
from shardir.frontends.torch.translation import AtenEntry, Translation


def _filled(number: Real) -> AtenEntry:
    return lambda t, *_, **__: t.full(number)


def _full(t: Translation, shape: Any, number: Real | Value, **_: Any) -> Value:
    return t.value(number).broadcast_to(*t.shape)


def _arange(t: Translation, *bounds: Real, **_: Any) -> Value:
    start, end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    del end
    integral = all(isinstance(n, int) for n in bounds)
    x = t.iota(t.shape, dtype="i64" if integral else "f64")
    x = x if step == 1 else x * step
    return (x if start == 0 else x + start).to(t.dtype)


def _linspace(t: Translation, start: float, end: float, steps: int, **_: Any) -> Value:
    step = (end - start) / max(steps - 1, 1)
    return (t.iota((steps,), dtype="f64") * step + float(start)).to(t.dtype)


def _eye(t: Translation, *_: Any, **__: Any) -> Value:
    return t.iota(t.shape, 0).compare("eq", t.iota(t.shape, 1)).to(t.dtype)


def _indices(keep: Callable[[Value, Value], Value]) -> AtenEntry:
    """`tril_indices` and `triu_indices`: their numbers are known."""

    def entry(t: Translation, rows: int, columns: int, offset: int = 0, **_: Any) -> Value:
        lower = keep is _lower
        pairs = [
            (i, j) for i in range(rows) for j in range(columns)
            if (j - i <= offset if lower else j - i >= offset)
        ]  # fmt: skip
        return t.function.constant([[i for i, _ in pairs], [j for _, j in pairs]], dtype=t.dtype)

    return entry


def _lower(row: Value, column: Value) -> Value:
    return column <= row


def _upper(row: Value, column: Value) -> Value:
    return column >= row


def random(t: Translation, distribution: str, shape: Sequence[int], dtype: str) -> Value:
    """Random numbers, with a stream of their own."""
    key, stream = t.random()
    return nn.random(key, distribution=distribution, stream=stream, shape=shape, dtype=dtype)


def _draw(distribution: str) -> AtenEntry:
    return lambda t, *_, **__: random(t, distribution, t.shape, t.dtype)


def dropout(t: Translation, x: Value, p: float = 0.5, train: bool | None = True) -> Value:
    if not train or p == 0:
        return x
    key, stream = t.random()
    return nn.dropout(x, key, p=p, stream=stream)


def _bernoulli(t: Translation, x: Value, p: float | None = None, **_: Any) -> Value:
    drawn = random(t, "uniform", t.shape, "f32")
    return (drawn < (x.to("f32") if p is None else p)).to(t.dtype)


def _randint(t: Translation, *bounds: Any, **_: Any) -> Value:
    numbers = [n for n in bounds if isinstance(n, int)]
    low, high = (0, numbers[0]) if len(numbers) == 1 else numbers[:2]
    return random(t, f"integers, low = {low}, high = {high}", t.shape, t.dtype)


def _feature_dropout(t: Translation, x: Value, p: float, train: bool) -> Value:
    """Dropout of all of a channel."""
    if not train or p == 0:
        return x
    kept = random(t, "uniform", x.shape[:2], "f32") >= p
    mask = kept.to(x.dtype) * (1 / (1 - p))
    return x * mask.reshape(*x.shape[:2], *(1,) * (len(x.shape) - 2))


TABLE: dict[str, AtenEntry] = {
    **{
        name: _filled(number)
        for names, number in (
            (("zeros", "zeros_like", "new_zeros", "zero", "empty", "empty_like", "new_empty"), 0),
            (("ones", "ones_like", "new_ones"), 1),
        )
        for name in names
    },
    "full": _full,
    "full_like": _full,
    "new_full": lambda t, x, shape, number, **_: _full(t, shape, number),
    "fill": lambda t, x, number: _full(t, None, number),
    "scalar_tensor": lambda t, number, **_: t.value(number),
    "copy": lambda t, x, y, *_: t.value(y).broadcast_to(*t.shape),
    "arange": _arange,
    "linspace": _linspace,
    "eye": _eye,
    "tril_indices": _indices(_lower),
    "triu_indices": _indices(_upper),
    "rand": _draw("uniform"),
    "rand_like": _draw("uniform"),
    "randn": _draw("normal"),
    "randn_like": _draw("normal"),
    "randint": _randint,
    "randint_like": lambda t, x, *bounds, **_: _randint(t, *bounds),
    "bernoulli": _bernoulli,
    "dropout": dropout,
    "feature_dropout": _feature_dropout,
}
