"""The communication of a training step: bytes against formulas of hand-written plans, and XLA.

Programs are those of `programs` and docs/examples/make_resnet.py, f32. Only the weights and the
batch have layouts; the rest is inferred and derived. Counted are, for each collective of one step,
the bytes on one device of the larger of its operand and its result. That is the convention of the
other systems' figures, and of the formulas, which count elements of 4 bytes:

Transformers of L layers, width d, B samples of S tokens, a table of V rows, which is the head too,
on dp x tp (Megatron: Shoeybi et al., 2019; Narayanan et al., 2021, for the split table):

    activation     A = B / dp * S * d
    over tp        forward after the lookup in the split table, and in each layer after the
                   products that are split by rows, of attention and MLP; backward before those
                   that are split by columns, also of the head:          (4 L + 2) A
                   of the loss over split classes the maximum, the sum of exponentials and the
                   label's logit, one scalar per token each:             3 B / dp * S
    over dp        the gradient of each parameter, as it is split over tp, and the loss; of BERT
                   also the number of masked positions (i64)

ZeRO-3 (Rajbhandari et al., 2020): each parameter that has a dimension that tp does not split is
split over dp too. It is gathered once, and its gradient is scattered where Megatron's is reduced,
with the same bytes: the addition is the bytes of such parameters on a device. Without tp the sum is
2 P and the loss, of P parameters.

MLP of L layers: Megatron's, (2 L - 1) A over tp, since the first layer's input is data.

DLRM (Naumov et al., 2019; Mudigere et al., 2022): T lookups of e elements for each of B samples on
n devices, the batch split. The MLPs' P parameters are reduced, and the loss. Tables that are split

    by tables      each device looks up all samples in its tables: an all-to-all of the indices and
                   one of the rows, backward one of their gradients:     B T / n + 2 B T e / n
    by columns     every device needs all indices, gathered:             B T + 2 B T e / n
    by rows        the rows are partial sums, scattered to the samples' devices; backward their
                   gradients are gathered:                               B T + 2 B T e

ResNet (He et al., 2015), data parallel with batch norms over the global batch (Peng et al., 2018):
the P parameters' gradients, the mean and the variance of each of the C normalised channels, and
backward the two sums of their gradients:                               P + 4 C + 1
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from math import prod
from typing import Any

from xdsl.context import Context
from xdsl.dialects.builtin import FixedBitwidthType, ModuleOp, TensorType
from xdsl.ir import SSAValue

from bench.programs import bert, dlrm, gpt, mlp, resnet
from shardir.dialects import dist
from shardir.pipelines import build
from shardir.syntax.parser import parse

F32, I64 = 4, 8
LAYERS = (2, 4, 8, 16)
XLA = {2: 7_488_516, 4: 13_263_876, 8: 24_814_596, 16: 47_916_036}
"""The bytes of XLA's partitioner (Shardy, jax 0.10.2) for the same step of GPT with the same
annotations, by the number of layers."""
XLA_FSDP = 23_300_000
"""Its bytes for 2 layers with parameters split over dp too."""


# ---- the bytes of a module ----


def size(v: SSAValue) -> int:
    """Return the bytes on one device."""
    assert isinstance(v.type, TensorType)
    element = v.type.element_type
    assert isinstance(element, FixedBitwidthType)
    return prod(v.type.get_shape()) * element.bitwidth // 8


def communicated(module: ModuleOp) -> tuple[int, int]:
    """Return the number of collectives of a local module, and their bytes on one device."""
    count = total = 0
    for op in module.walk():
        if isinstance(op, dist.CollectiveOp) and not isinstance(op, dist.LOCAL):
            count += 1
            total += sum(max(size(a), size(b)) for a, b in zip(op.values, op.outs, strict=True))
    return count, total


def compiled(text: str) -> ModuleOp:
    """Return the step after the pipeline `train`."""
    module = parse(text)
    for p in build("train"):
        p.apply(Context(), module)
    return module


# ---- the formulas ----


@dataclass(frozen=True)
class Sizes:
    """The sizes of a transformer."""

    layers: int
    batch: int = 8
    seq: int = 128
    hidden: int = 256
    heads: int = 8
    vocab: int = 1024


@dataclass(frozen=True)
class Parameters:
    """Numbers of elements of a transformer's parameters, over all layers: of those that tp splits
    and that have an unsharded dimension, of those that it splits along their only one, and of the
    others."""

    matrices: int
    vectors: int
    replicated: int
    counts: int = 0
    """The number of counts (i64) that the loss is divided by."""


def gpt_parameters(s: Sizes) -> Parameters:
    """Return the elements of GPT: attention has no biases, norms have a scale only."""
    d = s.hidden
    return Parameters(
        12 * d * d * s.layers + s.vocab * d, 4 * d * s.layers, 3 * d * s.layers + d + s.seq * d
    )


def bert_parameters(s: Sizes) -> Parameters:
    """Return the elements of BERT: biases everywhere; embeddings of segments and positions with a
    norm; the head's product, norm and bias."""
    d = s.hidden
    others = 6 * d * s.layers + (2 + s.seq) * d + 2 * d + d * d + d + 2 * d
    return Parameters(12 * d * d * s.layers + s.vocab * d, 7 * d * s.layers + s.vocab, others, 1)


def megatron_bytes(s: Sizes, p: Parameters, dp: int, tp: int) -> int:
    tokens = s.batch // dp * s.seq
    over_tp = (4 * s.layers + 2) * tokens * s.hidden + 3 * tokens if tp > 1 else 0
    over_dp = (p.matrices + p.vectors) // tp + p.replicated + 1 if dp > 1 else 0
    return (over_tp + over_dp) * F32 + (p.counts * I64 if dp > 1 else 0)


def zero3_bytes(s: Sizes, p: Parameters, dp: int, tp: int) -> int:
    gathered = (p.matrices + (p.vectors if tp == 1 else 0)) // tp + p.replicated
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
    """Return the bytes of bottleneck blocks: 1x1 to `width` channels (doubled in each stage), 3x3,
    and 1x1 to four times as many; and a 1x1 at the beginning of a stage."""
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
    """A step, and the bytes by the formula of its hand-written plan."""

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


SMOKE = {"rows": lambda every=rows: islice(every(), 1)}


def records(log: Callable[[str], object]) -> list[dict[str, Any]]:
    """One record per model, depth and plan: model, mesh, plan, collectives, bytes, formula_bytes,
    xla_bytes (where measured)."""
    out: list[dict[str, Any]] = []
    for row in rows():
        count, total = communicated(compiled(row.text))
        out.append({
            "model": row.model, "mesh": row.mesh, "plan": row.plan, "collectives": count,
            "bytes": total, "formula_bytes": row.formula, "xla_bytes": row.xla,
        })  # fmt: skip
        log(f"{row.model}, {row.plan}: {total} bytes, {total / row.formula:.4f} of the formula")
    return out
