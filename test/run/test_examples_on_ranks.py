"""The documents' examples on real ranks: results, gradients and losses equal torch's on one device.

What the ranks calculate is compared with a few lines of torch for each example, in double
precision, from the same inputs and parameters: nothing here goes through our gradients or passes.
"""
# ruff: noqa: E402

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import shardir
from shardir.backend.interface import Options
from shardir.backend.torch.launch import run
from shardir.dialects.random import fill, seed_at, uniform

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
sys.path.append(str(EXAMPLES))
TYPES = {"f32": np.float32, "f64": np.float64, "i32": np.int32, "i64": np.int64}

pytestmark = pytest.mark.xdist_group("examples on ranks")
"""One process runs them all, so that each program runs once (pytest -n 2 --dist loadgroup)."""

Tensors = dict[str, Any]


@dataclass
class Ran:
    """An example after its run: what it started from, and what came out."""

    directory: Path
    plan: dict[str, Any]
    dump: dict[str, np.ndarray]

    def args(self, function: str) -> Tensors:
        """What the function was given: double precision, by the arguments' names."""
        return {
            a["name"]: torch.tensor(self._filled(a)).double()
            if a["dtype"] in ("f32", "f64")
            else torch.tensor(self._filled(a)).long()
            for a in self.plan["functions"][function]["args"]
        }

    def _filled(self, arg: dict[str, Any]) -> np.ndarray:
        init, shape = arg["init"], tuple(arg["shape"])
        if init["kind"] == "file":
            return np.load(self.directory / init["file"])
        return fill(init["kind"], init, shape, None, f"0/{arg['key']}", TYPES[arg["dtype"]])

    def results(self, function: str) -> list[np.ndarray]:
        n = len(self.plan["functions"][function]["results"])
        return [self.dump[f"results/{function}/{i}"] for i in range(n)]


@dataclass(frozen=True)
class Job:
    """An example to run for so many training steps: a file, or what `make_<example>.py` writes."""

    example: str
    steps: int = 3
    name: str = ""
    pipeline: str | None = None
    made: dict[str, Any] | None = None
    """The numbers of a program that is made."""
    mode: str | None = None

    def compiled(self) -> shardir.Compiled:
        if self.made is None:
            path = EXAMPLES / f"{self.example}.ir"
            return shardir.compile_file(path, self.pipeline, mode=self.mode)
        make = import_module(f"make_{self.example}")
        return shardir.compile(getattr(make, self.example)(**self.made))


NARROW = {"width": 8, "batch": 8, "image": 32, "classes": 10, "element": "f64"}
"""ResNet50 with an eighth of its channels. In f32, 50 layers that are normalised by the variances
of 8 numbers make of roundings a difference of 1e-1 in three steps."""

SHALLOW = {**NARROW, "blocks": (2, 1, 1, 1)}


JOBS = {
    1: [Job("modes", name="stand_alone", mode="stand_alone")],
    2: [Job("redistributions_2_devices"), Job("matmul_four_forms")],
    4: [
        Job("redistributions_4_devices"),
        Job("matmul_rows_then_columns"),
        Job("matmul_partial_groups"),
        Job("reid"),
        Job("dlrm"),
        Job("transformer_block"),
        Job("split_softmax"),
        Job("split_softmax_by_hand"),
        Job("densenet"),
        Job("manual_split"),
        Job("overlap", 4),
        Job("mixed_precision", pipeline="mixed-precision,train"),
        Job("lamb"),
        Job("mlp_by_hand"),
        Job("resnet", 2, "resnet_data", made={**NARROW, "dp": 4}),
        Job("resnet", 2, "resnet_channels", made={**SHALLOW, "dp": 2, "tp": 2}),
        Job("resnet", 2, "resnet_rows", made={**SHALLOW, "dp": 2, "sp": 2}),
        Job("loss_parallel"),
        Job("dropout"),
        Job("positions"),
        Job("realformer"),
        Job("encoder_decoder"),
        Job("bert"),
        Job("pangu_alpha"),
        Job("wide_and_deep"),
        Job("ulysses"),
        Job("ring_attention"),
        *(Job("modes", name=m, mode=m) for m in ("data", "hybrid", "semi_auto", "auto")),
        Job("modes_manual", name="manual", mode="manual"),
    ],
    8: [
        Job("matmul_strategies"),
        Job("ffn_cost_graph"),
        Job("ffn_cost_graph", name="ffn_auto", mode="auto"),
        Job("operator_parallel"),
        Job("operator_parallel_trained", 0, "operator_parallel_before"),
        Job("operator_parallel_trained", 4),
    ],
}
"""By the number of ranks."""

BY_NAME = {job.name or job.example: job for jobs in JOBS.values() for job in jobs}
SIZES = {job.name or job.example: n for n, jobs in JOBS.items() for job in jobs}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ran]:
    """An example that has been run."""

    @cache
    def find(name: str) -> Ran:
        job = BY_NAME[name]
        directory = job.compiled().save(tmp_path_factory.mktemp("example") / name)
        dump, plan = directory / "dump.npz", json.loads((directory / "plan.json").read_text())
        run(directory, Options(timeout=120, steps=job.steps, dump=dump), nproc=SIZES[name])
        return Ran(directory, plan, dict(np.load(dump)))

    return find


def equal(found: Any, wanted: Any, what: str = "") -> None:
    """Equal in single precision."""
    if isinstance(wanted, torch.Tensor):
        wanted = wanted.detach().numpy()
    scale = max(1.0, float(np.max(np.abs(wanted))))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * scale, err_msg=what)


def gradients(f: Callable[..., Any], args: list[Any], dy: Any) -> tuple[Any, ...]:
    """The result, and the gradients of the arguments."""
    leaves = [a.clone().requires_grad_() for a in args]
    y = f(*leaves)
    return (y, *torch.autograd.grad(y, leaves, dy))


def check_training(
    example: Ran, loss: Callable[[Tensors], Any], steps: int, lr: float = 0.1,
    momentum: float = 0.9, weight_decay: float = 0.0, step: str = "step",
) -> Tensors:  # fmt: skip
    """The losses and final parameters of a step are those of torch's SGD. What torch has in the end
    is returned."""
    values = example.args(step)
    described = example.plan["functions"][step]["args"]
    names = {a["name"]: a["key"] for a in described if a["role"] == "parameter"}
    for name in names:
        values[name].requires_grad_()
    weights = [values[n] for n in names]
    optimizer = torch.optim.SGD(weights, lr=lr, momentum=momentum, weight_decay=weight_decay)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(values)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    equal(example.dump[f"losses/{step}"], np.array(losses), "losses")
    for name, key in names.items():
        equal(example.dump[f"states/{key}"], values[name], key)
    return values


# ---- redistributions: rows 2 and 3 ----


@pytest.mark.parametrize(
    ("name", "layouts"), [("redistributions_2_devices", 3), ("redistributions_4_devices", 7)]
)
def test_every_conversion_keeps_the_value(ran, name, layouts):
    example = ran(name)
    assert len(example.plan["functions"]) == layouts
    pairs = 0
    for function in example.plan["functions"]:
        x = example.args(function)["x"]
        for y in example.results(function):
            np.testing.assert_array_equal(y, x.numpy().astype(np.float32))
            pairs += 1
    assert pairs == layouts * (layouts - 1)


# ---- products: rows 5, 7, 8, 11, 40 ----


@pytest.mark.parametrize("function", ["a2_b2_c2", "a4_b1_c1", "a1_b8_c1", "named"])
def test_strategies(ran, function):
    example = ran("matmul_strategies")
    args = example.args(function)
    equal(example.results(function)[0], args["x"] @ args["w"])


@pytest.mark.parametrize(
    ("name", "wanted"), [("matmul_rows_then_columns", "xwv"), ("matmul_partial_groups", "xab")]
)
def test_two_products(ran, name, wanted):
    example = ran(name)
    args = example.args("gradient")
    equal(example.results("net")[0], args[wanted[0]] @ args[wanted[1]] @ args[wanted[2]])
    right = gradients(lambda x, w, v: x @ w @ v, [args[k] for k in wanted], args["d_z"])
    for found, value in zip(example.results("gradient"), right, strict=True):
        equal(found, value)


def test_net_on_eight(ran):
    example = ran("operator_parallel")
    args = example.args("gradient")
    z, dw = gradients(lambda w: torch.relu(args["x"] @ w), [args["w"]], args["d_z"])
    equal(example.results("net")[0], z)
    for found, value in zip(example.results("gradient"), (z, dw), strict=True):
        equal(found, value)


@pytest.mark.parametrize("name", ["ffn_cost_graph", "ffn_auto"])
def test_half_specified(ran, name):
    """What has no strategy, by propagation and by the search."""
    example = ran(name)
    args = example.args("gradient")
    net = example.args("ffn")
    equal(example.results("ffn")[0], torch.relu(net["x"] @ net["w1"]) @ net["w2"])
    right = gradients(
        lambda w1, w2: torch.relu(args["x"] @ w1) @ w2, [args["w1"], args["w2"]], args["d_y"]
    )
    for found, value in zip(example.results("gradient"), right, strict=True):
        equal(found, value)


@pytest.mark.parametrize("form", ["replicated", "rows", "columns", "summed"])
def test_four_forms(ran, form):
    assert ran("matmul_four_forms").results(form)[0].tolist() == [[19, 22], [43, 50]]


# ---- the trained net ----


def test_the_net_starts_at_the_loss_of_the_log(ran):
    """The seed's log prints the mean over rank 0's own rows: the first two of sixteen."""
    example = ran("operator_parallel_before")
    (losses,) = example.results("losses")
    described = example.plan["functions"]["losses"]["results"][0]
    assert (described["shape"], described["dims"]) == ([16], [["d"]])
    np.random.seed(1)  # as the document's program draws its data
    x, labels = np.random.rand(16, 32), np.random.rand(16, 16)
    equal(np.load(example.directory / "data" / "operator_parallel_x.npy"), x)
    assert abs(losses[:2].mean() - 23.03) < 0.04
    assert abs(losses[:2].mean() - labels[:2].sum(1).mean() * np.log(16)) < 0.04


def test_the_net_is_trained(ran):
    example = ran("operator_parallel_trained")

    def loss(v: Tensors) -> Any:
        z = torch.relu(v["x"] @ v["w"])
        return -(torch.log_softmax(z, 1) * v["labels"]).sum()

    check_training(example, loss, steps=4, lr=0.001, momentum=0.1)
    losses = example.dump["losses/step"]
    assert (np.diff(losses) < 0).all(), losses
    assert (
        example.results("losses")[0][:2].mean()
        < ran("operator_parallel_before").results("losses")[0][:2].mean()
    )


# ---- overlap ----


def test_gathers_and_reductions_beside_calculation(ran):
    example = ran("overlap")
    program = (example.directory / "program.py").read_text()
    for call in ("all_gather", "reduce_scatter"):
        assert re.search(rf"rt\.{call}\(.*wait=False\)", program)

    def loss(v: Tensors) -> Any:
        h = torch.tanh(torch.tanh(v["x"] @ v["w1"]) @ v["w2"])
        return torch.nn.functional.mse_loss(h @ v["w3"], v["y"])

    check_training(example, loss, steps=4)


# ---- the modes: rows 15 and 16 ----


@pytest.mark.parametrize(
    ("mode", "step"),
    [
        ("stand_alone", "step"),
        ("data", "step"),
        ("hybrid", "step"),
        ("semi_auto", "step"),
        ("auto", "step"),
        ("manual", "hand_step"),
        ("manual", "annotated_step"),
    ],
)
def test_all_modes_train_alike(ran, mode, step):
    def loss(v: Tensors) -> Any:
        h = torch.nn.functional.gelu(v["x"] @ v["up"], approximate="tanh")
        return torch.nn.functional.mse_loss(h @ v["down"], v["y"])

    check_training(ran(mode), loss, steps=3, step=step)


# ---- models, and LAMB ----


def test_reid(ran):
    def loss(v: Tensors) -> Any:
        features = torch.relu(v["images"] @ v["w1"]) @ v["w2"]
        return torch.nn.functional.cross_entropy(features @ v["people"], v["labels"])

    check_training(ran("reid"), loss, steps=3)


def test_dlrm(ran):
    def loss(v: Tensors) -> Any:
        rows = torch.nn.functional.embedding(v["ids"], v["table"])
        dense = torch.relu(v["dense"] @ v["bottom"])
        between = torch.bmm(rows, rows.mT).flatten(1)
        crossed = torch.bmm(rows, dense[:, :, None])[:, :, 0]
        logits = between @ v["pairs"] + crossed @ v["cross"]
        return torch.nn.functional.cross_entropy(logits, v["clicks"])

    example = ran("dlrm")
    check_training(example, loss, steps=3)
    args = example.args("net")
    equal(example.results("net")[0], args["x"] @ args["w"] @ args["v"])


def test_manual_split(ran):
    """A table in slices of stated sizes: rows, its gradient, moves to other sizes, training."""
    functional = torch.nn.functional
    example = ran("manual_split")
    args = example.args("gradient")
    rows, d_table = gradients(
        lambda table: functional.embedding(args["ids"], table), [args["table"]], args["d_rows"]
    )
    equal(example.results("net")[0], rows)
    equal(example.results("gradient")[1], d_table)
    table = example.args("moved")["table"].numpy().astype(np.float32)
    np.testing.assert_array_equal(example.results("moved")[0], table)

    def loss(v: Tensors) -> Any:
        flat = functional.embedding(v["ids"], v["table"]).flatten(1)
        return functional.cross_entropy(flat @ v["w"], v["clicks"])

    check_training(example, loss, steps=3)


def test_mixed_precision(ran):
    """Against torch with the same casts; the parameters are f32 and take steps finer than bf16."""
    example = ran("mixed_precision")
    v = {k: t if k == "labels" else t.float() for k, t in example.args("step").items()}
    weights = [v["up"].requires_grad_(), v["down"].requires_grad_()]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            h = torch.nn.functional.gelu(v["x"] @ v["up"], approximate="tanh")
            loss = torch.nn.functional.cross_entropy((h @ v["down"]).float(), v["labels"])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    np.testing.assert_allclose(example.dump["losses/step"], losses, rtol=4e-3)
    for weight, key in zip(weights, ("up", "down"), strict=True):
        found = example.dump[f"states/{key}"]
        np.testing.assert_allclose(found, weight.detach().numpy(), rtol=0, atol=4e-3)
        assert (torch.tensor(found).bfloat16().float().numpy() != found).mean() > 0.9


def test_transformer(ran):
    functional = torch.nn.functional

    def loss(v: Tensors) -> Any:
        a = functional.layer_norm(v["x"], (8,), v["n1"], v["c1"])
        q, k, u = (torch.einsum("bse,ehd->bhsd", a, v[w]) for w in ("wq", "wk", "wv"))
        context = functional.scaled_dot_product_attention(q, k, u, is_causal=True)
        r1 = v["x"] + torch.einsum("bhsd,hde->bse", context, v["wo"])
        f = functional.layer_norm(r1, (8,), v["n2"], v["c2"])
        out = r1 + functional.gelu(f @ v["up"], approximate="tanh") @ v["down"]
        return functional.mse_loss(out, v["target"])

    check_training(ran("transformer_block"), loss, steps=3)


def test_split_softmax(ran):
    functional = torch.nn.functional

    def loss(v: Tensors) -> Any:
        logits = functional.normalize(v["features"]) @ functional.normalize(v["people"]).T
        return functional.cross_entropy(logits, v["labels"])

    check_training(ran("split_softmax"), loss, steps=3)
    example = ran("split_softmax_by_hand")
    args = example.args("by_hand")
    equal(example.results("by_hand")[0], functional.cross_entropy(args["logits"], args["labels"]))


def test_mlp_by_hand(ran):
    """Written in the local view; its backward part is derived."""
    functional = torch.nn.functional

    def loss(v: Tensors) -> Any:
        h = functional.gelu(v["x"] @ v["up"], approximate="tanh")
        return functional.mse_loss(h @ v["down"] + v["b"], v["y"])

    check_training(ran("mlp_by_hand"), loss, steps=3)


def test_densenet(ran):
    """Row 23, in the sizes of the lecture."""

    def loss(v: Tensors) -> Any:
        e = v["x"] @ v["table"]
        q, k, u = (torch.relu(e @ v[f"w{i}"] + v[f"b{i}"]) for i in (1, 2, 3))
        return torch.nn.functional.mse_loss(q @ k.T @ u, v["labels"])

    check_training(ran("densenet"), loss, steps=3, lr=0.01)


def test_lamb(ran):
    """Row 36: Algorithm 1 with the norms of whole parameters, whatever devices hold."""
    functional = torch.nn.functional
    example = ran("lamb")
    v = example.args("step")
    keys = ("up", "b", "down", "c")
    m, s = ({k: torch.zeros_like(v[k]) for k in keys} for _ in range(2))
    losses = []
    for t in range(1, 4):
        for k in keys:
            v[k].requires_grad_()
        logits = functional.gelu(v["x"] @ v["up"] + v["b"], approximate="tanh") @ v["down"] + v["c"]
        loss = functional.cross_entropy(logits, v["labels"])
        losses.append(loss.item())
        for k, g in zip(keys, torch.autograd.grad(loss, [v[k] for k in keys]), strict=True):
            w = v[k].detach()
            m[k] = 0.9 * m[k] + 0.1 * g
            s[k] = 0.999 * s[k] + 0.001 * g * g
            u = m[k] / (1 - 0.9**t) / ((s[k] / (1 - 0.999**t)).sqrt() + 1e-6) + 0.01 * w
            v[k] = w - 0.05 * (w.norm() / u.norm() if w.norm() > 0 else 1.0) * u
    equal(example.dump["losses/step"], np.array(losses), "losses")
    for k in keys:
        equal(example.dump[f"states/{k}"], v[k], k)
        equal(example.dump[f"states/{k}.exp_avg_sq"], s[k], k)


# ---- ResNet50 ----


def resnet(v: Tensors) -> Any:
    """Its loss; the running statistics in `v` are updated."""
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


@pytest.mark.parametrize("name", ["resnet_data", "resnet_channels", "resnet_rows"])
def test_resnet(ran, name):
    """Batches, channels and rows split: losses, parameters and running statistics. The last stage
    has one row of an image, so that of two parts one is empty."""
    example = ran(name)
    values = check_training(example, resnet, steps=2, weight_decay=1e-4)
    arguments = example.plan["functions"]["step"]["args"]
    running = [a for a in arguments if ".running_" in a["key"]]
    assert len(running) == 2 * (53 if name == "resnet_data" else 20)
    for a in running:
        equal(example.dump[f"states/{a['key']}"], values[a["name"]], a["key"])


# ---- transformers: rows 22, 25, 39, and the models by name ----


def attention(x: Any, memory: Any, q: Any, k: Any, v: Any, o: Any, **options: Any) -> Any:
    """Queries of x, keys and values of memory, all [batch, rows, columns]; weights by heads."""
    heads = (torch.einsum("bse,ehd->bhsd", t, w) for t, w in ((x, q), (memory, k), (memory, v)))
    context = torch.nn.functional.scaled_dot_product_attention(*heads, **options)
    return torch.einsum("bhsd,hde->bse", context, o)


def norm(x: Any, weight: Any, bias: Any, eps: float = 1e-5) -> Any:
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


def gelu(x: Any) -> Any:
    return torch.nn.functional.gelu(x, approximate="tanh")


def classified(logits: Any, labels: Any, **options: Any) -> Any:
    """The mean cross entropy; classes are the last dimension."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)


def sinusoids(rows: int, columns: int) -> Any:
    """Vaswani et al. (2017), 3.5."""
    angles = torch.arange(rows)[:, None] / 1e4 ** (torch.arange(0, columns, 2).double() / columns)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


def test_loss_parallel(ran):
    def loss(v: Tensors) -> Any:
        e = v["table"][v["tokens"]]
        r = e + gelu(e @ v["up"]) @ v["down"]
        return classified(r @ v["table"].T, v["targets"])

    example = ran("loss_parallel")
    check_training(example, loss, steps=3)
    for function in ("lookup", "product"):
        args = example.args(function)
        equal(example.results(function)[0], args["table"][args["tokens"]])


def kept(key: int, stream: int, p: float, *shape: int) -> Any:
    """What dropout multiplies by, drawn for the whole tensor at once."""
    drawn = uniform(seed_at(key, stream), np.arange(np.prod(shape))).reshape(shape)
    return torch.tensor((drawn >= p) / (1 - p))


def test_dropout(ran):
    example = ran("dropout")
    for function in ("split", "replicated"):
        equal(example.results(function)[0], kept(7, 3, 0.25, 16, 8))

    def loss(v: Tensors) -> Any:
        key = int(v["key"])
        v["key"] = v["key"] + 1
        h = gelu(v["x"] @ v["up"]) * kept(key, 1, 0.25, 16, 8)
        return torch.nn.functional.mse_loss(h @ v["down"] * kept(key, 2, 0.5, 16, 6), v["target"])

    check_training(example, loss, steps=3)
    assert example.dump["states/key"] == example.args("step")["key"] + 3


def turned(x: Any) -> Any:
    """Rotary embeddings (Su et al., 2021) as products of complex numbers: x[i] and x[i + d / 2]."""
    rows, columns = x.shape[-2:]
    rate = 1e4 ** (-torch.arange(0, columns, 2).double() / columns)
    turn = torch.polar(torch.ones(rows, columns // 2).double(), torch.arange(rows)[:, None] * rate)
    pairs = torch.complex(x[..., : columns // 2], x[..., columns // 2 :]) * turn
    return torch.cat([pairs.real, pairs.imag], -1)


@pytest.mark.parametrize("kind", ["learned", "sinusoidal", "rotary"])
def test_positions(ran, kind):
    def attended(x: Any, *weights: Any) -> Any:
        table = weights[0] if kind == "learned" else sinusoids(6, 8)
        placed = x if kind == "rotary" else x + table
        q, k, v = (torch.einsum("bse,ehd->bhsd", placed, w) for w in weights[-3:])
        if kind == "rotary":
            q, k = turned(q), turned(k)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    example = ran("positions")
    args = example.args(f"{kind}_gradient")
    names = ["x", *(["table"] if kind == "learned" else []), "wq", "wk", "wv"]
    right = gradients(attended, [args[n] for n in names], args["d_y"])
    for name, found, value in zip(
        ("y", *names), example.results(f"{kind}_gradient"), right, strict=True
    ):
        equal(found, value, name)


def test_realformer(ran):
    def loss(v: Tensors) -> Any:
        x, scores = v["x"], 0.0
        for n in "12":
            q, k, u = (torch.einsum("bse,ehd->bhsd", x, v[w + n]) for w in ("wq", "wk", "wv"))
            scores = q @ k.mT / 2 + scores
            context = torch.softmax(scores, -1) @ u
            attended = torch.einsum("bhsd,hde->bse", context, v[f"wo{n}"])
            x = norm(x + attended, v[f"g{n}a"], v[f"c{n}a"])
            x = norm(x + gelu(x @ v[f"up{n}"]) @ v[f"down{n}"], v[f"g{n}b"], v[f"c{n}b"])
        return torch.nn.functional.mse_loss(x, v["target"])

    check_training(ran("realformer"), loss, steps=3)


def test_encoder_decoder(ran):
    def embedded(v: Tensors, tokens: Any) -> Any:
        return v["table"][tokens] * 8**0.5 + sinusoids(tokens.shape[1], 8)

    def fed(v: Tensors, x: Any, n: str, of: str) -> Any:
        return norm(x + torch.relu(x @ v[f"up{n}"]) @ v[f"down{n}"], v[f"n{of}"], v[f"c{of}"])

    def loss(v: Tensors) -> Any:
        encoder, decoder, across = ([v[a + b] for b in "qkvo"] for a in "edx")
        s, t = embedded(v, v["source"]), embedded(v, v["target"])
        memory = fed(v, norm(s + attention(s, s, *encoder), v["n1"], v["c1"]), "1", "2")
        m = norm(t + attention(t, t, *decoder, is_causal=True), v["n3"], v["c3"])
        m = norm(m + attention(m, memory, *across), v["n4"], v["c4"])
        logits = fed(v, m, "2", "5") @ v["table"].T
        return classified(logits, v["labels"], label_smoothing=0.1)

    check_training(ran("encoder_decoder"), loss, steps=3)


def test_bert(ran):
    functional = torch.nn.functional

    def loss(v: Tensors) -> Any:
        e = v["table"][v["tokens"]] + v["sides"][v["segments"]] + v["places"]
        x = norm(e, v["n0"], v["c0"], 1e-12)
        counts = (torch.arange(6) < v["lengths"][:, None])[:, None, None]
        weights = (v["wq"], v["wk"], v["wv"], v["wo"])
        f = norm(x + attention(x, x, *weights, attn_mask=counts), v["n1"], v["c1"], 1e-12)
        y = norm(f + functional.gelu(f @ v["up"]) @ v["down"], v["n2"], v["c2"], 1e-12)
        t = norm(functional.gelu(y @ v["wt"]), v["n3"], v["c3"], 1e-12)
        labels = v["masked"].where(v["masked"] >= 0, -100)
        missing = classified(t @ v["table"].T + v["bias"], labels)
        return missing + classified(torch.tanh(y[:, 0] @ v["wp"]) @ v["ws"], v["follows"])

    example = ran("bert")
    values = example.args("step")
    assert (values["lengths"] < 6).any() and (values["masked"] < 0).any()
    check_training(example, loss, steps=3)


def test_pangu_alpha(ran):
    def fed(v: Tensors, x: Any, up: str, a: str, down: str, b: str) -> Any:
        return gelu(x @ v[up] + v[a]) @ v[down] + v[b]

    def loss(v: Tensors) -> Any:
        x = v["table"][v["tokens"]] + v["positions"][v["places"]]
        a = norm(x, v["n1"], v["c1"])
        x = x + attention(a, a, *(v[f"w{w}"] for w in "qkvo"), is_causal=True)
        x = x + fed(v, norm(x, v["n2"], v["c2"]), "up", "b1", "down", "b2")
        y = norm(x, v["n3"], v["c3"])
        memory = norm(y, v["n4"], v["c4"])
        asks = v["next"][v["places"]]
        y = y + attention(asks, memory, *(v[f"u{w}"] for w in "qkvo"), is_causal=True)
        y = y + fed(v, norm(y, v["n5"], v["c5"]), "up2", "b3", "down2", "b4")
        return classified(y @ v["table"].T, v["targets"])

    check_training(ran("pangu_alpha"), loss, steps=3)


def test_wide_and_deep(ran):
    def loss(v: Tensors) -> Any:
        linear = v["wide"][v["crossed"]].sum(1)
        features = torch.cat([v["deep"][v["ids"]].flatten(1), v["dense"]], 1)
        deep = torch.relu(features @ v["w1"] + v["b1"]) @ v["w2"]
        logits = (linear + deep + v["b"])[:, 0]
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, v["clicks"])

    check_training(ran("wide_and_deep"), loss, steps=3)


def test_ulysses(ran):
    def loss(v: Tensors) -> Any:
        weights = (v["wq"], v["wk"], v["wv"], v["wo"])
        y = v["x"] + attention(v["x"], v["x"], *weights, is_causal=True)
        return torch.nn.functional.mse_loss(y, v["target"])

    check_training(ran("ulysses"), loss, steps=3)


def test_ring_attention(ran):
    """Blocks [4, batch, heads, 2, columns] are a sequence of 8."""

    def attended(*blocks: Any) -> Any:
        whole = (x.permute(1, 2, 0, 3, 4).flatten(2, 3) for x in blocks)
        y = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
        return y.unflatten(2, (4, 2)).permute(2, 0, 1, 3, 4)

    example = ran("ring_attention")
    args = example.args("gradient")
    right = gradients(attended, [args[n] for n in "qkv"], args["d_y"])
    equal(example.results("ring")[0], right[0])
    for found, value in zip(example.results("gradient"), right, strict=True):
        equal(found, value)
