"""Updates of parameters by torch's fused kernels. Copied beside a program that has one; needs only
torch.

Each changes the parameter w and its states in place. All tensors are of one floating type, f32 or
f64; `lr` is a number, or a scalar in double precision.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def adam(
    w: Tensor, m: Tensor, v: Tensor, g: Tensor, step: Tensor, lr: Any, **numbers: float
) -> None:
    """Adam with the moments m and v.

    Args:
        step: the number of this step, from 1; a scalar.
        numbers: beta1, beta2, eps and weight_decay.
    """
    if torch.compiler.is_compiling():
        _adam(w, m, v, g.add(w, alpha=numbers["weight_decay"]), step, lr, **numbers)
    else:
        _by_kernel(torch._fused_adam_, w, m, v, g, step, lr, numbers)


def adamw(
    w: Tensor, m: Tensor, v: Tensor, g: Tensor, step: Tensor, lr: Any, **numbers: float
) -> None:
    """The same, with the decay of the weight decoupled."""
    if torch.compiler.is_compiling():
        w.mul_(1 - numbers["weight_decay"] * lr)
        _adam(w, m, v, g, step, lr, **numbers)
    else:
        _by_kernel(torch._fused_adamw_, w, m, v, g, step, lr, numbers)


def adagrad(w: Tensor, total: Tensor, g: Tensor, lr: Any, eps: float, weight_decay: float) -> None:
    """Adagrad with the sum of squares."""
    if torch.compiler.is_compiling():
        g = g.add(w, alpha=weight_decay)
        total.addcmul_(g, g)
        w.sub_(lr * (g / (total.sqrt() + eps)))
        return

    def kernel(w: Tensor, total: Tensor, g: Tensor, lr: Any) -> None:
        first = torch.ones((), device=w.device)  # of a rate that decays, which is given here
        torch._fused_adagrad_(
            [w], [g], [total], [first], lr=lr, lr_decay=0.0, weight_decay=weight_decay, eps=eps,
            maximize=False,
        )  # fmt: skip

    _in_place(kernel, (w, total), g, lr)


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
    update: Any, w: Tensor, m: Tensor, v: Tensor, g: Tensor, step: Tensor, lr: Any,
    numbers: dict[str, float],
) -> None:  # fmt: skip
    def kernel(w: Tensor, m: Tensor, v: Tensor, g: Tensor, lr: Any) -> None:
        update(
            [w], [g], [m], [v], [], [step.float()], lr=lr, amsgrad=False, maximize=False, **numbers
        )

    _in_place(kernel, (w, m, v), g, lr)


def _in_place(kernel: Callable[..., None], states: Sequence[Tensor], g: Tensor, lr: Any) -> None:
    """Call a kernel, which goes through memory in its order, on tensors that have the order of a
    contiguous one."""
    if isinstance(lr, Tensor) and g.is_cuda:
        lr = lr.float()  # the kernel reads it in that type
    own = [x.contiguous() for x in states]
    kernel(*own, g.contiguous(), lr)
    for x, new in zip(states, own, strict=True):
        if new is not x:
            x.copy_(new)
