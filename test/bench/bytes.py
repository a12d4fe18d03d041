"""What a training step communicates: bytes against the formulas of hand-written plans, and XLA.

Programs are those of `programs` and docs/examples/make_resnet.py, f32. Only the weights and the
batch have layouts; propagation and differentiation do the rest. Counted, for each collective that
a device takes part in during one step: the bytes of the larger of what it gives and what it gets.
That is the convention of the peers' figures, and of the formulas, which are of numbers of 4 bytes:

Transformers of L layers, width d, B samples of S tokens, a table of V rows, which is the head too,
on dp x tp (Megatron: Shoeybi et al., 2019; Narayanan et al., 2021, for the split table):

    activation     A = B / dp * S * d
    over tp        forward behind the lookup in the split table, and in each layer behind the
                   products that are split by rows, of attention and MLP; backward in front of those
                   that are split by columns, of the head too:           (4 L + 2) A
                   of the loss over split classes the greatest, the sum of exponentials and the
                   label's logit, one number a token each:               3 B / dp * S
    over dp        the gradient of each parameter, as it is split over tp, and the loss; of BERT
                   how many places are masked besides (i64)

ZeRO-3 (Rajbhandari et al., 2020): each parameter that has a dimension that tp does not split is
split over dp too. It is gathered once, and its gradient scattered where Megatron's is reduced, in
as many bytes: as much more as there are such parameters on a device. Without tp that is 2 P and the
loss, of P parameters.

MLP of L layers: Megatron's, (2 L - 1) A over tp, since the first layer's input is data.

DLRM (Naumov et al., 2019; Mudigere et al., 2022): T lookups of e numbers for each of B samples on n
devices, the batch split. The MLPs' P parameters are reduced, and the loss. Tables that are split

    by tables      each device looks up all samples in its tables: an all-to-all of the indices and
                   one of what is found, backward one of its gradient:   B T / n + 2 B T e / n
    by columns     every device needs all indices, gathered:             B T + 2 B T e / n
    by rows        what is found is a sum over devices, scattered to the samples' devices; backward
                   its gradient is gathered:                             B T + 2 B T e

ResNet (He et al., 2015), data parallel with batch norms over the whole batch (Peng et al., 2018):
the P parameters' gradients, and of each of the C normalised channels the mean and the variance, and
backward the two sums of their gradients:                               P + 4 C + 1
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import prod
from typing import Any

from programs import bert, dlrm, gpt, mlp, resnet
from xdsl.context import Context
from xdsl.dialects.builtin import FixedBitwidthType, ModuleOp, TensorType
from xdsl.ir import SSAValue

from shardir.dialects import dist
from shardir.pipelines import build
from shardir.syntax.parser import parse

F32, I64 = 4, 8
LAYERS = (2, 4, 8, 16)
XLA = {2: 7_488_516, 4: 13_263_876, 8: 24_814_596, 16: 47_916_036}
"""What XLA's partitioner (Shardy, jax 0.10.2) makes of the same step of GPT with the same
annotations."""
XLA_FSDP = 23_300_000
"""Of 2 layers, parameters split over dp too."""


# ---- what is counted ----


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
        if isinstance(op, dist.CollectiveOp) and not isinstance(op, dist.LOCAL):
            count += 1
            total += sum(max(size(a), size(b)) for a, b in zip(op.values, op.outs, strict=True))
    return count, total


def compiled(text: str) -> ModuleOp:
    """The step, taken through the pipeline `train`."""
    module = parse(text)
    for p in build("train"):
        p.apply(Context(), module)
    return module


# ---- the formulas ----


@dataclass(frozen=True)
class Sizes:
    """Of a transformer."""

    layers: int
    batch: int = 8
    seq: int = 128
    hidden: int = 256
    heads: int = 8
    vocab: int = 1024


@dataclass(frozen=True)
class Parameters:
    """Of how many numbers a transformer's parameters are, all layers together: those that tp splits
    and that have a whole dimension besides, those that it splits and that have none, the others."""

    matrices: int
    vectors: int
    whole: int
    counts: int = 0
    """How many counts (i64) go into the loss."""


def gpt_parameters(s: Sizes) -> Parameters:
    """Attention has no biases, norms have a scale only."""
    d = s.hidden
    return Parameters(
        12 * d * d * s.layers + s.vocab * d, 4 * d * s.layers, 3 * d * s.layers + d + s.seq * d
    )


def bert_parameters(s: Sizes) -> Parameters:
    """Biases everywhere; embeddings of segments and positions with a norm; the head's product, norm
    and bias."""
    d = s.hidden
    whole = 6 * d * s.layers + (2 + s.seq) * d + 2 * d + d * d + d + 2 * d
    return Parameters(12 * d * d * s.layers + s.vocab * d, 7 * d * s.layers + s.vocab, whole, 1)


def megatron_bytes(s: Sizes, p: Parameters, dp: int, tp: int) -> int:
    tokens = s.batch // dp * s.seq
    over_tp = (4 * s.layers + 2) * tokens * s.hidden + 3 * tokens if tp > 1 else 0
    over_dp = (p.matrices + p.vectors) // tp + p.whole + 1 if dp > 1 else 0
    return (over_tp + over_dp) * F32 + (p.counts * I64 if dp > 1 else 0)


def zero3_bytes(s: Sizes, p: Parameters, dp: int, tp: int) -> int:
    gathered = (p.matrices + (p.vectors if tp == 1 else 0)) // tp + p.whole
    return megatron_bytes(s, p, dp, tp) + gathered * F32


def mlp_bytes(layers: int, batch: int, dim: int, hidden: int, dp: int, tp: int) -> int:
    over_tp = (2 * layers - 1) * batch // dp * dim
    return (over_tp + layers * 2 * dim * hidden // tp + 1) * F32


def dlrm_bytes(
    split: str, devices: int, batch: int, tables: int, width: int, dense: int,
    bottom: tuple[int, ...], top: tuple[int, ...],
) -> int:  # fmt: skip
    both = (dense, *bottom, width), (width + (tables + 1) ** 2, *top, 1)
    parameters = sum(n * m + m for sizes in both for n, m in pairwise(sizes))
    looked = batch * tables
    indices = looked // devices if split == "tables" else looked
    found = looked * width if split == "rows" else looked * width // devices
    return (indices + 2 * found + parameters + 1) * F32


def resnet_bytes(blocks: tuple[int, ...], width: int, classes: int) -> int:
    """Of bottleneck blocks: 1x1 to `width` channels, twice as many in each stage, 3x3, and 1x1 to
    four times as many; a 1x1 besides where a stage begins."""
    weights, channels, depth = 3 * width * 7 * 7, width, width
    for i, count in enumerate(blocks):
        w = width << i
        weights += depth * 4 * w
        channels += 4 * w
        for _ in range(count):
            weights += depth * w + w * w * 9 + w * 4 * w
            channels += 6 * w
            depth = 4 * w
    parameters = weights + 2 * channels + classes * depth + classes
    return (parameters + 4 * channels + 1) * F32


# ---- the table ----


@dataclass(frozen=True)
class Row:
    """A step, and what the formula of a hand-written plan says of it."""

    model: str
    mesh: str
    plan: str
    text: str
    formula: int
    xla: int | None = None


LANGUAGE_MODELS = {"gpt": (gpt, gpt_parameters), "bert": (bert, bert_parameters)}


def language_model(
    name: str, s: Sizes, dp: int, tp: int, *, fsdp: bool, xla: int | None = None
) -> Row:
    model, parameters = LANGUAGE_MODELS[name]
    formula = zero3_bytes if fsdp else megatron_bytes
    plan = " + ".join(n for n, used in (("FSDP", fsdp), ("TP", tp > 1)) if used)
    return Row(
        f"{name}, {s.layers} layers", f"dp={dp},tp={tp}", plan if fsdp else "Megatron",
        model(**asdict(s), mesh=(dp, tp), fsdp=fsdp), formula(s, parameters(s), dp, tp), xla,
    )  # fmt: skip


def rows() -> Iterator[Row]:
    dp, tp = 2, 4
    for name in LANGUAGE_MODELS:
        known = name == "gpt"
        for n in LAYERS:
            xla = XLA[n] if known else None
            yield language_model(name, Sizes(n), dp, tp, fsdp=False, xla=xla)
        for n in LAYERS:
            xla = XLA_FSDP if known and n == 2 else None
            yield language_model(name, Sizes(n), dp, tp, fsdp=True, xla=xla)
        yield language_model(name, Sizes(2), 8, 1, fsdp=True)
    perceptron: Any = {"layers": 2, "batch": 64, "dim": 256, "hidden": 1024}
    yield Row(
        "mlp, 2 layers", f"dp={dp},tp={tp}", "Megatron", mlp(mesh=(dp, tp), **perceptron),
        mlp_bytes(dp=dp, tp=tp, **perceptron), 1_146_884,
    )  # fmt: skip
    dlrm_sizes: Any = {
        "devices": 8, "batch": 2048, "tables": 8, "width": 64, "dense": 16,
        "bottom": (512, 256), "top": (512, 256),
    }  # fmt: skip
    for split in ("tables", "columns", "rows"):
        text = dlrm(split=split, rows=100_000, **dlrm_sizes)
        plan = "unsplit tables" if split == "tables" else f"tables by {split}"
        yield Row("dlrm", "d=8", plan, text, dlrm_bytes(split, **dlrm_sizes))
    network: Any = {"blocks": (3, 4, 6, 3), "width": 64, "classes": 1000}
    text = resnet(batch=256, image=224, dp=8, **network)
    yield Row("resnet50", "dp=8", "data parallel", text, resnet_bytes(**network))


def records(log: Callable[[str], object]) -> list[dict[str, Any]]:
    """One record per model, depth and plan: model, mesh, plan, collectives, bytes, formula_bytes,
    xla_bytes (what is known)."""
    out: list[dict[str, Any]] = []
    for row in rows():
        count, total = communicated(compiled(row.text))
        out.append({
            "model": row.model, "mesh": row.mesh, "plan": row.plan, "collectives": count,
            "bytes": total, "formula_bytes": row.formula, "xla_bytes": row.xla,
        })  # fmt: skip
        log(f"{row.model}, {row.plan}: {total} bytes, {total / row.formula:.4f} of the formula")
    return out
