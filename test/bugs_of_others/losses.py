"""Losses over ranks and microbatches, norms, experts and tables."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bugs_of_others.record import DOUBLE, Batch, bug, bugs_in

TITLE = "Losses and norms"

TOKENS = """Means over valid tokens were averaged as if each part had equally many: 6 in place of
    9.2 for the sums 2 and 90 of 1 and 9 tokens"""


class MeanOfTokens(nn.Module):
    """Losses of 2 for the valid label of the first half, and of 10 for the nine of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), **DOUBLE))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.scale * logits, labels)

    @staticmethod
    def batches() -> list[Batch]:
        wrong = torch.tensor([2.0] * 9 + [10.0] * 9, **DOUBLE).expm1().log()
        labels = torch.tensor([0] + [-100] * 8 + [0] * 9)
        return [{"logits": torch.stack([wrong * 0, wrong], 1), "labels": labels}]


@bug(
    "pytorch/torchtitan#4167, pytorch/torchtitan#1842, huggingface/transformers#34373",
    f"{TOKENS}, over ranks.",
    mesh="dp = 2", plan="ddp", prints="loss: 9.2",
)  # fmt: skip
class MeanOverTokensOfRanks(MeanOfTokens):
    pass


@bug(
    "pytorch/torchtitan#2206, meta-pytorch/torchtune#1875",
    "The same over microbatches.",
    mesh="dp = 2", plan="ddp", prints="loss: 9.2", accumulate="tokens, microbatches = 2",
)  # fmt: skip
class MeanOverTokensOfMicrobatches(MeanOfTokens):
    pass


@bug(
    "huggingface/transformers#34191",
    "The same, where a mean of the microbatches' means is asked for.",
    mesh="dp = 2", plan="ddp", accumulate="mean, microbatches = 2", refused=True,
    prints="[G17] expected accumulate <tokens>, got <mean>: %cross_entropy_loss is a mean over "
    "tokens, whose number differs between microbatches; write accumulate <tokens, microbatches = "
    "2>",
)  # fmt: skip
class MeanOfMeans(MeanOfTokens):
    pass


@bug(
    "NVIDIA/Megatron-LM#7452",
    """Logits that each rank has whole were taken for shards of the vocabulary: a loss off by log 2,
    and another gradient.""",
    mesh="tp = 2", logits="[]",
    prints="loss: 0.4402; gradient of logits: [[0.03206, 0.08714, 0.2369, -0.3561]]",
)  # fmt: skip
def loss_of_replicated_logits(logits: Any = [[0.0, 1, 2, 3]], label: Any = [3]):
    return F.cross_entropy(logits, label)


@bug(
    "modelscope/ms-swift#9947",
    "Of logits with a split vocabulary, ranks without the label had another gradient.",
    mesh="tp = 2", logits="[{}, {tp}]",
    prints="loss: 0.4402; gradient of logits: [[0.03206, 0.08714, 0.2369, -0.3561]]",
)  # fmt: skip
def loss_of_split_logits(logits: Any = [[0.0, 1, 2, 3]], label: Any = [3]):
    return F.cross_entropy(logits, label)


@bug(
    "jax-ml/jax#36886",
    """Gradients for each sample, on split samples, differed from those on one device as soon as
    there were two.""",
    mesh="d = 2", x="[{d}]", each="[{d}]",
    prints="gradient of each: [[0, 1], [1, 1], [1, 0], [0, 0]]; gradient of p: [2, 2]",
)  # fmt: skip
def gradient_of_each_sample(
    p: Any = [1.0, 2], each: Any = [[0.0, 0]] * 4, x: Any = [[0, 1], [1, 1], [1, 0], [0, 0]]
):
    return ((p + each) * x).sum()


@bug(
    "pytorch/torchtitan#4637",
    """`padding_idx` of a table with split rows was an error, or another shard's row had no
    gradient.""",
    mesh="tp = 2", table="[{tp}]",
    prints="gradient of table: [[1], [1], [0], [1], [1], [0]]",
)  # fmt: skip
def padding_of_a_split_table(
    table: Any = [[1.0], [2], [3], [4], [5], [6]], ids: Any = [0, 1, 2, 3, 4, 2, 2]
):
    return F.embedding(ids, table, padding_idx=2).sum()


@bug(
    "ROCm/TransformerEngine#715, NVIDIA-NeMo/RL#3788, pytorch/pytorch#180346",
    """The norm for clipping counted replicated parameters once for each rank; of parameters on
    several meshes it was an error.""",
    mesh="a = 2, tp = 2", split="[{tp}]", rows="[{a, tp}]", whole="[]", clip="norm, max = 1.0",
    prints="gradient_norm: 12; gradient of whole: [0.25, 0.25, 0.25, 0.25]",
)  # fmt: skip
def norm_over_replicas_and_shards(
    whole: Any = [1.0] * 4, split: Any = [1.0] * 4, rows: Any = [[1.0, 1]] * 4
):
    return (whole.sum() + split.sum() + rows.sum()) * 3


@bug(
    "pytorch/pytorch#160285, NVIDIA/Megatron-LM#5956",
    """Gradients of experts, split over the ranks that split the tokens too, were too large by the
    number of ranks.""",
    mesh="d = 2", up="[{d}]", x="[{d}]", expert="[{d}]",
    prints="loss: 92; gradient of up: [6, 8, 18, 4]",
)  # fmt: skip
def experts_on_the_ranks_of_tokens(
    up: Any = [1.0, 2, 3, 4],
    x: Any = [1, 2, 3, 4, 5, 6, 7, 8],
    expert: Any = [0, 1, 2, 3, 0, 1, 2, 2],
):
    chosen = F.one_hot(expert, 4).double()
    return torch.einsum("te,t,e->t", chosen, x.double(), up).sum()


class Tied(nn.Module):
    """A table of 5 rows that is also the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 2, **DOUBLE), nn.Linear(2, 5, False, **DOUBLE)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.table(ids)), labels)

    @staticmethod
    def batches() -> list[Batch]:
        ids = torch.arange(8) % 5
        return [{"ids": ids, "labels": (ids + 1) % 5}]


@bug(
    "pytorch/pytorch#176076",
    """The last rows of a tied table were not trained, where the ranks do not divide the rows
    (FSDP2).""",
    mesh="dp = 4", plan='"*" : [{dp}], uses []\ninputs : [{dp}]', prints="loss: 4.4",
)  # fmt: skip
class FiveTiedRowsOverFourRanks(Tied):
    pass


@bug(
    "verl-project/verl#7493",
    "With replicas beside an axis of one shard, gradients were not reduced over the replicas.",
    mesh="dp = 2, shard = 1", plan="ddp(dp) * fsdp(shard)", prints="loss: 4.4",
)  # fmt: skip
class ReplicasOfOneShard(Tied):
    pass


@bug(
    "pytorch/pytorch#144045",
    "A parameter of one element had a gradient of zero (FSDP2 on one GPU).",
    mesh="dp = 2", plan='"*" : [{dp}], uses []\ninputs : [{dp}]', prints="gradient of scale: [10]",
)  # fmt: skip
def parameter_of_one_element(scale: Any = [2.0], x: Any = [1, 2, 3, 4]):
    return (scale * x).sum()


BUGS = bugs_in(globals())
