"""Tensor ops of an emitted program without a single call of torch, or that depend on the position
of a shard.

`start` is the global index of this rank's first row along the op's dimension, `total` the number of
rows of all ranks.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .memory import zeros

aten = torch.ops.aten


def part(mesh: Any, total: int, axes: tuple) -> tuple[int, int]:
    """Return this rank's first row, and its number of rows, of `total` rows split by these axes."""
    start, stop = mesh.bounds(total, axes)
    return start, stop - start


# ---- by index --------------------------------------------------------------------------------


def in_range(ids: Tensor, total: int, allowed: int | None = None) -> Tensor:
    """Return the indices as int64. Raises IndexError if one is neither in 0 .. total - 1 nor
    `allowed`."""
    if ids.numel() == 0:
        return ids.long()
    if allowed is not None and not 0 <= allowed < total:
        in_range(ids.where(ids != allowed, 0), total)
        return ids.long()
    if _checked_by_device(ids):
        inside = ((ids >= 0) & (ids < total)).all()
        aten._assert_async.msg(inside, f"an index is out of range: there are {total} rows")
    else:
        low, high = (int(x) for x in torch.aminmax(ids))
        if low < 0 or high >= total:
            bad = low if low < 0 else high
            raise IndexError(f"index {bad} is out of range: there are {total} rows")
    return ids.long()


def _checked_by_device(ids: Tensor) -> bool:
    """Whether the device checks indices, with an error that does not name one: on a GPU, so that
    the host does not wait, and in torch.compile, which would end a graph to read a value."""
    return ids.is_cuda or torch.compiler.is_compiling()


def in_slices(
    ids: Tensor, dim: int, slices: Sequence[int], fields: int, starts: Sequence[int]
) -> Tensor:
    """Return the indices. Raises IndexError if an index is outside the slice of rows of its field.

    dim: the dimension of fields; fields: its size on all ranks; starts: the global index of the
    first element on this rank.
    """
    ends = torch.tensor(slices, device=ids.device).cumsum(0)
    mine = torch.arange(ids.shape[dim], device=ids.device) + starts[dim]
    slice_of = mine * len(slices) // fields
    along = [-1 if d == dim else 1 for d in range(ids.ndim)]
    high = ends[slice_of].view(along)
    low = high - torch.tensor(slices, device=ids.device)[slice_of].view(along)
    outside = (ids < low) | (ids >= high)
    if _checked_by_device(ids):
        inside = outside.logical_not().all()
        aten._assert_async.msg(inside, "an index is out of the slice of its field")
    elif outside.any():
        at = outside.nonzero()[0].tolist()
        k = at[dim]
        where = [start + i for start, i in zip(starts, at, strict=True)]
        raise IndexError(
            f"index {int(ids[tuple(at)])} at {where} is out of the slice of its field, from "
            f"{int(low.flatten()[k])} to {int(high.flatten()[k]) - 1}"
        )
    return ids


def local_ids(ids: Tensor, start: int, rows: int, total: int) -> tuple[Tensor, Tensor | None]:
    """Return the indices relative to this rank's shard, 0 for rows of other ranks, and the mask of
    rows in the shard; None if it has all rows."""
    ids = in_range(ids, total)
    if rows == total:
        return ids, None
    here = ids - start
    inside = (here >= 0) & (here < rows)
    return here.where(inside, 0), inside


def take(
    table: Tensor, ids: Tensor, axis: int, start: int, total: int, into: Tensor | None = None
) -> Tensor:
    """Return rows of the table, along `axis`, at the indices; zeros for rows of other ranks."""
    rows = table.shape[axis]
    here, inside = local_ids(ids, start, rows, total)
    shape = [*table.shape[:axis], *ids.shape, *table.shape[axis + 1 :]]
    if rows == 0:
        return table.new_zeros(shape)
    out = torch.index_select(table, axis, here.flatten(), out=into).view(shape)
    if inside is None:
        return out
    mask = inside.view([*ids.shape, *[1] * (table.ndim - axis - 1)])
    if not out.is_floating_point():
        return out.mul_(mask)
    return torch.where(mask, out, out.new_zeros(()), out=out)


def take_grad(
    ids: Tensor, dy: Tensor, shape: Sequence[int], axis: int, start: int, total: int,
    out: Tensor | None = None, into: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Add the rows of dy at their indices to the gradient of a table, in place. `out`: the
    gradient; by default zeros of `shape`."""
    out = zeros(dy, tuple(shape), into) if out is None else out
    here, inside = local_ids(ids, start, out.shape[axis], total)
    if out.shape[axis] == 0:
        return out
    rows = dy.reshape([*dy.shape[:axis], ids.numel(), *out.shape[axis + 1 :]])
    here = here.flatten()
    if inside is not None:
        mine = inside.flatten().nonzero().flatten()
        here, rows = here[mine], rows.index_select(axis, mine)
    return out.index_add_(axis, here, rows)


def pick(x: Tensor, ids: Tensor, start: int, total: int) -> Tensor:
    """Return x[..., ids[...]]; zeros for elements of other ranks."""
    here, inside = local_ids(ids, start, x.shape[-1], total)
    if x.shape[-1] == 0:
        return x.new_zeros(ids.shape)
    out = x.gather(-1, here.unsqueeze(-1)).squeeze(-1)
    return out if inside is None else out.where(inside, torch.zeros_like(out))


def pick_grad(
    ids: Tensor, dy: Tensor, rows: int, start: int, total: int, into: Tensor | None = None
) -> Tensor:
    """Return zeros with a new last dimension of `rows`, and dy at its indices."""
    here, inside = local_ids(ids, start, rows, total)
    out = zeros(dy, [*ids.shape, rows], into)
    if rows == 0:
        return out
    value = dy if inside is None else dy.where(inside, torch.zeros_like(dy))
    return out.scatter_(-1, here.unsqueeze(-1), value.unsqueeze(-1))


def take_along_axis(x: Tensor, ids: Tensor, axis: int, start: int, total: int) -> Tensor:
    """Return the elements at the indices along `axis`; zeros for elements of other ranks."""
    here, inside = local_ids(ids, start, x.shape[axis], total)
    if x.shape[axis] == 0:
        return x.new_zeros(ids.shape)
    out = x.gather(axis, here)
    return out if inside is None else out.where(inside, torch.zeros_like(out))


def scatter_add(
    ids: Tensor, src: Tensor, axis: int, rows: int, start: int, total: int
) -> Tensor:  # fmt: skip
    """Return zeros with `rows` along `axis`, plus each element of src at its index."""
    here, inside = local_ids(ids, start, rows, total)
    out = src.new_zeros([*ids.shape[:axis], rows, *ids.shape[axis + 1 :]])
    if rows == 0:
        return out
    value = src if inside is None else src.where(inside, torch.zeros_like(src))
    return out.scatter_add_(axis, here, value)


def scatter_reduce(
    ids: Tensor, src: Tensor, how: str, axis: int, rows: int, start: int, total: int
) -> Tensor:  # fmt: skip
    """Return `rows` along `axis`, each the product or extreme of the elements of src at its index,
    or the identity if there is none. `how` is "prod", "amax" or "amin"."""
    here, inside = local_ids(ids, start, rows, total)
    first: float = 1
    if how != "prod":
        info = torch.finfo(src.dtype) if src.is_floating_point() else torch.iinfo(src.dtype)
        first = info.min if how == "amax" else info.max
        first = first * float("inf") if src.is_floating_point() else first
    out = src.new_full([*ids.shape[:axis], rows, *ids.shape[axis + 1 :]], first)
    if rows == 0:
        return out
    value = src if inside is None else src.where(inside, torch.full_like(src, first))
    return out.scatter_reduce_(axis, here.long(), value, how)


def index_copy_(
    x: Tensor, ids: Tensor, new: Tensor, axis: int, start: int, total: int
) -> Tensor:  # fmt: skip
    """Replace the rows of x at the indices along `axis`, as far as this rank holds them."""
    here, inside = local_ids(ids, start, x.shape[axis], total)
    if inside is not None:
        mine = inside.nonzero().flatten()
        here, new = here[mine], new.index_select(axis, mine)
    return x.index_copy_(axis, here.long(), new)


def one_hot(ids: Tensor, rows: int, start: int, total: int, dtype: torch.dtype) -> Tensor:
    """Return the one-hot encoding over `rows` classes from `start` on."""
    classes = torch.arange(start, start + rows, device=ids.device)
    return (in_range(ids, total).unsqueeze(-1) == classes).to(dtype)


# ---- by position ------------------------------------------------------------------------------


def taken(x: Tensor, dim: int, start: int, stride: int, rows: int, first: int) -> Tensor:
    """Return the rows start, start + stride, ..., `rows` of them; zeros for rows of other ranks.
    `first`: this rank's first row."""
    low = max(0, -((start - first) // stride))
    high = min(rows, -((start - first - x.shape[dim]) // stride))
    out = x.new_zeros([*x.shape[:dim], rows, *x.shape[dim + 1 :]])
    if low < high:
        mine = torch.arange(low, high, device=x.device) * stride + (start - first)
        out.narrow(dim, low, high - low).copy_(x.index_select(dim, mine))
    return out


def parts(
    pieces: Sequence[Tensor], dim: int, bounds: Sequence[tuple[int, int]]
) -> list[Tensor]:  # fmt: skip
    """Return a range (first row, number of rows) of each piece."""
    return [x.narrow(dim, *mine) for x, mine in zip(pieces, bounds, strict=True)]


def topk(x: Tensor, k: int, axis: int, largest: bool = True) -> tuple[Tensor, Tensor]:
    """Return the k largest or smallest elements along `axis`, and their indices. Of equal elements
    the first is taken, so that ranks agree; torch.topk does not specify it."""
    found = x.sort(dim=axis, descending=largest, stable=True)
    values, indices = (v.narrow(axis, 0, k).contiguous() for v in found)
    return values, indices


# ---- rows ------------------------------------------------------------------------------------


def cross_entropy(
    logits: Tensor, labels: Tensor, total: int, ignore: int | None = None, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the loss of each row of `total` classes, 0 if the label is `ignore`, and the
    logarithms of the probabilities."""
    log_p = torch.log_softmax(logits, -1)
    ids = in_range(labels, total, ignore)
    counts = None if ignore is None else ids != ignore
    at = ids if counts is None else ids.where(counts, 0)
    out = log_p.gather(-1, at.unsqueeze(-1)).squeeze(-1).neg()
    if smoothing:
        out = out * (1 - smoothing) - log_p.mean(-1) * smoothing
    return out if counts is None else out.where(counts, 0.0), log_p


def cross_entropy_grad(
    log_p: Tensor, labels: Tensor, dy: Tensor, ignore: int | None = None, smoothing: float = 0.0,
    into: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return (e^log_p - target) dy, with the smoothed one-hot target; 0 if the label is
    `ignore`."""
    if ignore is not None:
        counts = labels != ignore
        labels, dy = labels.where(counts, 0), dy.where(counts, 0.0)
    classes, at = log_p.shape[-1], labels.long().unsqueeze(-1)
    if torch.compiler.is_compiling():  # one kernel, without an update in place
        hot = torch.arange(classes, device=log_p.device) == at
        target = hot.to(log_p.dtype) * (1.0 - smoothing) + smoothing / classes
        return (log_p.exp() - target) * dy.unsqueeze(-1)
    p = torch.exp(log_p, out=into)
    p.scatter_add_(-1, at, p.new_full((), smoothing - 1.0).expand(at.shape))  # checks the labels
    if smoothing:
        p.sub_(smoothing / classes)
    return p.mul_(dy.unsqueeze(-1))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, ...]:
    """Return the result, and the mean and 1 / sqrt(var + eps) of each row, in f32 for narrower
    operands."""
    out, *statistics = aten.native_layer_norm(x, weight.shape, weight, bias, eps)
    rows, wide = x.shape[: x.ndim - weight.ndim], torch.promote_types(x.dtype, torch.float32)
    return out, *(s.view(rows).to(wide) for s in statistics)


def layer_norm_grad(
    x: Tensor, weight: Tensor, dy: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The cotangents of x, weight and bias, from the statistics of `layer_norm`."""
    rows = (*mean.shape, *[1] * weight.ndim)
    kernels = mean.dtype if x.is_cuda else x.dtype  # the type of torch's own statistics
    mean, rstd = (s.contiguous().view(rows).to(kernels) for s in (mean, rstd))
    return aten.native_layer_norm_backward(
        dy.contiguous(), x, weight.shape, mean, rstd, weight, weight, [True, True, True]
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the result, and 1 / sqrt(mean(x^2) + eps) of each row, in f32 for narrower
    operands."""
    out, rstd = aten._fused_rms_norm(x, weight.shape, weight, eps)
    return out, rstd.view(x.shape[: x.ndim - weight.ndim])


def rms_norm_grad(x: Tensor, weight: Tensor, dy: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The cotangents of x and weight, from the statistic of `rms_norm`."""
    rows = rstd.contiguous().view(*rstd.shape, *[1] * weight.ndim)
    if x.is_cuda:
        return aten._fused_rms_norm_backward(
            dy.contiguous(), x, weight.shape, rows, weight, [True, True]
        )
    r, w = rstd.reshape(-1, 1), weight.to(rstd.dtype).flatten()
    flat_x, flat_dy = (v.to(r.dtype).reshape(r.numel(), w.numel()) for v in (x, dy))
    h = flat_x * r
    slopes = flat_dy * h
    means = (slopes @ w).unsqueeze(1) / w.numel()
    dx = (flat_dy * w).addcmul_(h, means, value=-1).mul_(r)
    return dx.view(x.shape).to(x.dtype), slopes.sum(0).view(weight.shape).to(weight.dtype)


def maximum(x: Tensor, dims: Sequence[int], keep: bool = False) -> Tensor:
    """The maximum over dims, along which this rank's shard may be empty."""
    return _extreme(x, dims, keep, torch.amax, lowest=True)


def minimum(x: Tensor, dims: Sequence[int], keep: bool = False) -> Tensor:
    """The minimum over dims, along which this rank's shard may be empty."""
    return _extreme(x, dims, keep, torch.amin, lowest=False)


def _extreme(x: Tensor, dims: Sequence[int], keep: bool, take: Any, lowest: bool) -> Tensor:
    if all(x.shape[d] for d in dims):
        return take(x, tuple(dims), keepdim=keep)
    if x.is_floating_point():
        end = float("-inf" if lowest else "inf")
    elif x.dtype == torch.bool:
        end = not lowest
    else:
        end = torch.iinfo(x.dtype).min if lowest else torch.iinfo(x.dtype).max
    shape = [1 if d in dims else n for d, n in enumerate(x.shape) if keep or d not in dims]
    return x.new_full(shape, end)


# ---- other -----------------------------------------------------------------------------------


def spread(
    call: Any, x: Tensor, dims: Sequence[int], correction: int, keep: bool = False
) -> Tensor:
    """Call torch.var or torch.std. They warn about missing degrees of freedom for an empty shard,
    whose result is empty too."""
    if x.numel():
        return call(x, tuple(dims), correction=correction, keepdim=keep)
    return x.sum(tuple(dims), keepdim=keep)


def on_first_rank(mesh: Any, x: Tensor, axes: tuple) -> Tensor:
    """Return x on the first rank of each group, zeros elsewhere: their sum over the group is x."""
    return x if mesh.index(axes) == 0 else torch.zeros_like(x)


def pad(mesh: Any, x: Tensor, dim: int, axes: tuple, total: int | None = None) -> Tensor:
    """Return x in this rank's range of `dim`, with zeros elsewhere: their sum over the group is the
    whole value.

    total: the size of `dim` afterwards, needed where the shards are uneven.
    """
    rows: int = mesh.count(axes) * x.shape[dim] if total is None else total
    start, stop = mesh.bounds(rows, axes)
    out = x.new_zeros((*x.shape[:dim], rows, *x.shape[dim + 1 :]))
    out.narrow(dim, start, stop - start).copy_(x)
    return out


_constants: dict[tuple, tuple[tuple, Tensor]] = {}
"""Tensors by the id of their numbers, with the numbers, so that the id stays valid."""


def constant(
    mesh: Any, numbers: tuple, shape: Sequence[int], dtype: torch.dtype,
    part: Sequence[tuple[int, int]] | None = None,
) -> Tensor:  # fmt: skip
    """Return numbers (row-major, a tuple of the program) as a cached tensor.

    part: the range [start, stop) of each dimension that this rank holds; None for the whole.
    """
    key = (id(numbers), tuple(shape), dtype, mesh.device, None if part is None else tuple(part))
    if key not in _constants:
        full = torch.tensor(numbers, dtype=dtype).view(tuple(shape))
        for dim, (begin, end) in enumerate(part or ()):
            full = full.narrow(dim, begin, end - begin)
        _constants[key] = numbers, full.contiguous().to(mesh.device)
    return _constants[key][1]


# ---- numbers of a training step ---------------------------------------------------------------


def learning_rate(
    done: Tensor, kind: str, rate: float, warmup: int, steps: int = 0, end: float = 0.0,
    power: float = 1.0, every: int = 1, factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return the learning rate of the step after `done` steps, by a `#train.schedule` of a kind."""
    done = done.double()
    past = (done - warmup).clamp(min=0)
    ramp = ((done + 1) / max(1, warmup)).clamp(max=1)
    if kind == "inverse_sqrt":
        return rate * ramp * (max(1, warmup) / (done + 1).clamp(min=max(1, warmup))).sqrt()
    if kind == "step":
        return rate * ramp * factor ** (past / every).floor()
    if kind == "constant":
        return rate * ramp
    part = (past / (steps - warmup)).clamp(max=1)
    left = (1 + (math.pi * part).cos()) / 2 if kind == "cosine" else (1 - part) ** power
    return ramp * (end + (rate - end) * left)


def learning_rate_at(done: Tensor, rate: float, points: tuple[tuple, ...]) -> Tensor:
    """Return the learning rate of the step after `done` steps: `rate` times an interpolated factor.

    points: (steps, factor, cosine) of each point, a tuple of the program. With `cosine`, the
    factors up to the next point are half a period of a cosine, else a line."""
    key = ("points", id(points), done.device)
    if key not in _constants:
        made = [torch.tensor(x, dtype=torch.float64) for x in zip(*points, strict=True)]
        _constants[key] = points, torch.stack(made).to(done.device)
    steps, factors, cosine = _constants[key][1]
    done = done.double()
    after = torch.searchsorted(steps, done, right=True)
    first, last = (i.clamp(0, len(points) - 1) for i in (after - 1, after))
    part = ((done - steps[first]) / (steps[last] - steps[first]).clamp(min=1)).clamp(0, 1)
    left = torch.where(cosine[first] > 0, (1 + (math.pi * part).cos()) / 2, 1 - part)
    return rate * (factors[last] + (factors[first] - factors[last]) * left)


def trust_ratio(w: Tensor, u: Tensor, coefficient: float, weight_decay: float) -> Tensor:
    """Return coefficient |w| / (|u| + weight_decay |w|), from squares; 1 if a norm is 0."""
    w, u = w.sqrt(), u.sqrt()
    ratio = coefficient * w / (u + weight_decay * w)
    return torch.where((w > 0) & (u > 0), ratio, 1.0)


def next_loss_scale(
    scale: Tensor, good: Tensor, finite: Tensor, growth: float, backoff: float, interval: int
) -> tuple[Tensor, Tensor]:
    """Return the loss scale of the next step, and the number of good steps since its last
    change."""
    grown = scale * growth
    grown = torch.where(grown.isfinite(), grown, scale)
    full = good + 1 >= interval
    after = torch.where(full, grown, scale)
    count = torch.where(full | ~finite, 0, good + 1)
    return torch.where(finite, after, scale * backoff), count
