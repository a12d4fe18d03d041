"""The examples of modes, losses, training and communication on real ranks."""
# ruff: noqa: E402 (torch may not be installed)

import re
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.ranks.example_runs import Tensors, check_training, classified, equal, gelu

from shardir.dialects.random import seed_at, uniform


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
def test_all_modes_train_equally(ran, mode, step):
    def loss(v: Tensors) -> Any:
        h = torch.nn.functional.gelu(v["x"] @ v["up"], approximate="tanh")
        return torch.nn.functional.mse_loss(h @ v["down"], v["y"])

    example = "modes_manual" if mode == "manual" else "modes"
    check_training(ran(example, mode=mode), loss, steps=3, step=step)


def test_mlp_by_hand(ran):
    """It is written in the local view; its backward part is derived."""
    functional = torch.nn.functional

    def loss(v: Tensors) -> Any:
        h = functional.gelu(v["x"] @ v["up"], approximate="tanh")
        return functional.mse_loss(h @ v["down"] + v["b"], v["y"])

    check_training(ran("mlp_by_hand"), loss, steps=3)


def test_split_softmax(ran):
    functional = torch.nn.functional

    def loss(v: Tensors) -> Any:
        logits = functional.normalize(v["features"]) @ functional.normalize(v["people"]).T
        return functional.cross_entropy(logits, v["labels"])

    check_training(ran("split_softmax"), loss, steps=3)
    example = ran("split_softmax_by_hand")
    args = example.args("by_hand")
    equal(example.results("by_hand")[0], functional.cross_entropy(args["logits"], args["labels"]))


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


def test_a_plan_of_presets(ran):
    """The plan that the mode auto takes is one of ZeRO-3: it hides more of its communication."""

    def loss(v: Tensors) -> Any:
        c = torch.tanh(v["x"] @ v["up"]) @ v["down"]
        return (torch.tanh(c @ v["up2"]) @ v["down2"]).square().mean()

    check_training(ran("presets", mode="auto"), loss, steps=3)


def dropout_factors(key: int, stream: int, p: float, *shape: int) -> Any:
    """Return the factors by which dropout multiplies the global tensor: 0 or 1 / (1 - p)."""
    drawn = uniform(seed_at(key, stream), np.arange(np.prod(shape))).reshape(shape)
    return torch.tensor((drawn >= p) / (1 - p))


def test_dropout(ran):
    example = ran("dropout")
    for function in ("split", "replicated"):
        equal(example.results(function)[0], dropout_factors(7, 3, 0.25, 16, 8))

    def loss(v: Tensors) -> Any:
        key = int(v["key"])
        v["key"] = v["key"] + 1
        h = gelu(v["x"] @ v["up"]) * dropout_factors(key, 1, 0.25, 16, 8)
        return torch.nn.functional.mse_loss(
            h @ v["down"] * dropout_factors(key, 2, 0.5, 16, 6), v["target"]
        )

    check_training(example, loss, steps=3)
    assert example.dump["states/key"] == example.args("step")["key"] + 3


def test_mixed_precision(ran):
    """As torch with the same casts; parameters are f32, and their updates are finer than bf16."""
    example = ran("mixed_precision", pipeline="mixed-precision,train")
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


def test_lamb(ran):
    """Algorithm 1 of You et al. (2020), with the norms of the global parameters."""
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


def test_gathers_and_reductions_overlap(ran):
    example = ran("overlap", 4)
    program = (example.directory / "program.py").read_text()
    for call in ("all_gather", "reduce_scatter"):
        assert re.search(rf"rt\.{call}\(.*wait=False\)", program)

    def loss(v: Tensors) -> Any:
        h = torch.tanh(torch.tanh(v["x"] @ v["w1"]) @ v["w2"])
        return torch.nn.functional.mse_loss(h @ v["w3"], v["y"])

    check_training(example, loss, steps=4)
