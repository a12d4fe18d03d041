"""Programs that the benchmarks compile: transformers of any depth, as text.

The block is that of the peers' benchmark (pre-norm, causal attention, gelu MLP; no biases in the
attention): weights and batch are annotated, Megatron style, and nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Text:
    """Lines of IR, with the types of the values remembered. `fsdp`: parameters are split over dp
    as well, along the first dimension that is whole."""

    fsdp: bool = False
    lines: list[str] = field(default_factory=list)
    types: dict[str, str] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)

    def argument(
        self, name: str, shape: list[int], axes: str, attrs: str, element: str = "f32"
    ) -> str:
        type = tensor(shape, element)
        laid = f"{type[:-1]}, #dist.layout<@m, [{axes}]>>"
        self.types[name] = laid
        self.arguments.append(f"%{name}: {laid} {{{attrs}}}")
        return name

    def op(self, name: str, text: str, operands: list[str], type: str) -> str:
        types = ", ".join(self.types[o] for o in operands)
        self.types[name] = type
        arrow = f" : ({types}) -> {type}" if operands else f" -> {type}"
        self.lines.append(f"  %{name} = {text}{arrow}")
        return name

    def parameter(self, name: str, shape: list[int], axes: str, init: str) -> str:
        if self.fsdp:
            axes = axes.replace("{}", "{dp}", 1)
        return self.argument(name, shape, axes, f'train.parameter = "{name}", train.init = {init}')

    def step(self, mesh: tuple[int, int], lr: float) -> str:
        """The module: a mesh <dp, tp>, a function that returns %loss, and its step."""
        arguments = ",\n    ".join(self.arguments)
        return (
            f"dist.mesh @m <dp = {mesh[0]}, tp = {mesh[1]}>\n\n"
            f"func.func private @loss(\n    {arguments}\n) -> tensor<f32> {{\n"
            + "\n".join(self.lines)
            + "\n  func.return %loss : tensor<f32>\n}\n\n"
            f"train.step @step of @loss <sgd, lr = {lr}>\n"
        )


def tensor(shape: list[int], element: str = "f32") -> str:
    return f"tensor<{'x'.join(map(str, [*shape, element]))}>"


NORMAL = "#train.init<normal, mean = 0.0, std = {:.6f}>"
ONES, ZEROS = (f"#train.init<constant, value = {v}>" for v in ("1.0", "0.0"))

Norm = Callable[[str, str], str]
"""Writes a norm of that name of a value; the name of the result."""


def blocks(
    t: Text, h: str, norm: Norm, *, layers: int, batch: int, seq: int, hidden: int, heads: int
) -> str:
    """Writes `layers` blocks behind the value `h`: causal attention without biases, then an MLP of
    4 `hidden` with gelu and biases, each behind a norm; weights are split over tp. The name of the
    last value, [batch, seq, hidden]."""
    act = tensor([batch, seq, hidden])
    head = hidden // heads
    split, turned = tensor([batch, seq, heads, head]), tensor([batch, heads, seq, head])
    scores = tensor([batch, heads, seq, seq])
    square = tensor([seq, seq], "i32")
    t.op("row", "nn.iota dim 0", [], square)
    t.op("column", "nn.iota dim 1", [], square)
    t.op("causal", "nn.compare <ge> %row, %column", ["row", "column"], tensor([seq, seq], "i1"))
    for n, v in (("scale", head**-0.5), ("low", -1e9)):
        t.op(n, f"nn.constant dense<{v!r}> : tensor<f32>", [], "tensor<f32>")
    for i in range(layers):
        n = norm(f"l{i}_ln1", h)
        qkv = []
        for part in "qkv":
            w = t.parameter(
                f"l{i}_w{part}", [hidden, hidden], "{}, {tp}", NORMAL.format(hidden**-0.5)
            )
            p = t.op(f"l{i}_{part}", f"nn.matmul %{n}, %{w}", [n, w], act)
            p = t.op(f"l{i}_{part}_split", f"nn.reshape %{p}", [p], split)
            qkv.append(t.op(
                f"l{i}_{part}_heads", f"nn.transpose %{p} perm <0, 2, 1, 3>", [p], turned
            ))  # fmt: skip
        q, k, v = qkv
        s = t.op(f"l{i}_qk", f'nn.einsum "bhtd,bhsd->bhts" %{q}, %{k}', [q, k], scores)
        s = t.op(f"l{i}_scaled", f"nn.mul %{s}, %scale", [s, "scale"], scores)
        s = t.op(f"l{i}_masked", f"nn.select %causal, %{s}, %low", ["causal", s, "low"], scores)
        a = t.op(f"l{i}_attn", f"nn.softmax %{s} axis 3", [s], scores)
        o = t.op(f"l{i}_mix", f"nn.matmul %{a}, %{v}", [a, v], turned)
        o = t.op(f"l{i}_back", f"nn.transpose %{o} perm <0, 2, 1, 3>", [o], split)
        o = t.op(f"l{i}_merged", f"nn.reshape %{o}", [o], act)
        w = t.parameter(f"l{i}_wo", [hidden, hidden], "{tp}, {}", NORMAL.format(hidden**-0.5))
        o = t.op(f"l{i}_out", f"nn.matmul %{o}, %{w}", [o, w], act)
        h = t.op(f"l{i}_mid", f"nn.add %{h}, %{o}", [h, o], act)
        n = norm(f"l{i}_ln2", h)
        wide = tensor([batch, seq, 4 * hidden])
        w = t.parameter(f"l{i}_fc1", [hidden, 4 * hidden], "{}, {tp}", NORMAL.format(hidden**-0.5))
        b = t.parameter(f"l{i}_b1", [4 * hidden], "{tp}", ZEROS)
        f = t.op(f"l{i}_up", f"nn.matmul %{n}, %{w}", [n, w], wide)
        f = t.op(f"l{i}_up_b", f"nn.add %{f}, %{b}", [f, b], wide)
        f = t.op(f"l{i}_gelu", f"nn.gelu %{f}", [f], wide)
        w = t.parameter(
            f"l{i}_fc2", [4 * hidden, hidden], "{tp}, {}", NORMAL.format(hidden**-0.5 / 2)
        )
        b = t.parameter(f"l{i}_b2", [hidden], "{}", ZEROS)
        f = t.op(f"l{i}_down", f"nn.matmul %{f}, %{w}", [f, w], act)
        f = t.op(f"l{i}_down_b", f"nn.add %{f}, %{b}", [f, b], act)
        h = t.op(f"l{i}_h", f"nn.add %{h}, %{f}", [h, f], act)
    return h


def transformer(
    *,
    layers: int,
    batch: int = 8,
    seq: int = 64,
    hidden: int = 256,
    heads: int = 8,
    mesh: tuple[int, int] = (2, 2),
    lr: float = 0.1,
) -> str:
    """A train step of `layers` blocks and a final norm, loss mean((y - target)^2), SGD.

    Arguments x and target are [batch, seq, hidden], split over dp; weights are split over tp as
    Megatron does.
    """
    t = Text()
    act = tensor([batch, seq, hidden])
    for name in ("x", "target"):
        attrs = "train.input = " + NORMAL.format(1)
        t.argument(name, [batch, seq, hidden], "{dp}, {}, {}", attrs)

    def norm(name: str, x: str) -> str:
        w = t.parameter(f"{name}_w", [hidden], "{}", ONES)
        b = t.parameter(f"{name}_b", [hidden], "{}", ZEROS)
        return t.op(name, f"nn.layer_norm %{x}, %{w}, %{b} eps 1.0e-05", [x, w, b], act)

    sizes = {"layers": layers, "batch": batch, "seq": seq, "hidden": hidden, "heads": heads}
    y = norm("lnf", blocks(t, "x", norm, **sizes))
    e = t.op("error", f"nn.sub %{y}, %target", [y, "target"], act)
    e = t.op("squared", f"nn.mul %{e}, %{e}", [e, e], act)
    t.op("loss", f"nn.reduce <mean> %{e} dims <0, 1, 2>", [e], "tensor<f32>")
    return t.step(mesh, lr)


def gpt(
    *,
    layers: int,
    batch: int = 8,
    seq: int = 128,
    hidden: int = 256,
    heads: int = 8,
    vocab: int = 1024,
    mesh: tuple[int, int] = (2, 4),
    lr: float = 0.01,
    fsdp: bool = False,
) -> str:
    """A train step of a language model: tokens and positions embedded, `layers` blocks, a final
    norm, and the embedding's table again as the output head; cross entropy, SGD. Norms have a
    scale only.

    Tokens and targets are [batch, seq], split over dp; the table [vocab, hidden] is split by rows
    over tp, the blocks as Megatron does. `fsdp`: each parameter is also split over dp.
    """
    t = Text(fsdp)
    act = tensor([batch, seq, hidden])
    for name in ("tokens", "targets"):
        attrs = f"train.input = #train.init<integers, low = 0, high = {vocab}>"
        t.argument(name, [batch, seq], "{dp}, {}", attrs, "i32")
    table = t.parameter("wte", [vocab, hidden], "{tp}, {}", NORMAL.format(0.02))
    positions = t.parameter("wpe", [seq, hidden], "{}, {}", NORMAL.format(0.02))
    row = tensor([hidden])
    t.op("no_bias", f"nn.constant dense<0.0> : {row}", [], row)

    def norm(name: str, x: str) -> str:
        w = t.parameter(f"{name}_w", [hidden], "{}", ONES)
        operands = [x, w, "no_bias"]
        return t.op(name, f"nn.layer_norm %{x}, %{w}, %no_bias eps 1.0e-05", operands, act)

    e = t.op("embedded", f"nn.gather %{table}, %tokens axis 0", [table, "tokens"], act)
    e = t.op("placed", f"nn.add %{e}, %{positions}", [e, positions], act)
    sizes = {"layers": layers, "batch": batch, "seq": seq, "hidden": hidden, "heads": heads}
    y = norm("lnf", blocks(t, e, norm, **sizes))
    wide = tensor([batch, seq, vocab])
    y = t.op("logits", f'nn.einsum "bsd,vd->bsv" %{y}, %{table}', [y, table], wide)
    y = t.op("losses", f"nn.cross_entropy %{y}, %targets", [y, "targets"], tensor([batch, seq]))
    t.op("loss", f"nn.reduce <mean> %{y} dims <0, 1>", [y], "tensor<f32>")
    return t.step(mesh, lr)


OPS_PER_LAYER = 26
"""Of the block above, norms and parameters included; a little more with its neighbours."""
