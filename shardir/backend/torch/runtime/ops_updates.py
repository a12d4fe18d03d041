"""Updates of parameters by torch's fused kernels. Copied beside a program that has one; needs only
torch.

Each changes the parameters ws and their states in place. The tensors of a call are of one floating
type, and on one device; `lr` is a number, or a scalar in double precision.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

TensorList = list[Tensor]


def adam(
    ws: TensorList,
    ms: TensorList,
    vs: TensorList,
    gs: TensorList,
    step: Tensor,
    lr: Any,
    **numbers: float,
) -> None:
    """Adam with the moments ms and vs.

    Args:
        step: the number of this step, from 1; a scalar.
        numbers: beta1, beta2, eps and weight_decay.
    """
    if torch.compiler.is_compiling():
        for w, m, v, g in zip(ws, ms, vs, gs, strict=True):
            _adam(w, m, v, g.add(w, alpha=numbers["weight_decay"]), step, lr, **numbers)
    else:
        _by_kernel(torch._fused_adam_, ws, ms, vs, gs, step, lr, numbers)


def adamw(
    ws: TensorList,
    ms: TensorList,
    vs: TensorList,
    gs: TensorList,
    step: Tensor,
    lr: Any,
    **numbers: float,
) -> None:
    """The same, with the decay of the weight decoupled."""
    if torch.compiler.is_compiling():
        for w, m, v, g in zip(ws, ms, vs, gs, strict=True):
            w.mul_(1 - numbers["weight_decay"] * lr)
            _adam(w, m, v, g, step, lr, **numbers)
    else:
        _by_kernel(torch._fused_adamw_, ws, ms, vs, gs, step, lr, numbers)


def adagrad(
    ws: TensorList, totals: TensorList, gs: TensorList, lr: Any, eps: float, weight_decay: float
) -> None:
    """Adagrad with the sums of squares."""
    if torch.compiler.is_compiling():
        for w, total, g in zip(ws, totals, gs, strict=True):
            decayed = g.add(w, alpha=weight_decay)
            total.addcmul_(decayed, decayed)
            w.sub_(lr * (decayed / (total.sqrt() + eps)))
        return

    def kernel(ws: TensorList, totals: TensorList, gs: TensorList, lr: Any) -> None:
        first = torch.ones((), device=ws[0].device)  # of a rate that decays, which is given here
        torch._fused_adagrad_(
            ws, gs, totals, [first] * len(ws), lr=lr, lr_decay=0.0, weight_decay=weight_decay,
            eps=eps, maximize=False,
        )  # fmt: skip

    _in_place(kernel, (ws, totals), gs, lr)


def _adam(
    w: Tensor, m: Tensor, v: Tensor, g: Tensor, step: Tensor, lr: Any, beta1: float, beta2: float,
    eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """The update of Adam after the decay of the weight, which torch.compile makes one kernel of: it
    does not take those of torch."""
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    correction1, correction2 = (1 - beta ** step.double() for beta in (beta1, beta2))
    w.sub_(m * (lr / correction1) / ((v / correction2).sqrt() + eps))


def _by_kernel(
    update: Any, ws: TensorList, ms: TensorList, vs: TensorList, gs: TensorList, step: Tensor,
    lr: Any, numbers: dict[str, float],
) -> None:  # fmt: skip
    def kernel(ws: TensorList, ms: TensorList, vs: TensorList, gs: TensorList, lr: Any) -> None:
        update(
            ws, gs, ms, vs, [], [step.float()] * len(ws), lr=lr, amsgrad=False, maximize=False,
            **numbers,
        )  # fmt: skip

    _in_place(kernel, (ws, ms, vs), gs, lr)


def _in_place(
    kernel: Callable[..., None], states: Sequence[TensorList], gs: TensorList, lr: Any
) -> None:
    """Call a kernel, which goes through memory in its order, on tensors that have the order of a
    contiguous one."""
    if isinstance(lr, Tensor) and gs[0].is_cuda:
        lr = lr.float()  # the kernel reads it in that type
    own = [[x.contiguous() for x in some] for some in states]
    kernel(*own, [g.contiguous() for g in gs], lr)
    for some, new in zip(states, own, strict=True):
        for x, y in zip(some, new, strict=True):
            if y is not x:
                x.copy_(y)
