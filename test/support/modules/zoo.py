"""Facts of the import of the zoo, and its values in torch and by each of several plans."""

import torch
from architectures import ZOO, Architecture, Example

from shardir.frontends.torch.importer import Imported
from support.modules.imported import Values, imported, in_torch

PLANS = {
    "auto": ("auto", None),
    "fsdp": ("train", "fsdp"),
    "megatron": ("train", "megatron(tp) * fsdp(dp)"),
}
"""The pipeline and the plan of each."""

MESH = "dp = 2, tp = 2"
CLUSTER = (
    "levels [node = 4 {bandwidth = 1e+9, latency = 1e-7}], memory = 1000000000 "
    "{bandwidth = 1e+11}, flops {f32 = 1e+9, f64 = 1e+9}"
)
"""Slow devices with links of low latency, on which a search splits layers of 32 columns too."""

DERIVED = {
    "Bloom": ["GeLUFunction"],  # the derivative, to save memory
    "RecurrentGemma": ["SqrtBoundDerivative"],  # the derivative, if it is below 1000
}
"""The autograd functions of architectures whose backward is the derivative of their forward."""

NOT_IMPORTED = {"FNet": "aten.fft_fftn.default"}
"""The op for which there is none: complex numbers."""

NOT_IN_F64 = {"GPT-OSS", "Mixtral"}
"""Architectures with grouped products, which torch does not compute in f64."""

IMPORTED = [name for name in ZOO if name not in NOT_IMPORTED]


def imports(architecture: Architecture, example: Example) -> Imported:
    """The example's module on 2 x 2 devices, with the request of its gradients."""
    loss = architecture.loss_function
    return imported(
        example.module, example.args, example.labels,
        loss or (lambda o: o if isinstance(o, torch.Tensor) else o["loss"]), example.kwargs,
        mesh=MESH, cluster=CLUSTER, derived=DERIVED.get(architecture.name, ()),
    )  # fmt: skip


def in_torch_alone(architecture: Architecture, example: Example) -> Values:
    """The values of the example on one device."""
    return in_torch(
        example.module,
        lambda module: architecture.loss(example, module(*example.args, **example.kwargs)),
    )
