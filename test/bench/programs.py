"""Programs of the benchmarks, of any size, as text: transformers, MLPs, recurrences, DLRM, and
those of the scripts in docs/examples.

Only weights and the batch are annotated, those of transformers as Megatron splits them. PanGu-alpha
has no annotations.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise

from bench.program_text import NORMAL, ONES, ZEROS, Text, tensor
from shardir.build import Module, nn

resnet = import_module("make_resnet").resnet
make_pangu = import_module("make_pangu")
pangu, PANGU = make_pangu.pangu, make_pangu.SIZES


@dataclass(frozen=True)
class Block:
    """The sizes of a transformer's blocks: attention, then an MLP of 4 * `hidden` with gelu and
    biases; weights are split over tp. `biases`: the attention's products have biases too."""

    layers: int
    batch: int
    seq: int
    hidden: int
    heads: int
    biases: bool = False

    @property
    def act(self) -> str:
        return tensor([self.batch, self.seq, self.hidden])

    def product(
        self, t: Text, name: str, x: str, weight: str, sizes: list[int], axes: str, *,
        scale: float = 1.0, bias: str | None = None, named: str = "",
    ) -> str:  # fmt: skip
        """Add x @ weight, and the bias of a name."""
        w = t.parameter(weight, sizes, axes, NORMAL.format(self.hidden**-0.5 * scale))
        type = tensor([self.batch, self.seq, sizes[1]])
        y = t.op(name, f"nn.matmul %{x}, %{w}", [x, w], type)
        if bias is None:
            return y
        b = t.parameter(bias, sizes[1:], axes.split(", ")[1], ZEROS)
        return t.op(f"{name}_b", f"nn.add %{y}, %{b}", [y, b], type)

    def constants(self, t: Text) -> None:
        for n, v in (("scale", (self.hidden // self.heads) ** -0.5), ("low", -1e9)):
            t.op(n, f"nn.constant dense<{v!r}> : tensor<f32>", [], "tensor<f32>")

    def causal(self, t: Text) -> str:
        square = tensor([self.seq, self.seq], "i32")
        t.op("row", "nn.iota dim 0", [], square)
        t.op("column", "nn.iota dim 1", [], square)
        type = tensor([self.seq, self.seq], "i1")
        return t.op("causal", "nn.compare <ge> %row, %column", ["row", "column"], type)

    def attention(self, t: Text, i: int, x: str, counts: str) -> str:
        """Add the attention of layer i; `counts` is the mask of its keys."""
        batch, seq, hidden, heads = self.batch, self.seq, self.hidden, self.heads
        split = tensor([batch, seq, heads, hidden // heads])
        turned = tensor([batch, heads, seq, hidden // heads])
        scores = tensor([batch, heads, seq, seq])
        square, qkv = [hidden, hidden], []
        for part in "qkv":
            bias = f"l{i}_b{part}" if self.biases else None
            p = self.product(t, f"l{i}_{part}", x, f"l{i}_w{part}", square, "{}, {tp}", bias=bias)
            p = t.op(f"l{i}_{part}_split", f"nn.reshape %{p}", [p], split)
            qkv.append(t.op(
                f"l{i}_{part}_heads", f"nn.transpose %{p} perm <0, 2, 1, 3>", [p], turned
            ))  # fmt: skip
        q, k, v = qkv
        s = t.op(f"l{i}_qk", f'nn.einsum "bhtd,bhsd->bhts" %{q}, %{k}', [q, k], scores)
        s = t.op(f"l{i}_scaled", f"nn.mul %{s}, %scale", [s, "scale"], scores)
        s = t.op(f"l{i}_masked", f"nn.select %{counts}, %{s}, %low", [counts, s, "low"], scores)
        a = t.op(f"l{i}_attn", f"nn.softmax %{s} axis 3", [s], scores)
        o = t.op(f"l{i}_mix", f"nn.matmul %{a}, %{v}", [a, v], turned)
        o = t.op(f"l{i}_back", f"nn.transpose %{o} perm <0, 2, 1, 3>", [o], split)
        o = t.op(f"l{i}_merged", f"nn.reshape %{o}", [o], self.act)
        bias = f"l{i}_bo" if self.biases else None
        return self.product(t, f"l{i}_out", o, f"l{i}_wo", square, "{tp}, {}", bias=bias)

    def mlp(self, t: Text, i: int, x: str) -> str:
        wide = 4 * self.hidden
        up, down = [self.hidden, wide], [wide, self.hidden]
        f = self.product(t, f"l{i}_up", x, f"l{i}_fc1", up, "{}, {tp}", bias=f"l{i}_b1")
        f = t.op(f"l{i}_gelu", f"nn.gelu %{f}", [f], tensor([self.batch, self.seq, wide]))
        return self.product(
            t, f"l{i}_down", f, f"l{i}_fc2", down, "{tp}, {}", scale=0.5, bias=f"l{i}_b2"
        )

    def pre_norm(self, t: Text, h: str, norm: "Norm") -> str:
        """Add the layers after the value `h`, each half after a norm and with a residual edge;
        return the name of the last value, [batch, seq, hidden]."""
        counts = self.causal(t)
        self.constants(t)
        for i in range(self.layers):
            o = self.attention(t, i, norm(f"l{i}_ln1", h), counts)
            h = t.op(f"l{i}_mid", f"nn.add %{h}, %{o}", [h, o], self.act)
            f = self.mlp(t, i, norm(f"l{i}_ln2", h))
            h = t.op(f"l{i}_h", f"nn.add %{h}, %{f}", [h, f], self.act)
        return h

    def post_norm(self, t: Text, h: str, norm: "Norm", counts: str) -> str:
        """Add the same with the norms after the sums."""
        self.constants(t)
        for i in range(self.layers):
            o = self.attention(t, i, h, counts)
            h = norm(f"l{i}_ln1", t.op(f"l{i}_mid", f"nn.add %{h}, %{o}", [h, o], self.act))
            f = self.mlp(t, i, h)
            h = norm(f"l{i}_ln2", t.op(f"l{i}_h", f"nn.add %{h}, %{f}", [h, f], self.act))
        return h


Norm = Callable[[str, str], str]
"""Adds a norm of a name of a value; returns the name of the result."""


def layer_norm(t: Text, type: str, hidden: int) -> Norm:
    """Return norms with a scale and a bias."""

    def norm(name: str, x: str) -> str:
        w = t.parameter(f"{name}_w", [hidden], "{}", ONES)
        b = t.parameter(f"{name}_b", [hidden], "{}", ZEROS)
        return t.op(name, f"nn.layer_norm %{x}, %{w}, %{b} eps 1.0e-05", [x, w, b], type)

    return norm


def transformer(
    *,
    layers: int,
    batch: int = 8,
    seq: int = 64,
    hidden: int = 256,
    heads: int = 8,
    mesh: tuple[int, int] = (2, 2),
    lr: float = 0.1,
    fsdp: bool = False,
    layouts: Mapping[str, str] | None = None,
) -> str:
    """A train step of `layers` blocks and a final norm, loss mean((y - target)^2), SGD.

    Arguments x and target are [batch, seq, hidden], split over dp; weights are split over tp as
    Megatron does, or as `layouts` say. `fsdp`: each parameter is also split over dp.
    """
    t = Text(dict(zip(("dp", "tp"), mesh, strict=True)), fsdp, layouts or {})
    block = Block(layers, batch, seq, hidden, heads)
    for name in ("x", "target"):
        attrs = "train.input = " + NORMAL.format(1)
        t.argument(name, [batch, seq, hidden], "{dp}, {}, {}", attrs)
    norm = layer_norm(t, block.act, hidden)
    y = norm("lnf", block.pre_norm(t, "x", norm))
    t.squared_error(y, [batch, seq, hidden])
    return t.step(lr)


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
    optimizer: str = "sgd",
) -> str:
    """A train step of a language model: tokens and positions embedded, `layers` blocks, a final
    norm, and the embedding's table again as the output head; cross entropy. Norms have a scale
    only.

    Tokens and targets are [batch, seq], split over dp; the table [vocab, hidden] is split by rows
    over tp, the blocks as Megatron does. `fsdp`: each parameter is also split over dp.
    """
    t = Text(dict(zip(("dp", "tp"), mesh, strict=True)), fsdp)
    block = Block(layers, batch, seq, hidden, heads)
    for name in ("tokens", "targets"):
        t.indices(name, [batch, seq], "{dp}, {}", vocab)
    table = t.parameter("wte", [vocab, hidden], "{tp}, {}", NORMAL.format(0.02))
    positions = t.parameter("wpe", [seq, hidden], "{}, {}", NORMAL.format(0.02))
    row = tensor([hidden])
    t.op("no_bias", f"nn.constant dense<0.0> : {row}", [], row)

    def norm(name: str, x: str) -> str:
        w = t.parameter(f"{name}_w", [hidden], "{}", ONES)
        operands = [x, w, "no_bias"]
        return t.op(name, f"nn.layer_norm %{x}, %{w}, %no_bias eps 1.0e-05", operands, block.act)

    e = t.op("embedded", f"nn.gather %{table}, %tokens axis 0", [table, "tokens"], block.act)
    e = t.op("placed", f"nn.add %{e}, %{positions}", [e, positions], block.act)
    y = norm("lnf", block.pre_norm(t, e, norm))
    wide = tensor([batch, seq, vocab])
    y = t.op("logits", f'nn.einsum "bsd,vd->bsv" %{y}, %{table}', [y, table], wide)
    y = t.op("losses", f"nn.cross_entropy %{y}, %targets", [y, "targets"], tensor([batch, seq]))
    t.op("loss", f"nn.reduce <mean> %{y} dims <0, 1>", [y], "tensor<f32>")
    return t.step(lr, optimizer)


def bert(
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
    """A train step of BERT (Devlin et al., 2019) on masked tokens: the sum of the embeddings of
    tokens, segments and positions, a norm, `layers` Post-LN blocks in which keys after a sample's
    end are masked out, and the head, a product, gelu, a norm and the tokens' table with a bias; the
    mean cross entropy over the masked positions, SGD.

    Tokens, segments, labels and lengths are split over dp; the table [vocab, hidden] and the head's
    bias over tp, the blocks as Megatron does. `fsdp`: each parameter is also split over dp.
    """
    t = Text(dict(zip(("dp", "tp"), mesh, strict=True)), fsdp)
    block = Block(layers, batch, seq, hidden, heads, biases=True)
    t.indices("tokens", [batch, seq], "{dp}, {}", vocab)
    t.indices("segments", [batch, seq], "{dp}, {}", 2)
    t.indices("lengths", [batch], "{dp}", seq + 1, low=seq // 2)
    t.indices("masked", [batch, seq], "{dp}, {}", vocab, low=-vocab)
    norm = layer_norm(t, block.act, hidden)
    table = t.parameter("words", [vocab, hidden], "{tp}, {}", NORMAL.format(0.02))
    sides = t.parameter("sides", [2, hidden], "{}, {}", NORMAL.format(0.02))
    places = t.parameter("places", [seq, hidden], "{}, {}", NORMAL.format(0.02))
    e = t.op("embedded", f"nn.gather %{table}, %tokens axis 0", [table, "tokens"], block.act)
    s = t.op("sided", f"nn.gather %{sides}, %segments axis 0", [sides, "segments"], block.act)
    e = t.op("both", f"nn.add %{e}, %{s}", [e, s], block.act)
    e = t.op("placed", f"nn.add %{e}, %{places}", [e, places], block.act)
    key = tensor([batch, 1, 1, seq], "i32")
    t.op("key", "nn.iota dim 3", [], key)
    t.op("ends", "nn.reshape %lengths", ["lengths"], tensor([batch, 1, 1, 1], "i32"))
    type = tensor([batch, 1, 1, seq], "i1")
    counts = t.op("counts", "nn.compare <lt> %key, %ends", ["key", "ends"], type)
    y = block.post_norm(t, norm("lne", e), norm, counts)
    square = [hidden, hidden]
    y = block.product(t, "turned", y, "head", square, "{}, {}", bias="head_b")
    y = norm("lnh", t.op("turned_gelu", f"nn.gelu %{y}", [y], block.act))
    wide = tensor([batch, seq, vocab])
    y = t.op("products", f'nn.einsum "bsd,vd->bsv" %{y}, %{table}', [y, table], wide)
    b = t.parameter("words_b", [vocab], "{tp}", ZEROS)
    y = t.op("logits", f"nn.add %{y}, %{b}", [y, b], wide)
    t.op("none", "nn.constant dense<-1> : tensor<i32>", [], "tensor<i32>")
    type = tensor([batch, seq], "i32")
    labels = t.op("labels", "nn.max %masked, %none", ["masked", "none"], type)
    loss = f"nn.cross_entropy_loss <mean> %{y}, %{labels} ignore -1"
    t.op("loss", loss, [y, labels], "tensor<f32>")
    return t.step(lr)


def mlp(
    *,
    layers: int = 2,
    batch: int = 64,
    dim: int = 256,
    hidden: int = 1024,
    mesh: tuple[int, int] = (2, 4),
    lr: float = 0.01,
    layouts: Mapping[str, str] | None = None,
) -> str:
    """A train step of `layers` residual layers, x + gelu(x w1) w2, loss mean((x - y)^2), SGD.

    x and y are [batch, dim], split over dp; w1 by columns and w2 by rows over tp; or as `layouts`
    say.
    """
    t = Text(dict(zip(("dp", "tp"), mesh, strict=True)), layouts=layouts or {})
    act, wide = tensor([batch, dim]), tensor([batch, hidden])
    for name in ("x", "target"):
        t.argument(name, [batch, dim], "{dp}, {}", "train.input = " + NORMAL.format(1))
    x = "x"
    for i in range(layers):
        up = t.parameter(f"w1_{i}", [dim, hidden], "{}, {tp}", NORMAL.format(dim**-0.5))
        down = t.parameter(f"w2_{i}", [hidden, dim], "{tp}, {}", NORMAL.format(hidden**-0.5))
        h = t.op(f"up_{i}", f"nn.matmul %{x}, %{up}", [x, up], wide)
        h = t.op(f"gelu_{i}", f"nn.gelu %{h}", [h], wide)
        h = t.op(f"down_{i}", f"nn.matmul %{h}, %{down}", [h, down], act)
        x = t.op(f"x_{i}", f"nn.add %{x}, %{h}", [x, h], act)
    t.squared_error(x, [batch, dim])
    return t.step(lr)


def recurrent(
    *,
    steps: int,
    layers: int = 1,
    directions: int = 1,
    batch: int = 8,
    dim: int = 16,
    mesh: tuple[int, int] = (2, 2),
    lr: float = 0.1,
    layouts: Mapping[str, str] | None = None,
) -> str:
    """A train step of `layers` gated recurrences, h + z (tanh(x w + h u) - h) with the gate
    z = sigmoid(x v + h g), unrolled over `steps`; loss mean((h - y)^2) of the last step, SGD.

    x is [steps, batch, dim], with the batch split over dp; weights have the layouts of `layouts`.
    With two directions a second chain of each layer begins at the last step, and the layer's values
    are the sums of both.
    """
    t = Text(dict(zip(("dp", "tp"), mesh, strict=True)), layouts=layouts or {})
    act, one = tensor([batch, dim]), tensor([1, batch, dim])
    t.argument("x", [steps, batch, dim], "{}, {dp}, {}", "train.input = " + NORMAL.format(1))
    t.argument("start", [batch, dim], "{dp}, {}", "train.input = " + NORMAL.format(1))
    t.argument("target", [batch, dim], "{dp}, {}", "train.input = " + NORMAL.format(1))

    def chain(name: str, given: Mapping[int, str]) -> dict[int, str]:
        """Add a recurrence over values, in their order; return its value of each step."""
        w = {
            k: t.parameter(f"{name}_{k}", [dim, dim], "{}, {}", NORMAL.format(dim**-0.5))
            for k in "wuvg"
        }
        h, found = "start", dict[int, str]()
        for i, x in given.items():
            at, sums = f"{name}_{i}", list[str]()
            for p, q in ("wu", "vg"):
                a = t.op(f"{at}_{p}", f"nn.matmul %{x}, %{w[p]}", [x, w[p]], act)
                b = t.op(f"{at}_{q}", f"nn.matmul %{h}, %{w[q]}", [h, w[q]], act)
                sums.append(t.op(f"{at}_{p}{q}", f"nn.add %{a}, %{b}", [a, b], act))
            c = t.op(f"{at}_c", f"nn.tanh %{sums[0]}", [sums[0]], act)
            z = t.op(f"{at}_z", f"nn.sigmoid %{sums[1]}", [sums[1]], act)
            d = t.op(f"{at}_d", f"nn.sub %{c}, %{h}", [c, h], act)
            d = t.op(f"{at}_zd", f"nn.mul %{z}, %{d}", [z, d], act)
            h = found[i] = t.op(f"{at}_h", f"nn.add %{h}, %{d}", [h, d], act)
        return found

    values = dict[int, str]()
    for i in range(steps):
        limits = f"starts <{i}, 0, 0> limits <{i + 1}, {batch}, {dim}> strides <1, 1, 1>"
        part = t.op(f"part_{i}", f"nn.slice %x {limits}", ["x"], one)
        values[i] = t.op(f"x_{i}", f"nn.reshape %{part}", [part], act)
    for layer in range(layers):
        ahead = chain(f"l{layer}", values)
        if directions == 2:
            back = chain(f"r{layer}", dict(reversed(values.items())))
            pairs = [(ahead[i], back[i]) for i in values]
            ahead = {
                i: t.op(f"both{layer}_{i}", f"nn.add %{a}, %{b}", [a, b], act)
                for i, (a, b) in enumerate(pairs)
            }
        values = ahead
    t.squared_error(values[steps - 1], [batch, dim])
    return t.step(lr)


def dlrm(
    *,
    split: str,
    devices: int = 8,
    batch: int = 2048,
    tables: int = 8,
    rows: int = 100_000,
    width: int = 64,
    dense: int = 16,
    bottom: tuple[int, ...] = (512, 256),
    top: tuple[int, ...] = (512, 256),
    lr: float = 0.01,
) -> str:
    """A train step of DLRM (Naumov et al., 2019): a row for each category of a sample, one from
    each of `tables` tables [rows, width]; an MLP on dense features; the products of each pair of
    these vectors beside the dense one, and an MLP on them to one logit; binary cross entropy, SGD.

    The batch is split over d, the MLPs are replicated. `split` is how the tables are split over d:
    by "tables", or by "columns" or "rows" of one table that has the rows of all.
    """
    t = Text({"d": devices})
    t.argument("dense", [batch, dense], "{d}, {}", "train.input = " + NORMAL.format(1))
    t.argument("clicks", [batch, 1], "{d}, {}", "train.input = #train.init<uniform>")
    found = tensor([batch, tables, width])
    if split == "tables":
        t.indices("ids", [batch, tables], "{d}, {}", rows)
        t.parameter("table", [tables, rows, width], "{d}, {}, {}", NORMAL.format(0.1))
        each = tensor([tables, batch, width], "i32")
        t.op("turned", "nn.transpose %ids perm <1, 0>", ["ids"], tensor([tables, batch], "i32"))
        t.op("each", "nn.broadcast %turned dims <0, 1>", ["turned"], each)
        looked = tensor([tables, batch, width])
        t.op("looked", "nn.take_along_axis %table, %each axis 1", ["table", "each"], looked)
        t.op("rows", "nn.transpose %looked perm <1, 0, 2>", ["looked"], found)
    else:
        t.indices("ids", [batch, tables], "{d}, {}", tables * rows)
        axes = {"columns": "{}, {d}", "rows": "{d}, {}"}[split]
        t.parameter("table", [tables * rows, width], axes, NORMAL.format(0.1))
        t.op("rows", "nn.gather %table, %ids axis 0", ["table", "ids"], found)

    def layers(name: str, x: str, sizes: tuple[int, ...]) -> str:
        for i, (n, m) in enumerate(pairwise(sizes)):
            w = t.parameter(f"{name}{i}_w", [n, m], "{}, {}", NORMAL.format(n**-0.5))
            b = t.parameter(f"{name}{i}_b", [m], "{}", ZEROS)
            type = tensor([batch, m])
            x = t.op(f"{name}{i}_product", f"nn.matmul %{x}, %{w}", [x, w], type)
            x = t.op(f"{name}{i}", f"nn.add %{x}, %{b}", [x, b], type)
            if m > 1:
                x = t.op(f"{name}{i}_relu", f"nn.relu %{x}", [x], type)
        return x

    x = layers("bottom", "dense", (dense, *bottom, width))
    row = t.op("dense_row", f"nn.reshape %{x}", [x], tensor([batch, 1, width]))
    n = tables + 1
    t.op("vectors", f"nn.concat %{row}, %rows axis 1", [row, "rows"], tensor([batch, n, width]))
    type = tensor([batch, n, n])
    t.op("pairs", 'nn.einsum "bie,bje->bij" %vectors, %vectors', ["vectors", "vectors"], type)
    t.op("flat", "nn.reshape %pairs", ["pairs"], tensor([batch, n * n]))
    t.op("all", f"nn.concat %{x}, %flat axis 1", [x, "flat"], tensor([batch, width + n * n]))
    y = layers("top", "all", (width + n * n, *top, 1))
    loss = f"nn.bce_with_logits_loss <mean> %{y}, %clicks"
    t.op("loss", loss, [y, "clicks"], "tensor<f32>")
    return t.step(lr)


def experts(
    *, layers: int, batch: int, seq: int, width: int, count: int, rate: float = 1e-3
) -> str:  # fmt: skip
    """A train step of blocks of causal attention and a dense mixture of `count` experts: each on
    all tokens, weighted by a softmax over experts; mean squared error, Adam. No annotations, and no
    mesh."""
    m = Module()
    f = m.function("loss", private=True)
    p = make_pangu.Transformer(f, width, heads=8)
    x, y = (f.input(name, (batch, seq, width), init="normal") for name in ("x", "y"))
    for i in range(layers):
        gate = p.parameter(f"l{i}.gate", width, count)
        up = p.parameter(f"l{i}.experts.up", count, width, 4 * width)
        down = p.parameter(f"l{i}.experts.down", count, 4 * width, width)
        normed = p.norm(f"l{i}.ln0", f"l{i}_e", p.layer(f"l{i}", x))
        weights = nn.softmax(normed @ gate, axis=2)
        inner = nn.gelu(nn.einsum(normed, up, equation="bsd,edf->ebsf"))
        each = nn.einsum(inner, down, equation="ebsf,efd->ebsd")
        x = x + nn.einsum(each, weights, equation="ebsd,bse->bsd")
    f.returns(nn.mse_loss(x, y, reduction="mean").named("loss"))
    m.step("step", "loss", f"adam, lr = {rate}")
    return str(m)


OPS_PER_LAYER = 26
"""Ops of a block of `transformer`, norms included."""
