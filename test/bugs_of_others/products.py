"""Partial sums, products, convolutions and attention."""

from typing import Any

from torch import Tensor, arange, nn
from torch.nn import functional as F

from bugs_of_others.record import DOUBLE, Batch, bug, bugs_in

TITLE = "Partial sums and products"


@bug(
    "pytorch/pytorch#163193",
    "A number was added to a partial sum on each of 2 ranks: 65 in place of 55.",
    mesh="d = 2", x="[{d}]", prints="loss: 55; sent: all-reduce of 8 B",
)  # fmt: skip
def number_added_to_a_partial_sum(x: Any = arange(10.0)):
    return x.sum() + 10


@bug(
    "pytorch/pytorch#145218",
    "A number was added to the norm of each shard.",
    mesh="d = 2", x="[{d}]", prints="loss: 7; gradient of x: [0, 0.6, 0, 0.8]",
)  # fmt: skip
def number_added_to_a_norm(x: Any = [0.0, 3, 0, 4]):
    return x.norm() + 2


@bug(
    "pytorch/pytorch#2421, pytorch/pytorch#3264, tenstorrent/tt-metal#55585",
    "The gradient of a norm at zero was NaN.",
    mesh="d = 2", x="[{}, {d}]", prints="gradient of x: [[0, 0], [0.6, 0.8]]",
)  # fmt: skip
def gradient_of_a_norm_at_zero(x: Any = [[0.0, 0], [3, 4]]):
    return x.norm(dim=1).sum()


@bug(
    "pytorch/xla#5264",
    "Of a difference and a quotient of sharded operands, the operands were exchanged.",
    mesh="d = 2", x="[{d}]", y="[{}]",
    prints="result 0: [-1, 0, 1, 2]; result 1: [0.5, 1, 1.5, 2]",
)  # fmt: skip
def difference_and_quotient(x: Any = [1.0, 2, 3, 4], y: Any = [2.0, 2, 2, 2]):
    return x - y, x / y


@bug(
    "EnzymeAD/Reactant.jl#743",
    "A product of two matrices whose rows are split (by Shardy) was wrong.",
    mesh="data = 2, model = 2", x="[{model}]", w="[{model}]",
    prints="result: [[7, 10], [15, 22]]",
)  # fmt: skip
def product_of_two_row_split_matrices(x: Any = [[1.0, 2], [3, 4]], w: Any = [[1.0, 2], [3, 4]]):
    return x @ w


@bug(
    "pytorch/pytorch#167106",
    "A product of a split tensor with a replicated matrix gathered the tensor.",
    mesh="a = 2, b = 2", v="[{a}, {b}]",
    prints="gradient of s: [[18], [22], [26]]; sent: all-reduce of 32 B",
)  # fmt: skip
def product_with_a_replicated_matrix(
    v: Any = arange(12.0).view(2, 2, 3), s: Any = [[1.0], [2], [3]]
):
    return (v @ s).sum()


@bug(
    "pytorch/pytorch#143748, pytorch/pytorch#172102, meta-pytorch/autoparallel#26",
    """A linear layer flattens batch and sequence: with 5 tokens over 4 ranks it was an error, and
    a split sequence was gathered.""",
    mesh="d = 4", x="[{}, {d}]",
    prints="result: [[[1], [3], [5], [7], [9]], [[11], [13], [15], [17], [19]]]; sent: nothing",
)  # fmt: skip
def linear_on_a_split_sequence(
    x: Any = arange(10.0).view(2, 5, 1), w: Any = [[2.0]], b: Any = [1.0]
):
    return F.linear(x, w, b)


@bug(
    "pytorch/pytorch#191926, pytorch/pytorch#192147",
    """A convolution that cuts an image into patches, without overlap, did not keep the split of the
    width.""",
    mesh="d = 2", x="[{}, {}, {}, {d}]", w="[]", prints="loss: 18.05; sent: all-reduce of 520 B",
)  # fmt: skip
def patches_of_a_split_image(
    x: Any = arange(512.0).view(2, 1, 16, 16).sin(), w: Any = arange(64.0).view(4, 1, 4, 4).cos()
):
    return F.conv2d(x, w, stride=4).square().mean()


@bug(
    "pytorch/torchtitan#4332, awslabs/slapo#23, Wenyueh/MinivLLM#80",
    """The bias of a layer whose weight is split by rows was added once for each rank, or its
    gradient divided by their number.""",
    mesh="tp = 4", plan='inputs : [{}, {tp}]\n"w" : [{}, {tp}]\n"b" : []',
    prints="loss: 105; gradient of b: [2, 2]",
)  # fmt: skip
def bias_of_a_row_parallel_layer(
    w: Any = [[1.0, 2, 1, 0], [0, 1, 3, 1]],
    b: Any = [10.0, 20],
    x: Any = [[1, 2, 3, 4], [4, 3, 2, 1]],
):
    return F.linear(x.double(), w, b).sum()


@bug(
    "huggingface/diffusers#12706, deepspeedai/DeepSpeed#5177",
    "Attention with a split sequence (Ulysses) needed tokens that the ranks divide.",
    mesh="d = 4", q="[{}, {}, {d}]", prints="loss: 22.33",
)  # fmt: skip
def attention_of_ten_tokens(q: Any = arange(120.0).view(1, 6, 10, 2).sin()):
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum()


@bug(
    "vllm-project/vllm-omni#1324",
    "It needed heads that the ranks divide. Of 6 heads over 4 ranks the last has none.",
    mesh="d = 4", q="[{}, {d}]", prints="loss: 22.33; sent: all-reduce of 8 B",
)  # fmt: skip
def attention_of_six_heads(q: Any = arange(120.0).view(1, 6, 10, 2).sin()):
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum()


@bug(
    "huggingface/transformers#48307, pytorch/torchtitan#2574",
    "Attention with fewer heads of keys than ranks ended in an error of shapes.",
    mesh="tp = 4", plan="megatron", prints="loss: 0.04681; sent: all-reduce of 3.0 KiB",
)  # fmt: skip
class TwoHeadsOfKeysOverFourRanks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(32, 32, **DOUBLE), nn.Linear(32, 32, **DOUBLE)
        self.k, self.v = nn.Linear(32, 8, **DOUBLE), nn.Linear(32, 8, **DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2)).square().mean()

    @staticmethod
    def batches() -> list[Batch]:
        return [{"x": arange(384.0, **DOUBLE).view(2, 6, 32).sin()}]


@bug(
    "deepspeedai/DeepSpeed#8437",
    """The iteration of Muon on shards of a matrix: the update depended on how many shards there
    are.""",
    mesh="tp = 4", w="[{tp}]", prints="loss: 1.747",
)  # fmt: skip
def newton_schulz_of_a_split_matrix(w: Any = arange(48.0).view(4, 12).sin()):
    x = w / w.norm()
    for _ in range(3):
        a = x @ x.T
        x = 3.4445 * x + (2.0315 * a @ a - 4.775 * a) @ x
    return x.square().sum()


BUGS = bugs_in(globals())
