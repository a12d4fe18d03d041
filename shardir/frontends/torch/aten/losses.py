"""Losses."""

from math import prod

import torch

from shardir.build import Value, nn
from shardir.frontends.torch.aten.elementwise import log_sigmoid
from shardir.frontends.torch.translation import AtenEntry, Translation

REDUCTIONS = ("none", "mean", "sum")
"""torch's reductions, by index."""


def _together(t: Translation, x: Value, y: Value) -> tuple[Value, Value]:
    """Convert two tensors to the result's dtype, and broadcast them to one shape."""
    shape = torch.broadcast_shapes(x.shape, y.shape)
    return t.value(x).broadcast_to(*shape), t.value(y).broadcast_to(*shape)


def _reduced(losses: Value, reduction: int) -> Value:
    return losses if reduction == 0 else losses.reduce(REDUCTIONS[reduction])


def _plain(op: AtenEntry) -> AtenEntry:
    """A reduced loss of two tensors."""

    def entry(t: Translation, x: Value, y: Value, reduction: int = 1) -> Value:
        return op(*_together(t, x, y), reduction=REDUCTIONS[reduction])

    return entry


def _huber(t: Translation, x: Value, y: Value, reduction: int = 1, delta: float = 1.0) -> Value:
    operands = _together(t, x, y)
    return nn.huber_loss(*operands, reduction=REDUCTIONS[reduction], delta=float(delta))


def _smooth_l1(t: Translation, x: Value, y: Value, reduction: int = 1, beta: float = 1.0) -> Value:
    operands, how = _together(t, x, y), REDUCTIONS[reduction]
    if beta == 0:
        return nn.l1_loss(*operands, reduction=how)
    return nn.smooth_l1_loss(*operands, reduction=how, beta=float(beta))


def _kl_div(
    t: Translation, x: Value, y: Value, reduction: int = 1, log_target: bool = False
) -> Value:
    return nn.kl_div_loss(
        *_together(t, x, y), reduction=REDUCTIONS[reduction], log_target=log_target
    )


def classes_last(x: Value) -> Value:
    """Move the classes of logits, dimension 1 in torch, to the last dimension."""
    rank = len(x.shape)
    return x if rank <= 2 else x.transpose(0, *range(2, rank), 1)


def _cross_entropy(
    t: Translation, x: Value, labels: Value, weight: Value | None = None, reduction: int = 1,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> Value:  # fmt: skip
    x = t.value(x)
    if labels.dtype.startswith("i"):
        if weight is not None:
            return NotImplemented
        return nn.cross_entropy_loss(
            classes_last(x), labels, reduction=REDUCTIONS[reduction], ignore=ignore_index,
            smoothing=label_smoothing or None,
        )  # fmt: skip
    axis, labels = min(1, len(x.shape) - 1), t.value(labels)
    if label_smoothing:
        labels = labels * (1 - label_smoothing) + label_smoothing / x.shape[axis]
    if weight is not None:
        labels = labels * t.value(weight).reshape(-1, *(1,) * (len(x.shape) - 2))
    losses = -(labels * nn.log_softmax(x, axis=axis)).sum(axis)
    if reduction == 0:
        return losses
    return losses.sum() if reduction == 2 else losses.sum() * (1 / max(1, prod(losses.shape)))


def _nll(
    t: Translation, x: Value, labels: Value, weight: Value | None = None, reduction: int = 1,
    ignore_index: int = -100,
) -> Value:  # fmt: skip
    if weight is not None:
        return NotImplemented
    return nn.nll_loss(
        classes_last(x), labels, reduction=REDUCTIONS[reduction], ignore=ignore_index
    )


def _bce(
    t: Translation, x: Value, y: Value, weight: Value | None = None, reduction: int = 1
) -> Value:
    x, y = _together(t, x, y)
    if weight is None:
        return nn.bce_loss(x, y, reduction=REDUCTIONS[reduction])
    return _reduced(nn.bce_loss(x, y, reduction="none") * t.value(weight), reduction)


def _bce_with_logits(
    t: Translation, x: Value, y: Value, weight: Value | None = None,
    pos_weight: Value | None = None, reduction: int = 1,
) -> Value:  # fmt: skip
    x, y = _together(t, x, y)
    if weight is None and pos_weight is None:
        return nn.bce_with_logits_loss(x, y, reduction=REDUCTIONS[reduction])
    if pos_weight is None:
        losses = nn.bce_with_logits_loss(x, y, reduction="none")
    else:
        log_weight = (t.value(pos_weight) - 1.0) * y + 1.0
        losses = (1.0 - y) * x - log_weight * log_sigmoid(t, x)
    return _reduced(losses if weight is None else losses * t.value(weight), reduction)


TABLE: dict[str, AtenEntry] = {
    "cross_entropy_loss": _cross_entropy,
    "nll_loss": _nll,
    "nll_loss_nd": _nll,
    "nll_loss2d": _nll,
    "mse_loss": _plain(nn.mse_loss),
    "l1_loss": _plain(nn.l1_loss),
    "huber_loss": _huber,
    "smooth_l1_loss": _smooth_l1,
    "soft_margin_loss": _plain(nn.soft_margin_loss),
    "kl_div": _kl_div,
    "binary_cross_entropy": _bce,
    "binary_cross_entropy_with_logits": _bce_with_logits,
}
