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

from writing import Program, Value

SIZES = {
    "2.6B": {"layers": 32, "width": 2560, "heads": 40},
    "13.1B": {"layers": 40, "width": 5120, "heads": 40},
    "207B": {"layers": 64, "width": 16384, "heads": 128},
}
"""The published configurations, by their numbers of parameters. All have 4 * width hidden columns,
sequences of 1,024 tokens, and 40,000 words."""

ONE, ZERO = "constant, value = 1.0", "constant, value = 0.0"


class Transformer(Program):
    """The layers of a Transformer of a width, as a program."""

    def __init__(self, width: int, heads: int, axes: dict[str, int], cluster: str):
        super().__init__("f32", axes, cluster)
        self.width, self.heads = width, heads

    def parameter(self, key: str, *shape: int, init: str = "normal, std = 0.02") -> Value:
        return self.argument(key, shape, "parameter", init)

    def norm(self, key: str, name: str, x: Value) -> Value:
        scale = self.parameter(f"{key}.weight", self.width, init=ONE)
        bias = self.parameter(f"{key}.bias", self.width, init=ZERO)
        return self.op(name, "layer_norm {} eps 1.0e-05", [x, scale, bias], x.shape)

    def layer(self, key: str, x: Value, asks: Callable[[], Value] | None = None) -> Value:
        """Add an attention and an MLP, each after a norm and with a residual connection.

        Queries are of the result of `asks` (by default of x), keys and values of x."""
        name, width, depth = key.replace(".", "_"), self.width, self.width // self.heads
        split = (x.shape[0], self.heads, x.shape[1], depth)
        normed = self.norm(f"{key}.ln1", f"{name}_a", x)
        asking = normed if asks is None else asks()
        q, k, v = (
            self.op(f"{name}_{part}", 'einsum "bse,ehd->bhsd" {}', [
                of, self.parameter(f"{key}.w{part}", width, self.heads, depth)
            ], split)
            for part, of in (("q", asking), ("k", normed), ("v", normed))
        )  # fmt: skip
        seen = self.op(f"{name}_context", "attention {} causal", [q, k, v], split)
        out = self.parameter(f"{key}.wo", self.heads, depth, width)
        y = self.op(f"{name}_attended", 'einsum "bhsd,hde->bse" {}', [seen, out], x.shape)
        x = self.op(f"{name}_mid", "add {}", [x, y], x.shape)
        y = self.norm(f"{key}.ln2", f"{name}_f", x)
        y = self.dense(f"{key}.up", y, 4 * width)
        y = self.dense(f"{key}.down", self.op(f"{name}_gelu", "gelu {}", [y], y.shape), width)
        return self.op(f"{name}_out", "add {}", [x, y], x.shape)

    def dense(self, key: str, x: Value, columns: int) -> Value:
        """Add a product and a bias."""
        name, shape = key.replace(".", "_"), (*x.shape[:-1], columns)
        w = self.parameter(f"{key}.weight", x.shape[-1], columns)
        y = self.op(f"{name}_product", "matmul {}", [x, w], shape)
        b = self.parameter(f"{key}.bias", columns, init=ZERO)
        return self.op(f"{name}_sum", "add {}", [y, b], shape)


def pangu(
    *, layers: int = 32, width: int = 2560, heads: int = 40, seq: int = 1024, vocab: int = 40_000,
    batch: int = 512, rate: float = 1e-4, mesh: dict[str, int] | None = None, cluster: str = "",
) -> str:  # fmt: skip
    """Return the program's text."""
    p = Transformer(width, heads, mesh or {}, cluster)

    def indices(name: str, high: int) -> Value:
        init = f"integers, low = 0, high = {high}"
        return p.argument(name, (batch, seq), "input", init, element="i32")

    tokens, places, targets = (
        indices(name, n) for name, n in (("tokens", vocab), ("places", seq), ("targets", vocab))
    )
    act = (batch, seq, width)
    table, positions = p.parameter("table", vocab, width), p.parameter("positions", seq, width)
    words = p.op("words", "gather {} axis 0", [table, tokens], act)
    placed = p.op("placed", "gather {} axis 0", [positions, places], act)
    x = p.op("x", "add {}", [words, placed], act)
    for i in range(layers - 1):
        x = p.layer(f"l{i}", x)
    x = p.norm("norm", "y", x)
    following = p.parameter("next", seq, width)
    x = p.layer("query", x, lambda: p.op("asks", "gather {} axis 0", [following, places], act))
    logits = p.op("logits", 'einsum "bse,ve->bsv" {}', [x, table], (batch, seq, vocab))
    loss = p.op("loss", "cross_entropy_loss <mean> {}", [logits, targets], ())
    return p.text(loss, f"adam, lr = {rate}, beta1 = 0.9, beta2 = 0.95")


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
