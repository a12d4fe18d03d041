"""Constant and random tensors."""

from collections.abc import Callable, Sequence
from typing import Any

from shardir.build import Value, nn
from shardir.build.values import Real
from shardir.frontends.torch.translation import AtenEntry, ByType, Translation


def _fill_with(number: Real) -> AtenEntry:
    return ByType(lambda t: t.full(number))


def _full(t: Translation, like: Any, fill_value: Real | Value) -> Value:
    return t.value(fill_value).broadcast_to(*t.shape)


def _fill(t: Translation, like: Value, value: Real | Value) -> Value:
    return _full(t, like, value)


def _arange(t: Translation, end: Real, start: Real = 0, step: Real = 1) -> Value:
    integral = all(isinstance(n, int) for n in (start, end, step))
    x = t.iota(t.shape, dtype="i64" if integral else "f64")
    x = x if step == 1 else x * step
    return (x if start == 0 else x + start).to(t.dtype)


def _linspace(t: Translation, start: Real | Value, end: Real | Value, steps: int) -> Value:
    """As in torch, count from both ends to the middle, so that both ends are exact."""
    if isinstance(start, Value) or isinstance(end, Value):
        return NotImplemented
    if t.dtype.startswith("i"):
        start, end = int(start), int(end)
    step = (float(end) - float(start)) / max(steps - 1, 1)
    index = t.iota((steps,))
    up = index.to("f64") * step + float(start)
    down = (t.iota((steps,)) - (steps - 1)).to("f64") * step + float(end)
    return nn.select(index < steps // 2, up, down).to(t.dtype) if steps > 1 else up.to(t.dtype)


def _eye(t: Translation) -> Value:
    return t.iota(t.shape, 0).compare("eq", t.iota(t.shape, 1)).to(t.dtype)


def _indices(keep: Callable[[Value, Value], Value]) -> AtenEntry:
    """`tril_indices` and `triu_indices`, as constants."""

    def entry(t: Translation, rows: int, columns: int, offset: int = 0) -> Value:
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
    """Random numbers from a new stream."""
    key, stream = t.random()
    return nn.random(key, distribution=distribution, stream=stream, shape=shape, dtype=dtype)


def _draw(distribution: str) -> AtenEntry:
    return lambda t, like: random(t, distribution, t.shape, t.dtype)


def dropout(t: Translation, x: Value, p: float = 0.5, train: bool | None = True) -> Value:
    if not train or p == 0:
        return x
    if p == 1:
        return x * 0.0
    key, stream = t.random()
    return nn.dropout(x, key, p=p, stream=stream)


def _bernoulli(t: Translation, x: Value, p: Value | float | None = None) -> Value:
    probabilities = x if p is None else p
    drawn = random(t, "uniform", t.shape, "f32")
    return (
        drawn < (probabilities.to("f32") if isinstance(probabilities, Value) else probabilities)
    ).to(t.dtype)


def _randint(t: Translation, high: int, low: int = 0) -> Value:
    return random(t, f"integers, low = {low}, high = {high}", t.shape, "i64").to(t.dtype)


def _randint_like(t: Translation, like: Value, high: int | Value, low: int = 0) -> Value:
    return NotImplemented if isinstance(high, Value) else _randint(t, high, low)


def _feature_dropout(t: Translation, x: Value, p: float, train: bool) -> Value:
    """Dropout of whole channels."""
    if not train or p == 0:
        return x
    is_kept = random(t, "uniform", x.shape[:2], "f32") >= p
    mask = is_kept.to(x.dtype) * (1 / (1 - p) if p < 1 else 0.0)
    return x * mask.reshape(*x.shape[:2], *(1,) * (len(x.shape) - 2))


TABLE: dict[str, AtenEntry] = {
    **{
        name: _fill_with(number)
        for names, number in (
            (("zeros", "zeros_like", "new_zeros", "zero", "empty", "empty_like", "new_empty"), 0),
            (("ones", "ones_like", "new_ones"), 1),
        )
        for name in names
    },
    "full": _full,
    "full_like": _full,
    "new_full": _full,
    "fill": _fill,
    "scalar_tensor": lambda t, s: t.value(s),
    "copy": lambda t, x, src: t.value(src).to(t.dtype).broadcast_to(*t.shape),
    "arange": _arange,
    "linspace": _linspace,
    "eye": ByType(_eye),
    "tril_indices": _indices(_lower),
    "triu_indices": _indices(_upper),
    "rand": _draw("uniform"),
    "rand_like": _draw("uniform"),
    "randn": _draw("normal"),
    "randn_like": _draw("normal"),
    "randint": _randint,
    "randint_like": _randint_like,
    "bernoulli": _bernoulli,
    "dropout": dropout,
    "feature_dropout": _feature_dropout,
}
