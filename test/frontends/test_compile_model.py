"""Modules of torch, compiled in one call: weights, optimizers, errors. No ranks: see test/run."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.extent import sampled
from support.modules.imported import assert_equal, imported, in_numpy, in_torch
from torch import nn

import shardir
from shardir.cost.clusters import load
from shardir.diagnostics import ShardirError
from shardir.dialects.locations import file_location
from shardir.dialects.nn import EinsumOp, SoftmaxOp
from shardir.dialects.train import Role, arguments
from shardir.frontends.torch import optimizers
from shardir.frontends.torch.importer import FUNCTION
from shardir.interpret.evaluator import run
from shardir.passes.search_mesh import BOUND_GAP

torch.manual_seed(0)
X, Y = torch.randn(8, 4), torch.randint(3, (8,))
SGD = "sgd, lr = 0.1"


class Net(nn.Module):
    """A module with tied, frozen and unused parameters, and buffers that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.head.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.constant = torch.arange(20.0).reshape(5, 4)
        self.table = nn.Embedding(5, 4, padding_idx=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.shape[0]
        h = self.norm(self.first(x)).relu() + 1
        first_two = h[:, :2]
        h[:, 1:3].mul_(2)
        h = self.second(h) + first_two.sum() + self.table(torch.arange(8) % 3)
        return self.head(h + self.constant[0])


def cross_entropy(model: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(model(X), Y)


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def compiled(model: nn.Module, **options: Any) -> Any:
    given: dict[str, Any] = {
        "labels": Y,
        "loss": nn.functional.cross_entropy,
        "optimizer": SGD,
        **options,
    }
    return shardir.compile(model, X, **given)


def test_roles_follow_from_the_module(net: Net) -> None:
    found = imported(net, X, Y, nn.functional.cross_entropy)
    roles = {a.key: a.role for a in arguments(found.function.func) if a.key}
    trained = {name for name, role in roles.items() if role is Role.PARAMETER}
    # export names a tied weight by its last name
    assert trained == {
        "first.bias", "second.weight", "second.bias", "norm.weight", "norm.bias", "head.weight",
        "table.weight",
    }  # fmt: skip
    assert set(roles) - trained >= {
        "head.bias", "unused", "seen", "norm.running_mean", "norm.running_var",
    }  # fmt: skip


@pytest.mark.parametrize("pipeline", ["single-device", "train", "auto"])
def test_gradients_are_those_of_torch(net: Net, pipeline: str) -> None:
    found = imported(net, X, Y, nn.functional.cross_entropy, mesh="dp = 2, tp = 2")
    assert_equal(in_numpy(found, pipeline), in_torch(net, cross_entropy), 1e-4)


def test_locations_are_those_of_the_models_source(net: Net) -> None:
    found = imported(net, X, Y, nn.functional.cross_entropy)
    places = {
        file_location(op.location) for op in found.function.block.ops if isinstance(op, EinsumOp)
    }
    assert {place[0] for place in places if place} == {__file__}


def test_values_have_the_paths_of_modules(net: Net) -> None:
    found = imported(net, X, Y, nn.functional.cross_entropy)
    names = {r.name_hint for op in found.function.block.ops for r in op.results}
    assert {"first", "first.einsum", "norm", "table", "head", "relu", "cross_entropy_loss"} <= names
    numbered = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    program = shardir.compile(numbered, X, train=False, mesh="d = 2", plan="ddp")
    assert "%layer0.weight: " in program.text and "%layer1 = nn.gelu %layer0 " in program.text
    assert "dimension 0 over {d}: by %layer0 = nn.add" in program.explain("0")
    assert program.cost().seconds == sum(op.seconds for op in program.cost().ops) > 0
    with pytest.raises(ShardirError, match=r"expected names of values, .*, with layouts, got 9$"):
        program.explain("9")


def test_outputs_that_are_no_tensors_are_left_out() -> None:
    """Such as the cache of keys and values that models of transformers return."""

    class Cache:
        pass

    class Caching(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"first": 2 * x, "cache": Cache(), "last": x + 1}

    with pytest.warns(UserWarning, match="output of type Cache is left out"):
        program = shardir.compile(Caching(), X, train=False, mesh="d = 2", plan="ddp")
    first, last = run(program.module, FUNCTION, [X.numpy()])
    assert np.array_equal(first, 2 * X.numpy()) and np.array_equal(last, X.numpy() + 1)


def test_a_module_is_explained_by_what_is_within() -> None:
    """If no value has its name, since its result is that of a module within."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.Sequential(nn.Linear(4, 4), nn.GELU())
            self.attention = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(self.attn(x))

    program = shardir.compile(Nested(), X, train=False, mesh="d = 2", plan="ddp")
    found = [line.split(": ")[1].split(",")[0] for line in program.explain("attn").splitlines()
             if line.startswith("@")]  # fmt: skip
    assert set(found) == {
        "%attn.0.weight", "%attn.0.bias", "%attn.0.einsum", "%attn.0", "%attn.1"
    }  # fmt: skip
    assert program.explain("attn.1").startswith("@forward at")
    assert "%attn.1" not in program.explain("attn.0")
    with pytest.raises(ShardirError, match=r"got atn, x1; the nearest names are attn"):
        program.explain("atn", "x1", "attn")


def test_a_preset_is_a_plan_by_names(net: Net) -> None:
    found = compiled(net, mesh="dp = 2, tp = 2", plan="fsdp")
    assert '"first.bias"' in found.plan and "uses [], recompute" in found.plan
    again = compiled(net, mesh="dp = 2, tp = 2", plan=found.plan)
    assert again.plan == found.plan and again.text == found.text


def test_a_state_dict_is_that_of_the_module(net: Net) -> None:
    program = compiled(net)
    states = program.state_dict()
    assert states.keys() == net.state_dict().keys()
    net.load_state_dict(states)


def test_groups_of_an_optimizer_are_read(net: Net) -> None:
    weights = [net.head.weight, net.first.weight]
    others = [p for n, p in net.named_parameters() if not any(p is w for w in weights)]
    optimizer = torch.optim.AdamW(
        [{"params": weights}, {"params": others, "weight_decay": 0.0, "lr": 1e-4}], lr=1e-3
    )
    names = {id(p): name for name, p in net.named_parameters(remove_duplicate=False)}
    read = optimizers.read(optimizer, names)
    assert read.text.startswith("adamw, lr = 0.001, beta1 = 0.9")
    found = compiled(net, optimizer=optimizer).imported
    roles = [a for a in arguments(found.function.func) if a.role is Role.PARAMETER]
    assert {a.key: (a.lr_scale, a.weight_decay(0.01)) for a in roles} == {
        name: (1.0, 0.01) if name in ("head.weight", "second.weight") else (0.1, 0.0)
        for name in (a.key for a in roles)
    }


def test_a_module_on_the_meta_device_compiles_but_does_not_run() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 65536), nn.ReLU(), nn.Linear(65536, 3))
    program = shardir.compile(
        model, torch.randn(8, 4096), labels=Y, loss=nn.functional.cross_entropy, optimizer=SGD
    )
    assert "x4096" in program.text or "4096x" in program.text
    with pytest.raises(ShardirError, match="the values of 4 parameters and buffers, got the meta"):
        program.save("never")


class Attentions(nn.Module):
    """Attention with dropout, and with each kind of mask; one query attends to no key."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        at = torch.arange(5)
        banned = torch.zeros(5, 5).masked_fill(at[:, None] < at - 2, -torch.inf)
        attend = partial(nn.functional.scaled_dot_product_attention, q, k, v, dropout_p=1e-9)
        masks = [attend(), attend(at[:, None] > at), attend(banned), attend(is_causal=True)]
        return torch.stack(masks).square().sum()


def test_attention_with_dropout_is_that_of_torch() -> None:
    model, x = Attentions(), torch.randn(2, 5, 4)
    found = imported(model, x, mesh="d = 2")
    assert_equal(in_numpy(found, "train"), in_torch(model, lambda m: m(x)), 1e-4)
    # the heads stay a dimension, which a plan can split
    shapes = {tuple(op.out.type.get_shape()) for op in found.function.block.ops
              if isinstance(op, SoftmaxOp)}  # fmt: skip
    assert shapes == {(2, 2, 5, 5)}


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "no optimizer": (lambda: compiled(Net(), optimizer=None), "expected an optimizer, got none"),
    "no scalar loss": (
        lambda: compiled(Net(), loss=None, labels=None),
        "expected a scalar loss among the model's",
    ),
    "another module's parameters": (
        lambda: compiled(Net(), optimizer=torch.optim.SGD(Net().parameters(), lr=0.1)),
        "expected parameters of the module",
    ),
    "text of an optimizer": (lambda: compiled(Net(), optimizer="adamw lr"), "expected options"),
    "no loss function's labels": (
        lambda: compiled(Net(), labels=None),
        "missing a required argument: 'target'; pass labels=",
    ),
    "shapes": (lambda: shardir.compile(Net(), torch.randn(8, 5), train=False), "in 'first' at"),
    "inputs": (lambda: shardir.compile(Net(), 3, train=False), "expected inputs: a tensor"),
    "branches": (lambda: shardir.compile(Branching(), X, train=False), "GuardOnDataDependent"),
    "mesh": (lambda: compiled(Net(), mesh="dp 2"), "expected a mesh: name = size"),
    "cluster of one replica": (
        lambda: compiled(Net(), cluster="h200", sync="average, replicas = 2, every = 2"),
        "expected a mesh beside a sync",
    ),
    "mode": (lambda: compiled(Net(), mode="atuo"), "atuo"),
    "a batch of another shape": (
        lambda: compiled(Net()).save("never", [(torch.randn(4, 4), Y)]),
        "expected x of [8, 4] in",
    ),
    "no batches": (lambda: compiled(Net()).save("never", []), "expected batches, got none"),
}


@pytest.mark.parametrize("name", sampled(ERRORS, 6))
def test_errors_say_what_was_expected(name: str) -> None:
    action, message = ERRORS[name]
    with pytest.raises(ShardirError) as e:
        action()
    assert message in str(e.value)
    assert len(str(e.value)) < 600


def test_a_mesh_is_searched_for_on_a_cluster() -> None:
    """It is as fast as the fastest of all meshes, each compiled in the mode auto."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, 2048), nn.Linear(2048, 512))
        x = torch.empty(4096, 512)
    given = {"labels": x, "loss": nn.functional.mse_loss, "optimizer": SGD}
    found = shardir.compile(model, x, mesh="h200", devices=4, **given)
    meshes = ["a = 4", "a = 2, b = 2"]
    others = [
        shardir.compile(model, x, mesh=mesh, cluster="h200", mode="auto", **given)
        for mesh in meshes
    ]
    assert any(f"dist.mesh @m <{mesh}>" in found.text for mesh in meshes)
    fastest = min(other.cost("step").seconds for other in others)
    assert found.cost("step").seconds <= fastest * (1 + BOUND_GAP)


def test_a_mesh_and_a_cluster_are_values_too() -> None:
    """As their texts."""
    mesh = shardir.Mesh("m", (("dp", 2), ("tp", 2)))
    cluster = load("h200")
    assert isinstance(cluster, shardir.Cluster)
    model = nn.Linear(4, 3)
    by_text = compiled(model, mesh="dp = 2, tp = 2", plan="fsdp")
    assert compiled(model, mesh=mesh, plan="fsdp").text == by_text.text
    on = compiled(model, mesh="dp = 2, tp = 2", cluster="h200").text
    as_value = compiled(model, mesh=replace(mesh, cluster=cluster)).text
    assert as_value == on.replace("@h200", "@cluster")
