"""Updates of parameters by torch's fused kernels.

They change the parameters ws and their states in place. The tensors of a call have one floating
type and one device; `lr` is a number, or a scalar in double precision.
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
    """Adam with decoupled weight decay."""
    _by_kernel(torch._fused_adamw_, ws, ms, vs, gs, step, lr, numbers)


def adagrad(
    ws: TensorList, totals: TensorList, gs: TensorList, lr: Any, eps: float, weight_decay: float
) -> None:
    """Adagrad with the sums of squares."""

    def kernel(ws: TensorList, totals: TensorList, gs: TensorList, lr: Any) -> None:
        first = torch.ones((), device=ws[0].device)  # of the rate's decay, which `lr` includes
        torch._fused_adagrad_(
            ws, gs, totals, [first] * len(ws), lr=lr, lr_decay=0.0, weight_decay=weight_decay,
            eps=eps, maximize=False,
        )  # fmt: skip

    _in_place(kernel, (ws, totals), gs, lr)


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
    """Call a kernel, which ignores strides, on contiguous tensors, and copy them back."""
    if isinstance(lr, Tensor) and gs[0].is_cuda:
        lr = lr.float()  # the kernel reads it in that type
    own = [[x.contiguous() for x in some] for some in states]
    kernel(*own, [g.contiguous() for g in gs], lr)
    for some, new in zip(states, own, strict=True):
        for x, y in zip(some, new, strict=True):
            if y is not x:
                x.copy_(y)
