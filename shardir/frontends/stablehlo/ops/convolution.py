"""Convolutions in any order of dimensions, with dilation, groups and reversed kernels."""

from shardir.build import Value, nn
from shardir.frontends.stablehlo.ops.contraction import factors, of_products
from shardir.frontends.stablehlo.ops.shape import pad
from shardir.frontends.stablehlo.translation import HloEntry, OpTranslation


def _convolution(t: OpTranslation, x: Value, w: Value) -> Value:
    d = t["dimension_numbers"]
    x = t.transpose(
        x,
        [d["input_batch_dimension"], d["input_feature_dimension"], *d["input_spatial_dimensions"]],
    )
    w = t.transpose(
        w,
        [d["kernel_output_feature_dimension"], d["kernel_input_feature_dimension"],
         *d["kernel_spatial_dimensions"]],
    )  # fmt: skip
    spatial = len(x.shape) - 2
    if not spatial:
        t.refuse("a convolution without spatial dimensions")
    x, w = factors(t, x, w)
    reversed_dims = t["window_reversal"] or ()
    flipped = tuple(2 + i for i, is_reversed in enumerate(reversed_dims) if is_reversed)
    if flipped:
        w = nn.flip(w, dims=flipped)
    strides = tuple(t["window_strides"] or (1,) * spatial)
    dilation = tuple(t["rhs_dilation"] or (1,) * spatial)
    between = [n - 1 for n in t["lhs_dilation"] or (1,) * spatial]
    edges = t["padding"]
    edges = [[int(a), int(b)] for a, b in edges] if edges is not None else [[0, 0]] * spatial
    if any(between):
        x = pad(t, x, [0] * (spatial + 2), [0] * (spatial + 2), [0, 0, *between])
    low, high = ([0, 0, *(min(e[side], 0) for e in edges)] for side in (0, 1))
    x = pad(t, x, low, high, [0] * (spatial + 2))
    padding = tuple(max(n, 0) for e in edges for n in e)
    if 0 in t.shape:
        return t.filled(0, t.shape)
    groups = t["batch_group_count"] or 1
    if groups > 1:
        x = _batch_to_groups(t, x, groups)
    out = nn.conv(
        x, w,
        stride=strides if any(n != 1 for n in strides) else None,
        padding=padding if any(padding) else None,
        dilation=dilation if any(n != 1 for n in dilation) else None,
    )  # fmt: skip
    order = [
        d["output_batch_dimension"],
        d["output_feature_dimension"],
        *d["output_spatial_dimensions"],
    ]
    return t.transpose(of_products(t, out), [order.index(e) for e in range(len(order))])


def _batch_to_groups(t: OpTranslation, x: Value, groups: int) -> Value:
    """Groups of the batch, each for its part of the output's channels, as groups of channels."""
    n, c, *sizes = x.shape
    x = t.reshape(x, (groups, n // groups, c, *sizes))
    x = t.transpose(x, [1, 0, *range(2, len(x.shape))])
    return t.reshape(x, (n // groups, groups * c, *sizes))


TABLE: dict[str, HloEntry] = {"stablehlo.convolution": _convolution}
