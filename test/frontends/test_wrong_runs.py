"""Wrong weights, files, batches and runs of compiled models: each has one message with a fix."""

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.extent import sampled
from support.modules.wrong_uses import NET, X, Y, assert_one_message, compiled
from torch import nn

import shardir

FOLDER = Path(__file__).parent


@cache
def program() -> Any:
    return compiled(mesh="dp = 2")


def weights(change: Callable[[dict[str, Any]], object]) -> Callable[[], object]:
    def load() -> None:
        states = program().state_dict()
        change(states)
        program().load_state_dict(states)

    return load


class Two(nn.Module):
    """A module of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, a: torch.Tensor, b: Any) -> torch.Tensor:
        return (a * self.w + b).sum()


@cache
def two() -> Any:
    return shardir.compile(Two(), (X, X), optimizer="sgd, lr = 0.1", mesh="dp = 2")


@cache
def inference() -> Any:
    return shardir.compile(NET, X, train=False, mesh="dp = 2")


class Alone(nn.Module):
    """A module without inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self) -> torch.Tensor:
        return self.w.square().sum()


@cache
def without_inputs() -> Any:
    return shardir.compile(Alone(), (), optimizer="sgd, lr = 0.1", mesh="dp = 2")


def batch(given: Any) -> Callable[[], object]:
    return lambda: two().save(FOLDER / "o", [given])


def file(name: str, content: bytes) -> Callable[[], object]:
    def load() -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_bytes(content)
            program().load_weights(path)

    return load


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "weights: missing": (
        weights(lambda s: s.pop("0.weight")),
        "expected weights of all parameters and buffers, got none of 0.weight",
    ),
    "weights: dtype": (
        weights(lambda s: s.update({"0.bias": torch.ones(8, dtype=torch.int64)})),
        "expected 0.bias of torch.float32, got torch.int64",
    ),
    "weights: complex": (
        weights(lambda s: s.update({"0.bias": torch.ones(8, dtype=torch.complex64)})),
        "expected 0.bias of torch.float32, got torch.complex64",
    ),
    "weights: numpy": (
        weights(lambda s: s.update({"0.bias": torch.ones(8).numpy()})),
        "expected a tensor with values as '0.bias', got a ndarray",
    ),
    "weights: list": (
        weights(lambda s: s.update({"0.bias": [0.0] * 8})),
        "expected a tensor with values as '0.bias', got a list",
    ),
    "weights: meta": (
        weights(lambda s: s.update({"0.bias": torch.ones(8, device="meta")})),
        "expected a tensor with values as '0.bias', got the meta device",
    ),
    "weights: not a dict": (
        lambda: program().load_state_dict(3),
        "expected a dict as states, got 3; states: the values by name, in the form of",
    ),
    "weights: module": (
        lambda: program().load_state_dict(NET),
        "expected a dict as states, got a Sequential; states: the values by name, in",
    ),
    "weights: names": (
        lambda: program().load_state_dict({3: X}),
        "expected weights of all parameters and buffers, got none of 0.weight, 0.bias, 2.weigh",
    ),
    "weights: shape": (
        weights(lambda s: s.update({"0.bias": torch.ones(9)})),
        "expected 0.bias of [8], got [9]",
    ),
    "weights: surplus": (
        weights(lambda s: s.update({"9.bias": torch.ones(9)})),
        "expected weights of the module alone, got 9.bias",
    ),
    "file: number": (
        lambda: program().load_weights(3),
        "expected a text or a path as path, got 3; path: a `.safetensors` file, the index of",
    ),
    "file: state_dict": (
        lambda: program().load_weights(NET.state_dict()),
        "expected a text or a path as path, got an OrderedDict; path: a `.safetensors` file,",
    ),
    "file: no weights": (
        lambda: program().load_weights(__file__),
        "test_wrong_runs.py: expected tensors by their names, got a file that torch.load takes",
    ),
    "file: no folder to write to": (
        lambda: program().save_weights(f"{FOLDER}/no/weights.safetensors"),
        "cannot write",
    ),
    "file: folder": (
        lambda: program().load_weights(FOLDER),
        "expected one of model.safetensors, model.safetensors.index.json, pytorch_model.bin",
    ),
    "file: empty": (
        file("e.safetensors", b""),
        "expected a file of weights, got Error while deserializing header: header too small",
    ),
    "file: broken": (
        file("b.safetensors", b"\xff" * 100),
        "expected a file of weights, got Error while deserializing header: header too large",
    ),
    "file: header": (
        file("h.safetensors", (8).to_bytes(8, "little") + b'{"a": 3}'),
        "expected a file of weights, got Error while deserializing header: invalid JSON in hea",
    ),
    "file: index json": (
        file("n.safetensors.index.json", b"{"),
        "n.safetensors.index.json: expected an index with a weight_map of files beside it",
    ),
    "file: index part": (
        file("k.safetensors.index.json", b'{"weight_map": {"0.weight": "k-1.safetensors"}}'),
        "k.safetensors.index.json cannot be read: No such file or directory",
    ),
    "file: write": (
        lambda: program().save_weights(FOLDER / "no" / "x.safetensors"),
        "x.safetensors: No such file or directory",
    ),
    "load: file": (lambda: shardir.load(__file__), "is a file, not a compiled directory"),
    "load: folder": (
        lambda: shardir.load(FOLDER),
        "has no plan.json: it is not a compiled program",
    ),
    "save: file": (
        lambda: program().save(__file__),
        "expected a directory, got the file ",
    ),
    "save: number": (
        lambda: program().save(3),
        "expected a text or a path as directory, got 3",
    ),
    "run: shape": (
        lambda: program().save(FOLDER / "o", [(X[:4], Y[:4])]),
        "expected input of [8, 4] in batch 0, got [4, 4]",
    ),
    "run: dtype": (
        lambda: program().save(FOLDER / "o", [(X.long(), Y)]),
        "expected input of torch.float32 in batch 0, got torch.int64",
    ),
    "run: labels missing": (
        lambda: program().save(FOLDER / "o", [X]),
        "expected input, labels in batch 0, got input; give (inputs, labels) as the examples",
    ),
    "run: labels out": (
        lambda: program().save(FOLDER / "o", [(X, Y, Y)]),
        "expected input, labels in batch 0, got input, input_1, input_2; give (inputs, labels)",
    ),
    "run: keys": (
        batch({"a": X, "c": X}),
        "expected a, b in batch 0, got a, c; give inputs as the examples were given",
    ),
    "run: too many": (
        batch((X, X, X)),
        "expected a, b in batch 0, got a, b, input_2; give inputs as the examples were given",
    ),
    "run: f64": (
        batch((X, X.double())),
        "expected b of torch.float32 in batch 0, got torch.float64; use .to(torch.float32)",
    ),
    "run: no inputs": (
        lambda: without_inputs().run([()], steps=1),
        "expected no batches, since the module has no inputs; use run(steps=...)",
    ),
    "run: number": (batch((X, 2.0)), "expected b of [8, 4] in batch 0, got 2.0; compile with"),
    "run: numpy": (
        batch((X, X.numpy())),
        "batch 0: expected a dense tensor as b, got a ndarray; use torch.as_tensor",
    ),
    "run: meta": (
        batch((X, X.to("meta"))),
        "expected the values of b in batch 0, got the meta device; pass batches with values",
    ),
    "run: none": (batch(None), "batch 0: expected inputs: a tensor, a tuple or a dict, got none"),
    "run: one of two": (
        lambda: two().save(FOLDER / "o", {"a": X, "b": X}),
        "expected a list or an iterator as batches, got a dict; batches: one for each step",
    ),
    "run: empty": (lambda: two().save(FOLDER / "o", []), "expected batches, got none"),
    "run: another constant": (
        lambda: compiled(Two(), (X, 2.0), labels=None, loss=None).save(FOLDER / "o", [(X, 3.0)]),
        "expected b = 2.0 in batch 0, as in the examples, got 3.0; compile with a tensor in its",
    ),
    "run: inference": (
        lambda: inference().run([X], steps=1),
        "expected a training step for batches, got a program of forward; call it: shardir.load(",
    ),
    "run: too few": (
        lambda: program().run(iter([(X, Y)]), steps=3),
        "expected the batches of 3 steps, got those of 1; pass steps=1, or a list or a loader,",
    ),
    "run: local": (
        lambda: two().run([[(X, X)]], steps=1, local=True),
        "expected batches of a part for each of 2 ranks, got 1",
    ),
    "run: backend": (
        lambda: program().run([(X, Y)], backend="glooo"),
        "option backend of a run: expected one of gloo, shm, nccl, got glooo",
    ),
    "run: nan": (
        lambda: program().run([(X * float("nan"), Y)], steps=1),
        "got nan in step 1: batches of Python come once; --detect-anomaly finds the first such",
    ),
    "run: tensor": (
        lambda: program().save(FOLDER / "o", X),
        "expected input, labels in batch 0, got input; give (inputs, labels) as the examples",
    ),
    "run: not iterable": (
        lambda: program().save(FOLDER / "o", 3),
        "expected a list or an iterator as batches, got 3; batches: one for each step",
    ),
    "run: unknown option": (
        lambda: program().run([(X, Y)], stepz=3),
        "a run has no option stepz; did you mean steps?",
    ),
    "run: steps float": (
        lambda: program().run([(X, Y)], steps=1.5),
        "option steps of a run: expected int, got 1.5",
    ),
    "run: steps text": (
        lambda: program().run([(X, Y)], steps="3"),
        "option steps of a run: expected int, got '3'",
    ),
    "cost: cluster": (
        lambda: program().cost(cluster="h300"),
        "expected a cluster, got h300; use a readable file or ascend910, gloo, h100, h200, "
        "pod2048, shm",
    ),
    "cost": (lambda: program().cost("nope"), "expected a function of step, got nope"),
    "explain: number": (lambda: program().explain(3), "expected a text as names, got 3"),
    "explain: name": (
        lambda: program().explain("0.wieght"),
        "expected names of values, or of modules, with layouts, got 0.wieght; the nearest names "
        "are 0.weight",
    ),
}


@pytest.mark.parametrize("name", sampled(WRONG, 18))
def test_a_wrong_use_has_one_message(name: str) -> None:
    assert_one_message(*WRONG[name])
