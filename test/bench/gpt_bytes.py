"""Communication of a language model's training step: bytes against Megatron's formula and XLA.

The step is `programs.gpt`: d = 256, 8 heads, sequence S = 128, batch B = 8, vocabulary V = 1024,
the embedding's table tied to the output head, f32, SGD, on dp = 2 x tp = 4. Only the weights and
the batch have layouts; propagation and differentiation do the rest.

Counted, for each collective that a device takes part in during one step: the bytes of the larger
of what it gives and what it gets. That is the convention of the peers' figures.

Megatron's formula, L layers (Shoeybi et al. 2019; Narayanan et al. 2021 for the split table):

    activation     A = B / dp * S * d * 4 bytes, on each device
    over tp        2 L + 1 forward: the row-split products of attention and MLP, the lookup in the
                   split table; 2 L + 1 backward: the inputs of the column-split products, of the
                   head too:                                            (4 L + 2) A
                   of the loss over split classes the greatest, the sum of exponentials and the
                   label's logit, one number a token each:              3 * B / dp * S * 4
    over dp        the gradient of each parameter, as it is split over tp: the weights (12 d^2 a
                   layer, and b1) and the table by tp; the norms' scales, b2 and the positions
                   whole; and the loss.
"""

from collections.abc import Callable
from math import prod
from typing import Any

from programs import gpt
from xdsl.dialects.builtin import FixedBitwidthType, ModuleOp, TensorType
from xdsl.ir import SSAValue

from shardir.dialects import dist
from shardir.passes import PASSES, PIPELINES
from shardir.syntax.parser import parse

LAYERS = (2, 4, 8, 16)
MESH = (2, 4)
BATCH, SEQ, HIDDEN, HEADS, VOCAB = 8, 128, 256, 8, 1024
XLA = {2: 7_488_516, 4: 13_263_876, 8: 24_814_596, 16: 47_916_036}
"""What XLA's partitioner (Shardy, jax 0.10.2) makes of the same step with the same annotations."""


def megatron_bytes(layers: int) -> int:
    """The formula above."""
    dp, tp = MESH
    activation = BATCH // dp * SEQ * HIDDEN * 4
    over_tp = (4 * layers + 2) * activation + 3 * BATCH // dp * SEQ * 4
    split = (12 * HIDDEN**2 + 4 * HIDDEN) * layers + VOCAB * HIDDEN
    whole = 3 * HIDDEN * layers + HIDDEN + SEQ * HIDDEN
    return over_tp + (split // tp + whole) * 4 + 4


def size(v: SSAValue) -> int:
    """Bytes on one device."""
    assert isinstance(v.type, TensorType)
    element = v.type.element_type
    assert isinstance(element, FixedBitwidthType)
    return prod(v.type.get_shape()) * element.bitwidth // 8


def communicated(module: ModuleOp) -> tuple[int, int]:
    """Of a module in the local view: its collectives, and their bytes on one device."""
    count = total = 0
    for op in module.walk():
        if isinstance(op, dist.Collective) and not isinstance(op, dist.LOCAL):
            count += 1
            total += sum(max(size(a), size(b)) for a, b in zip(op.values, op.outs, strict=True))
    return count, total


def compiled(layers: int, fsdp: bool) -> ModuleOp:
    """The step, taken through the pipeline `train`."""
    module = parse(gpt(
        layers=layers, batch=BATCH, seq=SEQ, hidden=HIDDEN, heads=HEADS, vocab=VOCAB, mesh=MESH,
        fsdp=fsdp,
    ))  # fmt: skip
    for name in PIPELINES["train"].split(","):
        PASSES[name]()().apply(None, module)  # type: ignore[arg-type]
    return module


def zero3_bytes(layers: int) -> int:
    """The same step with parameters, gradients and updates split over dp (ZeRO-3, Rajbhandari et
    al. 2020): each parameter that has a whole dimension is gathered once and its gradient
    scattered, where Megatron's has one all-reduce of the same size."""
    return megatron_bytes(layers) + 4 * (
        (12 * HIDDEN**2 * layers + VOCAB * HIDDEN) // MESH[1]
        + 3 * HIDDEN * layers + HIDDEN + SEQ * HIDDEN
    )  # fmt: skip


def records(log: Callable[[str], object]) -> list[dict[str, Any]]:
    """One record per plan and depth: layers, mesh, plan, collectives, bytes, megatron_bytes,
    xla_bytes (what is known); for the plan fsdp also zero3_bytes."""
    out: list[dict[str, Any]] = []
    for fsdp in (False, True):
        for layers in LAYERS:
            count, total = communicated(compiled(layers, fsdp))
            formula = zero3_bytes(layers) if fsdp else megatron_bytes(layers)
            out.append({
                "layers": layers, "mesh": "dp=2,tp=4", "plan": "fsdp+tp" if fsdp else "megatron",
                "collectives": count, "bytes": total,
                "megatron_bytes": megatron_bytes(layers),
                "zero3_bytes": formula if fsdp else None,
                "xla_bytes": None if fsdp else XLA[layers],
            })  # fmt: skip
            log(f"{layers} layers: {total} bytes, {total / formula:.4f} of the formula")
    return out
