"""Losses."""

from typing import Any

from shardir.build import Value, nn
from shardir.frontends.torch.translation import AtenEntry, Translation

REDUCTIONS = ("none", "mean", "sum")
"""torch's reductions by their numbers."""


def _elementwise(op: AtenEntry, **fixed: Any) -> AtenEntry:
    """A loss of two tensors, reduced."""

    def entry(t: Translation, x: Value, y: Value, reduction: int = 1, *rest: Any, **named: Any):
        numbers = dict(zip(fixed, rest, strict=False)) | named
        given = {**fixed, **{k: v for k, v in numbers.items() if k in fixed}}
        return op(
            t.value(x), t.value(y), reduction=REDUCTIONS[reduction],
            **{k: float(v) if isinstance(v, int) and not isinstance(v, bool) else v
               for k, v in given.items()},
        )  # fmt: skip

    return entry


def classes_last(x: Value) -> Value:
    """Logits with their classes, torch's dimension 1, as the last one."""
    rank = len(x.shape)
    return x if rank <= 2 else x.transpose(0, *range(2, rank), 1)


def _cross_entropy(
    t: Translation, x: Value, labels: Value, weight: Value | None = None, reduction: int = 1,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> Value:  # fmt: skip
    x = t.value(x)
    if not labels.dtype.startswith("i"):
        log = nn.log_softmax(x, axis=min(1, len(x.shape) - 1))
        if label_smoothing:
            n = x.shape[min(1, len(x.shape) - 1)]
            labels = labels * (1 - label_smoothing) + label_smoothing / n
        if weight is not None:
            labels = labels * weight.reshape(-1, *(1,) * (len(x.shape) - 2))
        loss = -(labels * log).sum(min(1, len(x.shape) - 1))
        total = loss.sum()
        rows = max(1, loss.type.get_shape() and _count(loss))
        return loss if reduction == 0 else total * (1 / rows) if reduction == 1 else total
    if weight is not None:
        return NotImplemented
    return nn.cross_entropy_loss(
        classes_last(x), labels, reduction=REDUCTIONS[reduction], ignore=ignore_index,
        smoothing=label_smoothing or None,
    )  # fmt: skip


def _count(x: Value) -> int:
    n = 1
    for size in x.shape:
        n *= size
    return n


def _nll(
    t: Translation, x: Value, labels: Value, weight: Value | None = None, reduction: int = 1,
    ignore_index: int = -100,
) -> Value:  # fmt: skip
    if weight is not None:
        return NotImplemented
    return nn.nll_loss(
        classes_last(x), labels, reduction=REDUCTIONS[reduction], ignore=ignore_index
    )


def _bce(op: AtenEntry) -> AtenEntry:
    def entry(t: Translation, x: Value, y: Value, weight: Value | None = None, *rest: Any) -> Value:
        if weight is not None or (len(rest) == 2 and rest[0] is not None):
            return NotImplemented
        reduction = rest[-1] if rest else 1
        assert isinstance(reduction, int)
        return op(t.value(x), t.value(y), reduction=REDUCTIONS[reduction])

    return entry


TABLE: dict[str, AtenEntry] = {
    "cross_entropy_loss": _cross_entropy,
    "nll_loss": _nll,
    "nll_loss_nd": _nll,
    "nll_loss2d": _nll,
    "mse_loss": _elementwise(nn.mse_loss),
    "l1_loss": _elementwise(nn.l1_loss),
    "huber_loss": _elementwise(nn.huber_loss, delta=1.0),
    "smooth_l1_loss": _elementwise(nn.smooth_l1_loss, beta=1.0),
    "soft_margin_loss": _elementwise(nn.soft_margin_loss),
    "kl_div": lambda t, x, y, reduction=1, *, log_target=False: nn.kl_div_loss(
        t.value(x), t.value(y), reduction=REDUCTIONS[reduction], log_target=log_target
    ),
    "binary_cross_entropy": _bce(nn.bce_loss),
    "binary_cross_entropy_with_logits": _bce(nn.bce_with_logits_loss),
}
