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

from shardir.build import Module, nn
from shardir.build.function import FunctionBuilder
from shardir.build.values import Value


class ResNet:
    """The convolutions, norms and blocks of a ResNet, in a function. A value has the name of its
    key in the parameters, with _ in place of dots. `axes` are those of the mesh."""

    def __init__(self, f: FunctionBuilder, element: str, axes: dict[str, int]):
        self.f, self.element, self.axes = f, element, axes

    def layout(self, *axes: str) -> str | None:
        """The layout of leading dimensions that are split over axes, where the mesh has them."""
        split = [a if a in self.axes else "" for a in axes]
        return f"[{', '.join(f'{{{a}}}' for a in split)}]" if any(split) else None

    def parameter(self, key: str, shape: tuple[int, ...], init: str, *axes: str) -> Value:
        split = self.layout(*axes, *[""] * (len(shape) - len(axes)))
        x = self.f.parameter(key, shape, self.element, layout=split, init=init)
        return x.named(key.replace(".", "_"))

    def conv(
        self, key: str, x: Value, channels: int, kernel: int, stride: int = 1,
        axes: tuple[str, ...] = (),
    ) -> Value:  # fmt: skip
        init = f"normal, std = {sqrt(2 / (channels * kernel * kernel))!r}"
        shape, low = (channels, x.shape[1], kernel, kernel), kernel // 2
        weight = self.parameter(f"{key}.weight", shape, init, *axes)
        y = nn.conv(x, weight, stride=(stride, stride), padding=(low, low, low, low))
        return y.named(key.replace(".", "_"))

    def norm(self, key: str, x: Value, axis: str = "") -> Value:
        """Add a batch normalisation, and the new values of its running statistics."""
        name, shape = key.replace(".", "_"), x.shape[1:2]
        given = [
            self.parameter(f"{key}.{k}", shape, f"constant, value = {start}", axis)
            for k, start in (("weight", 1.0), ("bias", 0.0))
        ]
        statistics = {"running_mean": 0.0, "running_var": 1.0}
        for k, start in statistics.items():
            state = self.f.state(
                f"{key}.{k}", shape, self.element, layout=self.layout(axis),
                init=f"constant, value = {start}",
            )  # fmt: skip
            given.append(state.named(f"{name}_{k}"))
        y, *new = nn.batch_norm(x, *given, momentum=0.1, eps=1e-5)
        for k, value in zip(statistics, new, strict=True):
            self.f.update(f"{key}.{k}", value.named(name))
        return y.named(name)

    def relu(self, name: str, x: Value) -> Value:
        return nn.relu(x).named(name)

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
        return self.relu(name, (y + x).named(f"{name}_sum"))


def resnet(
    blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, batch: int = 256, image: int = 224,
    classes: int = 1000, rate: float = 0.1, element: str = "f32", **axes: int,
) -> str:  # fmt: skip
    """Return the program's text; `axes` are the sizes of dp, tp and sp."""
    axes = {name: n for name, n in axes.items() if name == "dp" or n > 1}
    m = Module(axes or None)
    f = m.function("loss", private=True)
    p = ResNet(f, element, axes)
    shape, high = (batch, 3, image, image), f"integers, low = 0, high = {classes}"
    x = f.input("x", shape, element, layout=p.layout("dp", "", "sp", ""), init="normal")
    labels = f.input("labels", (batch,), "i32", layout=p.layout("dp"), init=high)
    y = p.relu("relu", p.norm("bn1", p.conv("conv1", x, width, 7, 2)))
    pool = {"window": (3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1)}
    y = nn.max_pool(y, **pool).named("maxpool")
    for i, count in enumerate(blocks):
        for j in range(count):
            y = p.bottleneck(f"layer{i + 1}.{j}", y, width << i, 2 if i > 0 and j == 0 else 1)
    y = nn.adaptive_avg_pool(y, size=(1, 1)).named("avgpool")
    features = y.shape[1]
    y = y.reshape(batch, features).named("flat")
    bound = f"uniform, low = {-1 / sqrt(features)!r}, high = {1 / sqrt(features)!r}"
    weight = p.parameter("fc.weight", (classes, features), bound)
    bias = p.parameter("fc.bias", (classes,), bound)
    y = nn.einsum(y, weight, equation="bf,cf->bc").named("fc")
    y = (y + bias).named("logits")
    f.returns(nn.cross_entropy_loss(y, labels, reduction="mean").named("loss"))
    m.step("step", "loss", f"momentum, lr = {rate}, momentum = 0.9, weight_decay = 0.0001")
    return str(m)


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
