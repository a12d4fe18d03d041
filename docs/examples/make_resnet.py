"""Write a ResNet with bottleneck blocks (He et al., 2015) and its training step as a program.

    python docs/examples/make_resnet.py --dp 8 > resnet50.ir
    python docs/examples/make_resnet.py --dp 2 --tp 2 --width 8 --batch 8 --image 32 > narrow.ir

Parameters and running statistics have the names and initial values of torchvision. The batch is
split over dp. With --tp the channels within each block are split as well: the first convolution
computes a device's channels only, the other two are partial sums over them. With --sp the rows of
the images are split.
"""

import argparse
from math import sqrt

from writing import Program, Value


class ResNet(Program):
    """The convolutions, norms and blocks of a ResNet, as a program."""

    def conv(
        self, key: str, x: Value, channels: int, kernel: int, stride: int = 1,
        axes: tuple[str, ...] = (),
    ) -> Value:  # fmt: skip
        batch, depth, *rows = x.shape
        init = f"normal, std = {sqrt(2 / (channels * kernel * kernel))!r}"
        shape = (channels, depth, kernel, kernel)
        weight = self.argument(f"{key}.weight", shape, "parameter", init, axes)
        sizes = [(n - 1) // stride + 1 for n in rows]
        low = kernel // 2
        text = f"conv {{}} stride <{stride}, {stride}> padding <{low}, {low}, {low}, {low}>"
        name = key.replace(".", "_")
        return self.op(name, text, [x, weight], (batch, channels, *sizes))

    def norm(self, key: str, x: Value, axis: str = "") -> Value:
        """Add a batch normalisation, and the new values of its running statistics."""
        name, channels = key.replace(".", "_"), x.shape[1:2]
        weight, bias, mean, var = (
            self.argument(f"{key}.{k}", channels, role, f"constant, value = {start}", (axis,))
            for k, role, start in [
                ("weight", "parameter", 1.0), ("bias", "parameter", 0.0),
                ("running_mean", "state", 0.0), ("running_var", "state", 1.0),
            ]
        )  # fmt: skip
        for i, k in enumerate(("running_mean", "running_var"), 1):
            self.updated.append((Value(f"%{name}_{i}", channels, self.element), f"{key}.{k}"))
        text = "batch_norm {} momentum 0.1 eps 0.00001"
        return self.op(name, text, [x, weight, bias, mean, var], x.shape, channels, channels)

    def relu(self, name: str, x: Value) -> Value:
        return self.op(name, "relu {}", [x], x.shape)

    def bottleneck(self, key: str, x: Value, channels: int, stride: int) -> Value:
        """Add 1x1 to `channels` channels, 3x3, 1x1 to four times as many, and the sum with x."""
        name = key.replace(".", "_")
        y = self.conv(f"{key}.conv1", x, channels, 1, axes=("tp",))
        y = self.relu(f"{name}_relu1", self.norm(f"{key}.bn1", y, "tp"))
        y = self.conv(f"{key}.conv2", y, channels, 3, stride, axes=("", "tp"))
        y = self.relu(f"{name}_relu2", self.norm(f"{key}.bn2", y, "tp"))
        y = self.norm(f"{key}.bn3", self.conv(f"{key}.conv3", y, 4 * channels, 1, axes=("", "tp")))
        if x.shape != y.shape:
            x = self.conv(f"{key}.downsample.0", x, 4 * channels, 1, stride)
            x = self.norm(f"{key}.downsample.1", x)
        return self.relu(name, self.op(f"{name}_sum", "add {}", [y, x], y.shape))


def resnet(
    blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, batch: int = 256, image: int = 224,
    classes: int = 1000, rate: float = 0.1, element: str = "f32", **axes: int,
) -> str:  # fmt: skip
    """Return the program's text; `axes` are the sizes of dp, tp and sp."""
    p = ResNet(element, axes)
    x = p.argument("x", (batch, 3, image, image), "input", "normal", ("dp", "", "sp"))
    high = f"integers, low = 0, high = {classes}"
    labels = p.argument("labels", (batch,), "input", high, ("dp",), element="i32")
    y = p.relu("relu", p.norm("bn1", p.conv("conv1", x, width, 7, 2)))
    half = [(n - 1) // 2 + 1 for n in y.shape[2:]]
    pool = "max_pool {} window <3, 3> stride <2, 2> padding <1, 1, 1, 1>"
    y = p.op("maxpool", pool, [y], (batch, width, *half))
    for i, count in enumerate(blocks):
        for j in range(count):
            y = p.bottleneck(f"layer{i + 1}.{j}", y, width << i, 2 if i > 0 and j == 0 else 1)
    y = p.op("avgpool", "adaptive_avg_pool {} size <1, 1>", [y], (*y.shape[:2], 1, 1))
    features = y.shape[1]
    y = p.op("flat", "reshape {}", [y], (batch, features))
    bound = f"uniform, low = {-1 / sqrt(features)!r}, high = {1 / sqrt(features)!r}"
    weight = p.argument("fc.weight", (classes, features), "parameter", bound)
    bias = p.argument("fc.bias", (classes,), "parameter", bound)
    y = p.op("fc", 'einsum "bf,cf->bc" {}', [y, weight], (batch, classes))
    y = p.op("logits", "add {}", [y, bias], (batch, classes))
    loss = p.op("loss", "cross_entropy_loss <mean> {}", [y, labels], ())
    return p.text(loss, f"momentum, lr = {rate}, momentum = 0.9, weight_decay = 0.0001")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a ResNet's training step as a program.")
    help_of = {
        "width": (64, "channels of the first convolution"),
        "batch": (256, "images of all devices"),
        "image": (224, "rows and columns of an image"),
        "classes": (1000, "classes of images"),
        "dp": (1, "shards of the batch"),
        "tp": (1, "shards of the channels within a block"),
        "sp": (1, "shards of the rows of an image"),
    }
    parser.add_argument("--blocks", default="3,4,6,3", help="blocks per stage (3,4,6,3: ResNet50)")
    parser.add_argument("--element", default="f32", help="element type of floats (f32)")
    for name, (default, text) in help_of.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    given = vars(parser.parse_args())
    blocks = tuple(map(int, given.pop("blocks").split(",")))
    print(resnet(blocks, **given), end="")


if __name__ == "__main__":
    main()
