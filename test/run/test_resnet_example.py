"""ResNet50 of docs/examples/make_resnet.py on real ranks: its training."""
# ruff: noqa: E402 (torch may not be installed)

from itertools import count
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.extent import extent
from support.ranks.example_runs import Tensors, check_training, equal

NARROW = {"width": 8, "batch": 8, "image": 32, "classes": 10, "element": "f64"}
"""ResNet50 with an eighth of its channels, in f64: in f32 the roundings of 50 layers, which are
normalised by variances of 8 elements, grow to differences of 0.1 within three steps."""

SHALLOW = {**NARROW, "blocks": (2, 1, 1, 1)}


def resnet(v: Tensors) -> Any:
    """Return the loss; the running statistics in `v` are updated."""
    functional = torch.nn.functional

    def conv(name: str, x: Any, stride: int = 1) -> Any:
        weight = v[f"{name}_weight"]
        return functional.conv2d(x, weight, stride=stride, padding=weight.shape[2] // 2)

    def norm(name: str, x: Any) -> Any:
        kinds = ("running_mean", "running_var", "weight", "bias")
        return functional.batch_norm(x, *(v[f"{name}_{k}"] for k in kinds), training=True)

    y = functional.max_pool2d(torch.relu(norm("bn1", conv("conv1", v["x"], 2))), 3, 2, 1)
    for stage in (1, 2, 3, 4):
        for j in count():
            key, stride = f"layer{stage}_{j}", 2 if stage > 1 and j == 0 else 1
            if f"{key}_conv1_weight" not in v:
                break
            z = torch.relu(norm(f"{key}_bn1", conv(f"{key}_conv1", y)))
            z = torch.relu(norm(f"{key}_bn2", conv(f"{key}_conv2", z, stride)))
            z = norm(f"{key}_bn3", conv(f"{key}_conv3", z))
            if j == 0:
                y = norm(f"{key}_downsample_1", conv(f"{key}_downsample_0", y, stride))
            y = torch.relu(y + z)
    logits = functional.linear(y.mean((2, 3)), v["fc_weight"], v["fc_bias"])
    return functional.cross_entropy(logits, v["labels"])


@pytest.mark.parametrize(
    ("options", "norms"),
    [
        ({**SHALLOW, "dp": 2, "sp": 2}, 20),
        *extent([], [({**SHALLOW, "dp": 2, "tp": 2}, 20), ({**NARROW, "dp": 4}, 53)]),
    ],
    ids=["rows", *extent([], ["channels", "batch"])],
)
def test_resnet(ran, options, norms):
    """Batches, channels and rows are split: losses, parameters and running statistics. The last
    stage has one row of an image, so that one of two shards is empty."""
    example = ran("resnet", 2, options=tuple(options.items()))
    values = check_training(example, resnet, steps=2, weight_decay=1e-4)
    arguments = example.plan["functions"]["step"]["args"]
    running = [a for a in arguments if ".running_" in a["key"]]
    assert len(running) == 2 * norms
    for a in running:
        equal(example.dump[f"states/{a['key']}"], values[a["name"]], a["key"])
