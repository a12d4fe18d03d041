"""Write PanGu-alpha (Zeng et al., 2021) and its training step as a program, without annotations.

    python docs/examples/make_pangu.py 207B --mesh a=64,b=4,c=8 --cluster pod2048 > pangu.ir
    python docs/examples/make_pangu.py --layers 2 --width 64 --heads 4 --batch 8 > narrow.ir

Causal Pre-LN layers, a norm, and a query layer, which is the last of `layers`: its queries are of
the embedding of the position whose token is predicted. The table of words is the output head too.
Parameters and Adam's states are f32; products are in f16 with the pass `mixed-precision`, as the
model was trained. pangu_alpha.ir is a small version of it, and explains it.

There is no dropout, and attention has no biases.
"""

import argparse
from collections.abc import Callable

from shardir.build import Module, nn
from shardir.build.function import FunctionBuilder
from shardir.build.values import Value

SIZES = {
    "2.6B": {"layers": 32, "width": 2560, "heads": 40},
    "13.1B": {"layers": 40, "width": 5120, "heads": 40},
    "207B": {"layers": 64, "width": 16384, "heads": 128},
}
"""The published configurations, by their numbers of parameters. All have 4 * width hidden columns,
sequences of 1,024 tokens, and 40,000 words."""

ONE, ZERO = "constant, value = 1.0", "constant, value = 0.0"


class Transformer:
    """The layers of a Transformer of a width, in a function. A value has the name of its key in the
    parameters, with _ in place of dots."""

    def __init__(self, f: FunctionBuilder, width: int, heads: int):
        self.f, self.width, self.heads = f, width, heads

    def parameter(self, key: str, *shape: int, init: str = "normal, std = 0.02") -> Value:
        return self.f.parameter(key, shape, init=init).named(key.replace(".", "_"))

    def norm(self, key: str, name: str, x: Value) -> Value:
        scale = self.parameter(f"{key}.weight", self.width, init=ONE)
        bias = self.parameter(f"{key}.bias", self.width, init=ZERO)
        return nn.layer_norm(x, scale, bias, eps=1e-5).named(name)

    def layer(self, key: str, x: Value, asks: Callable[[], Value] | None = None) -> Value:
        """Add an attention and an MLP, each after a norm and with a residual connection.

        Queries are of the result of `asks` (by default of x), keys and values of x."""
        name, width, depth = key.replace(".", "_"), self.width, self.width // self.heads
        normed = self.norm(f"{key}.ln1", f"{name}_a", x)
        asking = normed if asks is None else asks()
        q, k, v = (
            nn.einsum(
                of, self.parameter(f"{key}.w{part}", width, self.heads, depth),
                equation="bse,ehd->bhsd",
            ).named(f"{name}_{part}")
            for part, of in (("q", asking), ("k", normed), ("v", normed))
        )  # fmt: skip
        seen = nn.attention(q, k, v, causal=True).named(f"{name}_context")
        out = self.parameter(f"{key}.wo", self.heads, depth, width)
        y = nn.einsum(seen, out, equation="bhsd,hde->bse").named(f"{name}_attended")
        x = (x + y).named(f"{name}_mid")
        y = self.norm(f"{key}.ln2", f"{name}_f", x)
        y = self.dense(f"{key}.up", y, 4 * width)
        y = self.dense(f"{key}.down", nn.gelu(y).named(f"{name}_gelu"), width)
        return (x + y).named(f"{name}_out")

    def dense(self, key: str, x: Value, columns: int) -> Value:
        """Add a product and a bias."""
        name = key.replace(".", "_")
        w = self.parameter(f"{key}.weight", x.shape[-1], columns)
        y = (x @ w).named(f"{name}_product")
        return (y + self.parameter(f"{key}.bias", columns, init=ZERO)).named(f"{name}_sum")


def pangu(
    *, layers: int = 32, width: int = 2560, heads: int = 40, seq: int = 1024, vocab: int = 40_000,
    batch: int = 512, rate: float = 1e-4, mesh: dict[str, int] | None = None, cluster: str = "",
) -> str:  # fmt: skip
    """Return the program's text."""
    split = {name: n for name, n in (mesh or {}).items() if n > 1}
    m = Module(split or None, cluster if split and cluster else None)
    f = m.function("loss", private=True)
    p = Transformer(f, width, heads)
    tokens, places, targets = (
        f.input(name, (batch, seq), "i32", init=f"integers, low = 0, high = {n}")
        for name, n in (("tokens", vocab), ("places", seq), ("targets", vocab))
    )
    table, positions = p.parameter("table", vocab, width), p.parameter("positions", seq, width)
    words = nn.gather(table, tokens, axis=0).named("words")
    x = (words + nn.gather(positions, places, axis=0).named("placed")).named("x")
    for i in range(layers - 1):
        x = p.layer(f"l{i}", x)
    x = p.norm("norm", "y", x)
    following = p.parameter("next", seq, width)
    x = p.layer("query", x, lambda: nn.gather(following, places, axis=0).named("asks"))
    logits = nn.einsum(x, table, equation="bse,ve->bsv").named("logits")
    f.returns(nn.cross_entropy_loss(logits, targets, reduction="mean").named("loss"))
    m.step("step", "loss", f"adam, lr = {rate}, beta1 = 0.9, beta2 = 0.95")
    return str(m)


def axes(text: str) -> dict[str, int]:
    return {name: int(n) for name, n in (part.split("=") for part in text.split(","))}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write PanGu-alpha's training step as a program.")
    parser.add_argument("size", nargs="?", choices=list(SIZES), help="a published configuration")
    parser.add_argument("--layers", type=int, help="layers, with the query layer (32)")
    parser.add_argument("--width", type=int, help="columns of an activation (2560)")
    parser.add_argument("--heads", type=int, help="heads of an attention (40)")
    parser.add_argument("--batch", type=int, default=512, help="samples of all devices (512)")
    parser.add_argument("--seq", type=int, default=1024, help="tokens per sample (1024)")
    parser.add_argument("--vocab", type=int, default=40_000, help="words of the table (40000)")
    parser.add_argument("--mesh", type=axes, metavar="a=8,b=8", help="names and sizes of its axes")
    parser.add_argument("--cluster", default="", help="a ready-made cluster for the mesh")
    given = vars(parser.parse_args())
    sizes = SIZES.get(given.pop("size"), {})
    given = {k: v for k, v in given.items() if v is not None}
    print(pangu(**{**sizes, **given}), end="")


if __name__ == "__main__":
    main()
