"""Networks of images and of tables in plain torch.nn, as its users and its examples write them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from architectures.architecture import (
    BATCH,
    CLASSES,
    HIDDEN,
    VOCABULARY,
    Architecture,
    Example,
    classes,
    images,
)


class Mnist(nn.Module):
    """The net of torch's MNIST example, narrower, and without its dropout."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.fc1 = nn.Linear(16 * 6 * 6, 32)
        self.fc2 = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def vgg() -> nn.Sequential:
    """Convolutions with biases and ReLU in place, as in torchvision's VGG; a batch normalisation
    after them would leave the biases without a gradient."""
    layers: list[nn.Module] = []
    width = 3
    for channels in (16, 32):
        conv = nn.Conv2d(width, channels, 3, padding=1)
        layers += [conv, nn.ReLU(inplace=True), nn.MaxPool2d(2, 2)]
        width = channels
    layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, CLASSES)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A U-Net of two levels, that goes up by a transposed convolution and by interpolation."""

    def __init__(self):
        super().__init__()
        self.down0, self.down1, self.down2 = self.pair(3, 8), self.pair(8, 16), self.pair(16, 32)
        self.up1 = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.up0 = nn.Sequential(
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), nn.Conv2d(16, 8, 1)
        )
        self.join1, self.join0 = self.pair(32, 16), self.pair(16, 8)
        self.head = nn.Conv2d(8, CLASSES, 1)

    @staticmethod
    def pair(width: int, channels: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(width, channels, 3, padding=1, bias=False),
            nn.GroupNorm(4, channels),
            nn.SiLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        x0 = self.down0(x)
        x1 = self.down1(F.max_pool2d(x0, 2))
        x2 = self.down2(F.avg_pool2d(x1, 2))
        x1 = self.join1(torch.cat([x1, self.up1(x2)], dim=1))
        return self.head(self.join0(torch.cat([x0, self.up0(x1)], dim=1)))


class Mixer(nn.Module):
    """An MLP-Mixer: a layer over the patches, then one over the channels, twice."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, HIDDEN, 4, stride=4)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(4))
        self.mixers = nn.ModuleList(self.mlp(width) for width in (16, HIDDEN) * 2)
        self.head = nn.Linear(HIDDEN, CLASSES)

    @staticmethod
    def mlp(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for i, (norm, mixer) in enumerate(zip(self.norms, self.mixers, strict=True)):
            y = norm(x)
            x = x + (mixer(y) if i % 2 else mixer(y.mT).mT)
        return self.head(x.mean(dim=1))


class Dlrm(nn.Module):
    """A recommendation model: bags of embeddings, their products with each other, and MLPs."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(VOCABULARY, 16, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(16 + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, bags: list[Tensor]) -> Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x, *(t(bag) for t, bag in zip(self.tables, bags, strict=True))], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, offset=-1)
        return self.top(torch.cat([x, products[:, rows, columns]], dim=1)).squeeze(-1)


class Dlrm2(Dlrm):
    """The same with one index a table, as most of its data sets have."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(VOCABULARY, 16) for _ in range(3))


class Vae(nn.Module):
    """torch's example of a variational autoencoder, with its noise as an input."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(64, HIDDEN)
        self.mean, self.variance = nn.Linear(HIDDEN, 8), nn.Linear(HIDDEN, 8)
        self.decoder = nn.Sequential(
            nn.Linear(8, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 64), nn.Sigmoid()
        )

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.encoder(x.view(-1, 64)))
        mean, variance = self.mean(hidden), self.variance(hidden)
        return self.decoder(mean + noise * torch.exp(0.5 * variance)), mean, variance


def vae_loss(outputs: tuple[Tensor, Tensor, Tensor], labels: Tensor) -> Tensor:
    images, mean, variance = outputs
    likelihood = F.binary_cross_entropy(images, labels.view(-1, 64), reduction="sum")
    return likelihood - 0.5 * torch.sum(1 + variance - mean.pow(2) - variance.exp())


def generator() -> nn.Sequential:
    """DCGAN's generator."""
    layers: list[nn.Module] = []
    for width, channels in ((16, 32), (32, 16)):
        first = width == 16
        convolution = nn.ConvTranspose2d(
            width, channels, 4, 1 if first else 2, 0 if first else 1, bias=False
        )
        layers += [convolution, nn.BatchNorm2d(channels), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh())


class Discriminator(nn.Module):
    """DCGAN's discriminator with its loss on both halves of the batch."""

    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, 16, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 32, 4, 2, 1, bias=False),
            nn.BatchNorm2d(32),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(32, 1, 4, 1, 0, bias=False),
        )

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        real, fake = (self.main(x).flatten() for x in (real, fake))
        return F.binary_cross_entropy_with_logits(real, torch.ones_like(real)) + (
            F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))
        )


def classifier(module: nn.Module, channels: int = 3) -> Example:
    return Example(module, (torch.randn(BATCH, channels, 16, 16),), {}, classes())


def segmentation() -> Example:
    return Example(UNet(), (images(16),), {}, torch.randint(CLASSES, (BATCH, 16, 16)))


def recommendation(module: nn.Module, *bag: int) -> Example:
    indices = [torch.randint(VOCABULARY, (BATCH, *bag)) for _ in range(3)]
    return Example(module, (torch.randn(BATCH, 8), indices), {}, torch.rand(BATCH).round())


def autoencoder() -> Example:
    pixels = torch.rand(BATCH, 1, 8, 8)
    return Example(Vae(), (pixels, torch.randn(BATCH, 8)), {}, pixels)


NETWORKS = (
    Architecture("MNIST", lambda: classifier(Mnist(), channels=1), F.nll_loss),
    Architecture("VGG", lambda: classifier(vgg()), F.cross_entropy),
    Architecture("U-Net", segmentation, F.cross_entropy),
    Architecture("MLP-Mixer", lambda: classifier(Mixer()), F.cross_entropy),
    Architecture("DLRM", lambda: recommendation(Dlrm2()), F.binary_cross_entropy_with_logits),
    Architecture(
        "DLRM, bags", lambda: recommendation(Dlrm(), 4), F.binary_cross_entropy_with_logits
    ),
    Architecture("VAE", autoencoder, vae_loss),
    Architecture(
        "DCGAN, generator",
        lambda: Example(generator(), (torch.randn(BATCH, 16, 1, 1),), {}, images(16)),
        F.mse_loss,
    ),
    Architecture(
        "DCGAN, discriminator", lambda: Example(Discriminator(), (images(16), images(16)), {})
    ),
)
