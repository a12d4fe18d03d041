"""The transformers of docs/examples: their bytes of communication against Megatron's formula, and
their results on meshes that divide neither samples nor heads.

Bytes are counted as in test/bench/bytes.py: of each collective the larger of its operand and its
result on one device. Of a model with B samples of S tokens, d columns and f hidden columns on
dp x tp devices:

    activation     A = B / dp * S * d * 4 bytes
    over tp        forward after each product that is split by rows, and after the lookup in the
                   split table: A; backward before each input of products that are split by columns,
                   also of the head: A (Shoeybi et al., 2019). Where the loss is split over the
                   vocabulary, three scalars per token (Narayanan et al., 2021), four where labels
                   are smoothed.
    over dp        the gradients, as the parameters are split over tp; and the loss.
"""

from itertools import product
from pathlib import Path

import pytest
from support.extent import sampled
from support.harness import compiled

import shardir
from shardir.syntax.parser import parse
from shardir.tools import bench

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
DP = TP = 2
B, S, D, V = 4, 6, 8, 12


def activation(rows: int = S) -> int:
    return B // DP * rows * D * 4


def loss(scalars: int = 3) -> int:
    return scalars * B // DP * S * 4


def gradients(split: int, replicated: int) -> int:
    """Return the bytes of gradients, by their numbers of elements, and of the loss."""
    return (split // TP + replicated + 1) * 4


def pangu_alpha(layers: int) -> int:
    """The query layer is one more layer, and its queries are an input of their own."""
    f = 4 * D
    forward = 1 + 2 * (layers + 1)
    backward = 1 + 2 * (layers + 1) + 1
    split = V * D + (layers + 1) * (4 * D * D + 2 * D * f + f)
    # Positions, queries; two norms and the last bias of a layer; the norm before the query layer.
    replicated = 2 * S * D + (layers + 1) * (2 * 2 * D + D) + 2 * D
    return (forward + backward) * activation() + loss() + gradients(split, replicated)


def realformer() -> int:
    f = 2 * D
    split, replicated = 2 * (4 * D * D + 2 * D * f), 2 * 4 * D
    # The first layer's input is data: 2 backward of the second layer, 1 of the first.
    return (4 + 3) * activation() + gradients(split, replicated)


def encoder_decoder() -> int:
    f = 2 * D
    split, replicated = V * D + 3 * 4 * D * D + 2 * 2 * D * f, 5 * 2 * D
    # A lookup and two products each; the decoder has one product more, and the head. Backward
    # before each attention and MLP, and for the memory.
    over_tp = (3 + 2) * activation(5) + (4 + 3 + 1) * activation() + activation(5)
    return over_tp + loss(4) + gradients(split, replicated)


def bert() -> int:
    f = 2 * D
    split = V * D + V + 4 * D * D + 2 * D * f
    replicated = S * D + 2 * D + 2 * D * D + 2 * D + 4 * 2 * D
    # Two losses, and the number of masked tokens (i64).
    return (3 + 3) * activation() + loss() + gradients(split, replicated) + 4 + 8


@pytest.mark.parametrize(
    ("example", "wanted"),
    [
        ("pangu_alpha", pangu_alpha(1)),
        ("realformer", realformer()),
        ("encoder_decoder", encoder_decoder()),
        ("bert", bert()),
    ],
)
def test_a_model_communicates_as_megatron(example: str, wanted: int):
    communicated = bench.load("bytes").communicated
    module = shardir.compile_file(EXAMPLES / f"{example}.ir").module
    assert communicated(module)[1] == wanted


MODELS = ("bert", "pangu_alpha", "loss_parallel", "dropout", "encoder_decoder", "realformer")
MESHES = ("dp = 3, tp = 2", "dp = 2, tp = 3")


@pytest.mark.parametrize(("example", "mesh"), sampled(product(MODELS, MESHES), 4))
def test_a_model_is_the_same_on_other_meshes(example: str, mesh: str):
    """4 samples over 3, 2 heads over 3: after each pass, and for the gradients."""
    text, here = (EXAMPLES / f"{example}.ir").read_text(), "dist.mesh @m <dp = 2, tp = 2>"
    assert here in text
    compiled(parse(text.replace(here, f"dist.mesh @m <{mesh}>")), check=True)
