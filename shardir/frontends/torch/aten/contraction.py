"""Products: linear layers, matrix products, attention and convolutions."""

from collections.abc import Sequence
from math import inf
from string import ascii_lowercase
from typing import Any

from shardir.build import Value, nn
from shardir.diagnostics import ShardirError
from shardir.dialects.nn import split_equation
from shardir.frontends.torch.translation import AtenEntry, Translation

MASKED = {"f64": -1e30, "f32": -1e30, "bf16": -1e30, "f16": -6e4}
"""The score of a key that a query does not attend to."""


def linear(t: Translation, x: Value, w: Value, bias: Value | None = None) -> Value:
    x, w = t.value(x), t.value(w)
    lead = ascii_lowercase[: len(x.shape) - 1]
    if len(w.shape) == 1:
        y = nn.einsum(x, w, equation=f"{lead}z,z->{lead}")
    else:
        y = nn.einsum(x, w, equation=f"{lead}z,yz->{lead}y")
    return y if bias is None else y + t.value(bias)


def _matmul(t: Translation, x: Value, y: Value) -> Value:
    """A matrix product with torch's broadcasting of leading dimensions."""
    x, y = t.value(x), t.value(y)
    if len(x.shape) == 1 or len(y.shape) == 1:
        left = ascii_lowercase[: len(x.shape) - 1] + "z"
        right = "z" if len(y.shape) == 1 else ascii_lowercase[: len(y.shape) - 2] + "zy"
        result = (left + right).replace("z", "")
        if len(x.shape) == 1:
            result = right.replace("z", "")
        return nn.einsum(x, y, equation=f"{left},{right}->{result}")
    batch = max(len(x.shape), len(y.shape)) - 2
    letters = ascii_lowercase[:batch]
    (left, x), (right, y) = _batch(x, letters), _batch(y, letters)
    kept_letters = "".join(c for c in letters if c in left + right)
    z = nn.einsum(x, y, equation=f"{left}xz,{right}zy->{kept_letters}xy")
    return z.reshape(*t.shape)


def _batch(x: Value, letters: str) -> tuple[str, Value]:
    """Drop an operand's batch dimensions of size 1; return the letters of the remaining ones, and
    the operand."""
    n = len(x.shape) - 2
    own = letters[len(letters) - n :]
    keep = [d for d in range(n) if x.shape[d] > 1]
    if len(keep) == n:
        return own, x
    shape = [x.shape[d] for d in keep]
    return "".join(own[d] for d in keep), x.reshape(*shape, *x.shape[-2:])


def _einsum(t: Translation, equation: str, operands: Sequence[Value]) -> Value:
    equation = equation.replace(" ", "")
    if len(operands) == 2 and "->" in equation:
        try:
            split_equation(equation)
        except ShardirError:
            return NotImplemented
        return nn.einsum(*(t.value(x) for x in operands), equation=equation)
    return NotImplemented


def _plus_product(entry: AtenEntry) -> AtenEntry:
    """`addmm` and similar ops: beta * bias + alpha * product."""

    def add(t: Translation, bias: Value, x: Value, y: Value, *, beta: float = 1, alpha: float = 1):
        z = entry(t, x, y)
        z = z if alpha == 1 else z * alpha
        return z if beta == 0 else z + (t.value(bias) if beta == 1 else t.value(bias) * beta)

    return add


def _grouped(t: Translation, x: Value, w: Value, ends: Value) -> Value:
    """The product of each group of rows with its matrix; group i ends at row `ends[i]`. One einsum
    sums over the groups, with the rows of other groups masked."""
    if len(x.shape) != 2 or len(w.shape) != 3:
        return NotImplemented
    groups, rows = w.shape[0], x.shape[0]
    row, ends = t.iota((groups, rows), 1), ends.to("i64").reshape(groups, 1)
    starts = nn.concat(t.value(0, "i64").broadcast_to(1, 1), ends[:-1], axis=0)
    in_group = ((row >= starts) & (row < ends)).to(x.dtype).reshape(groups, rows, 1)
    return nn.einsum(in_group * x, w, equation="esk,ekn->sn")


def _attention(
    t: Translation, q: Value, k: Value, v: Value, attn_mask: Value | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:  # fmt: skip
    q, k, v = t.value(q), t.value(k), t.value(v)
    mask = None if attn_mask is None else _mask(t, attn_mask)
    if not dropout_p:
        operands = [q, k, v] if mask is None else [q, k, v, mask]
        return nn.attention(*operands, causal=is_causal, scale=scale)
    if q.shape[:-2] != k.shape[:-2]:
        return NotImplemented
    # torch's decomposition merges batch and heads into one dimension, so neither could be split
    lead = ascii_lowercase[: len(q.shape) - 2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = nn.einsum(q * scale, k, equation=f"{lead}xz,{lead}yz->{lead}xy")
    allowed = None
    if is_causal:
        allowed = t.iota(scores.shape[-2:], 0) >= t.iota(scores.shape[-2:], 1)
    elif mask is not None:
        allowed = mask if mask.dtype == "i1" else mask > -inf
    if mask is not None and mask.dtype != "i1":
        scores = scores + mask
    if allowed is not None:
        allowed = allowed.broadcast_to(*scores.shape)
        # a finite score here, zero weights below: a query that attends to no key gets zeros
        scores = nn.select(allowed, scores, t.full(MASKED[scores.dtype], scores.shape))
    weights = nn.softmax(scores, axis=-1)
    if allowed is not None:
        weights = nn.select(allowed, weights, t.full(0.0, scores.shape))
    key, stream = t.random()
    weights = nn.dropout(weights, key, p=dropout_p, stream=stream)
    return nn.einsum(weights, v, equation=f"{lead}xy,{lead}yz->{lead}xz")


def _mask(t: Translation, mask: Value) -> Value:
    return mask if mask.dtype == "i1" else t.value(mask)


def _conv(
    t: Translation, x: Value, w: Value, bias: Value | None = None, stride: Any = 1,
    padding: Any = 0, dilation: Any = 1, transposed: bool = False, output_padding: Any = 0,
    groups: int = 1,
) -> Value:  # fmt: skip
    if transposed:
        return _conv_transpose(t, x, w, bias, stride, padding, output_padding, groups, dilation)
    n = len(w.shape) - 2
    x, w = t.value(x), t.value(w)
    unbatched = len(x.shape) == n + 1
    x = x.reshape(1, *x.shape) if unbatched else x
    steps, gaps = sizes(stride, n), sizes(dilation, n)
    y = nn.conv(x, w, stride=steps, padding=edges(padding, w.shape[2:], gaps), dilation=gaps)
    if bias is not None:
        y = y + t.value(bias).reshape(-1, *(1,) * n)
    return y.reshape(*y.shape[1:]) if unbatched else y


def _conv_transpose(
    t: Translation, x: Value, w: Value, bias: Value | None = None, stride: Any = 1,
    padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Value:  # fmt: skip
    n = len(w.shape) - 2
    x, w = t.value(x), t.value(w)
    unbatched = len(x.shape) == n + 1
    x = x.reshape(1, *x.shape) if unbatched else x
    shape = (1, *t.shape) if unbatched else t.shape
    y = nn.conv_transpose(
        x, w, stride=sizes(stride, n), padding=edges(padding, w.shape[2:], ()),
        dilation=sizes(dilation, n), shape=shape,
    )  # fmt: skip
    if bias is not None:
        y = y + t.value(bias).reshape(-1, *(1,) * n)
    return y.reshape(*t.shape)


def sizes(value: Any, n: int) -> tuple[int, ...]:
    """A number for each of n spatial dimensions."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * n if len(numbers) == 1 else numbers


def edges(padding: Any, kernel: Sequence[int], gaps: Sequence[int]) -> tuple[int, ...]:
    """The padding before and after each spatial dimension, as a flat tuple. With "same" the smaller
    padding is before."""
    if padding == "valid":
        return (0, 0) * len(kernel)
    if padding == "same":
        totals = [(k - 1) * g for k, g in zip(kernel, gaps, strict=True)]
        return tuple(n for total in totals for n in (total // 2, total - total // 2))
    return tuple(n for p in sizes(padding, len(kernel)) for n in (p, p))


TABLE: dict[str, AtenEntry] = {
    "linear": linear,
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "mv": _matmul,
    "dot": _matmul,
    "einsum": _einsum,
    "addmm": _plus_product(_matmul),
    "baddbmm": _plus_product(_matmul),
    "addmv": _plus_product(_matmul),
    "addbmm": _plus_product(lambda t, x, y: nn.einsum(x, y, equation="bik,bkj->ij")),
    "outer": lambda t, x, y: t.value(x).reshape(-1, 1) * t.value(y).reshape(1, -1),
    "grouped_mm_fallback": _grouped,
    "_grouped_mm": _grouped,
    "scaled_dot_product_attention": _attention,
    **{name: _conv for name in ("conv1d", "conv2d", "conv3d", "convolution")},
    **{
        name: _conv_transpose
        for name in ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
    },
}
