"""Wrong uses of compiled modules: each has one message with what was expected, found, and a fix."""

import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardir
from shardir.diagnostics import ShardirError

X, Y = torch.randn(8, 4), torch.randint(3, (8,))
CROSS_ENTROPY = nn.functional.cross_entropy
SCHEDULERS = torch.optim.lr_scheduler
FOLDER = Path(__file__).parent


def net() -> Any:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


NET = net()
SGD = torch.optim.SGD(NET.parameters(), lr=0.1)


class Tripled(torch.autograd.Function):
    """A function whose backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0] * 3


class Written(nn.Module):
    """A module of a parameter, and a function of it and of the input."""

    def __init__(self, function: Callable[[Any, Any], Any]):
        super().__init__()
        self.w, self.function = nn.Parameter(torch.ones(4)), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def compiled(model: Any = NET, inputs: Any = X, **options: Any) -> Any:
    given = {"labels": Y, "loss": CROSS_ENTROPY, "optimizer": "sgd, lr = 0.1"}
    return shardir.compile(model, inputs, **(given | options))


@cache
def program() -> Any:
    return compiled(mesh="dp = 2")


def exported(function: Callable[[Any, Any], Any]) -> Any:
    return compiled(Written(function), labels=None, loss=None)


def optimized(kind: Callable[..., Any], **options: Any) -> Callable[[], object]:
    return lambda: compiled(optimizer=kind(NET.parameters(), **options))


def weights(change: Callable[[dict[str, Any]], object]) -> Callable[[], object]:
    def load() -> None:
        states = program().state_dict()
        change(states)
        program().load_state_dict(states)

    return load


def file(name: str, content: bytes) -> Callable[[], object]:
    def load() -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_bytes(content)
            program().load_weights(path)

    return load


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "inputs: shape": (
        lambda: compiled(inputs=torch.randn(8, 5)),
        "got RuntimeError in '0': a and b must have same reduction dim, but got [8, 5] X [4, 8",
    ),
    "inputs: too many": (
        lambda: compiled(inputs=(X, X)),
        "got TypeError: Sequential.forward() takes 2 positional arguments but 3 were given",
    ),
    "inputs: none": (
        lambda: compiled(inputs=()),
        "got TypeError: Sequential.forward() missing 1 required positional argument: 'input'",
    ),
    "inputs: keyword": (
        lambda: compiled(inputs={"y": X}),
        "got TypeError: Sequential.forward() got an unexpected keyword argument 'y'",
    ),
    "inputs: numpy": (
        lambda: compiled(inputs=(X.numpy(),)),
        "got ValueError: Unsupported input type <class 'numpy.ndarray'>. Export only supports",
    ),
    "inputs: string": (
        lambda: compiled(inputs="x"),
        "expected example inputs: a tensor, a tuple or a dict, got 'x'",
    ),
    "labels: shape": (
        lambda: compiled(labels=Y[:4]),
        "got ValueError: Expected input batch_size (8) to match target batch_size (4).",
    ),
    "labels: floats": (
        lambda: compiled(labels=Y.float()),
        "got RuntimeError: gather(): Expected dtype int32/int64 for index, but got torch.float",
    ),
    "labels: surplus": (
        lambda: compiled(labels=(Y, Y)),
        "got AssertionError: weight tensor should be defined either for all 3 classes or no cl",
    ),
    "loss: not scalar": (
        lambda: compiled(loss=partial(CROSS_ENTROPY, reduction="none")),
        "expected a scalar tensor of the loss function, got a tensor of [8]",
    ),
    "loss: text": (
        lambda: compiled(loss="cross_entropy"),
        "expected a loss function of the outputs and the labels, got 'cross_entropy'",
    ),
    "loss: none returned": (
        lambda: compiled(loss=lambda o, y: None),
        "expected a scalar tensor of the loss function, got none",
    ),
    "loss: python number": (
        lambda: compiled(loss=lambda o, y: 3.0),
        "expected a scalar tensor of the loss function, got a float",
    ),
    "loss: integer": (
        lambda: compiled(loss=lambda o, y: o.argmax()),
        "[G2] expected @forward to return a loss of floats, got i64",
    ),
    "loss: raises": (
        lambda: compiled(loss=lambda o, y: o.foo),
        "expected a module that torch.export takes, got AttributeError",
    ),
    "model: class": (
        lambda: compiled(nn.Linear),
        "expected text or a module, got <class 'torch.nn.modules.linear.Linear'>",
    ),
    "model: no parameters": (
        lambda: compiled(nn.Sequential(nn.ReLU())),
        "expected parameters that require gradients, of which the loss depends, got none",
    ),
    "model: frozen": (
        lambda: compiled(nn.Linear(4, 3).requires_grad_(False)),
        "expected parameters that require gradients, of which the loss depends, got none",
    ),
    "option unknown": (
        lambda: compiled(optimiser="sgd"),
        "expected an option of compile, got optimiser; did you mean optimizer?",
    ),
    "optimizer: unknown text": (
        lambda: compiled(optimizer="adamz, lr = 0.1"),
        "expected a train.optimizer of adafactor, adam, adamw, lamb, lars, momentum, nesterov,",
    ),
    "optimizer: option text": (
        lambda: compiled(optimizer="sgd, rate = 0.1"),
        "expected as option of sgd one of lr, weight_decay, got rate",
    ),
    "optimizer: negative lr": (
        lambda: compiled(optimizer="sgd, lr = -1"),
        "[G10] expected lr to be at least 0, got -1.0; use a number of the range",
    ),
    "optimizer: class": (
        lambda: compiled(optimizer=torch.optim.AdamW),
        "expected an optimizer of torch.optim, AdamW, Adam, SGD, Adafactor, or a text such as",
    ),
    "optimizer: number": (
        lambda: compiled(optimizer=0.1),
        "expected an optimizer of torch.optim, AdamW, Adam, SGD, Adafactor, or a text such as",
    ),
    "optimizer: maximize": (
        optimized(torch.optim.AdamW, maximize=True),
        "expected an optimizer without maximize, got maximize=True",
    ),
    "optimizer: dampening": (
        optimized(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
        "expected an SGD without dampening, got 0.1",
    ),
    "optimizer: centered": (
        optimized(torch.optim.RMSprop, centered=True),
        "expected an optimizer of torch.optim, AdamW, Adam, SGD, Adafactor, or a text such as",
    ),
    "optimizer: others parameters": (
        lambda: compiled(optimizer=torch.optim.SGD(net().parameters(), lr=0.1)),
        "expected parameters of the module, got another one of [8, 4] in the optimizer",
    ),
    "optimizer: betas by group": (
        lambda: compiled(
            optimizer=torch.optim.AdamW(
                [{"params": [NET[0].weight], "betas": (0.8, 0.9)}, {"params": [NET[2].weight]}]
            )
        ),
        "expected groups that differ in lr and weight_decay alone, got others: adamw, lr = {lr",
    ),
    "optimizer: partial": (
        lambda: compiled(optimizer=torch.optim.SGD([NET[0].weight], lr=0.1)),
        "expected an optimizer of all parameters that require gradients, got one without 0.bia",
    ),
    "scheduler: with text": (
        lambda: compiled(scheduler=SCHEDULERS.StepLR(SGD, 3)),
        "expected an optimizer of torch.optim with a scheduler, got a text",
    ),
    "scheduler: another": (
        lambda: compiled(
            optimizer=torch.optim.SGD(NET.parameters(), lr=0.1), scheduler=SCHEDULERS.StepLR(SGD, 3)
        ),
        "expected the scheduler of the optimizer, got that of another one",
    ),
    "scheduler: unknown": (
        lambda: compiled(optimizer=SGD, scheduler=SCHEDULERS.CyclicLR(SGD, 0.1, 0.2)),
        "expected a scheduler of torch.optim.lr_scheduler, CosineAnnealingLR, PolynomialLR, St",
    ),
    "mesh: number": (
        lambda: compiled(mesh=4),
        'expected a mesh: "dp = 2, tp = 4" or a dict, got 4',
    ),
    "mesh: zero": (
        lambda: compiled(mesh="dp = 0"),
        "expected a size of at least 1 for axis dp, got 0",
    ),
    "mesh: twice": (
        lambda: compiled(mesh="dp = 2, dp = 2"),
        "expected axis dp once in the mesh, got it twice",
    ),
    "cluster: unknown": (
        lambda: compiled(mesh="dp = 2", cluster="h300"),
        "expected a ready-made cluster, got h300; did you mean h200?",
    ),
    "mode and pipeline": (
        lambda: compiled(mode="auto", pipeline="train"),
        "expected a mode or a pipeline, got the mode auto and 'train'",
    ),
    "pipeline: unknown": (
        lambda: compiled(pipeline="trian"),
        "there is no pass trian; did you mean train?",
    ),
    "accumulate: int": (lambda: compiled(accumulate=4), "expected a text as accumulate, got 4"),
    "clip: number": (
        lambda: compiled(clip=1.0),
        'expected a text as clip, got 1.0; write clip="norm, max = 1.0"',
    ),
    "loss_scale": (
        lambda: compiled(loss_scale="dynamc"),
        "expected a train.loss_scale of static, dynamic, got 'dynamc'",
    ),
    "plan: axis": (
        lambda: compiled(mesh="dp = 2", plan='"*.weight": [{tp}, {}]'),
        "[L2] dimension 0: expected an axis of mesh @m (dp), got tp",
    ),
    "plan: pattern": (
        lambda: compiled(mesh="dp = 2", plan='"0.wieght": [{dp}, {}]'),
        '[N2] expected a pattern of parameters of the program, got "0.wieght"',
    ),
    "plan: preset": (
        lambda: compiled(mesh="dp = 2", plan="fspd"),
        "[N4] expected a preset, got fspd; did you mean fsdp?",
    ),
    "plan: preset axis": (
        lambda: compiled(mesh="dp = 2", plan="megatron(tp)"),
        "[N4] expected an axis of mesh @m (dp), got tp; correct the axis",
    ),
    "plan: axis twice": (
        lambda: compiled(mesh="dp = 2", plan='"0.weight": [{dp}, {dp}]'),
        "[L3] expected axes that do not overlap, got dp for dimension 0 and dp for dimension 1",
    ),
    "plan: mark": (
        lambda: compiled(mesh="dp = 2", plan='"0.weight": [{dp}, {}], recomptue'),
        "[N1] expected a pattern with layouts or marks, or presets, got 'r'",
    ),
    "plan: file": (
        lambda: compiled(mesh="dp = 2", plan="nowhere.plan"),
        "nowhere.plan cannot be read: No such file or directory",
    ),
    "plan: type": (
        lambda: compiled(mesh="dp = 2", plan=3),
        "expected a plan: its text, presets or a file, got 3",
    ),
    "plan: dict": (
        lambda: compiled(mesh="dp = 2", plan={"0.weight": "[{dp}, {}]"}),
        "expected a plan: its text, presets or a file, got {'0.weight': '[{dp}, {}]'}",
    ),
    "plan: two presets one axis": (
        lambda: compiled(mesh="dp = 2", plan="fsdp(dp) * ddp(dp)"),
        "[N4] expected one preset on axis dp, got fsdp and ddp",
    ),
    "export: data dependent": (
        lambda: exported(lambda m, x: (x if x.sum() > 0 else -x).sum()),
        "expected a module that torch.export takes, got GuardOnDataDependentSymNode",
    ),
    "export: item": (
        lambda: exported(lambda m, x: x[: int(x.sum())].sum() * m.w.sum()),
        "expected a module that torch.export takes, got GuardOnDataDependentSymNode",
    ),
    "export: nonzero": (
        lambda: exported(lambda m, x: (x[x > 0] * m.w[0]).sum()),
        "expected an op that can be imported, got aten.index.Tensor",
    ),
    "export: unique": (
        lambda: exported(lambda m, x: x.unique().sum() * m.w.sum()),
        "expected an op that can be imported, got aten._unique2.default",
    ),
    "export: numpy": (
        lambda: exported(lambda m, x: torch.as_tensor(x.detach().numpy()).sum() * m.w.sum()),
        "expected a module that torch.export takes, got RuntimeError",
    ),
    "export: autograd function": (
        lambda: exported(lambda m, x: Tripled.apply(x * m.w).sum()),
        "expected operations whose gradients follow, got the autograd function Tripled",
    ),
    "export: error of the module": (
        lambda: exported(lambda m, x: x.foo),
        "expected a module that torch.export takes, got AttributeError",
    ),
    "export: backward inside": (
        lambda: exported(lambda m, x: (x * m.w).sum().backward()),
        "expected a scalar loss among the model's outputs, got none",
    ),
    "export: inplace expanded": (
        lambda: exported(
            lambda m, x: m.w.expand(8, 4).clone().sum() + x[:1].expand(8, 4).mul_(2).sum()
        ),
        "got a write to one that repeats elements",
    ),
    "export: dtype": (
        lambda: exported(lambda m, x: (x * m.w).to(torch.float8_e4m3fn).float().sum()),
        "expected a dtype of float64, float32, bfloat16, float16, int64, int32, bool, int16, i",
    ),
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
        "expected weights by their names, got a int; pass a state_dict",
    ),
    "weights: module": (
        lambda: program().load_state_dict(NET),
        "expected weights by their names, got a Sequential; pass a state_dict",
    ),
    "weights: names": (
        lambda: program().load_state_dict({3: X}),
        "expected weights of all parameters and buffers, got none of 0.weight, 0.bias, 2.weigh",
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
        "expected labels of [8] in batch 0, got none",
    ),
    "run: labels out": (
        lambda: program().save(FOLDER / "o", [(X, Y, Y)]),
        "expected labels of [8] in batch 0, got none",
    ),
    "run: tensor": (
        lambda: program().save(FOLDER / "o", X),
        "expected input of [8, 4] in batch 0, got [4]",
    ),
    "run: not iterable": (
        lambda: program().save(FOLDER / "o", 3),
        "expected batches: a list or an iterator, got 3",
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
    "cost": (lambda: program().cost("nope"), "expected a function of step, got nope"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_use_has_one_message(name: str) -> None:
    use, message = WRONG[name]
    with pytest.raises(ShardirError) as e:
        use()
    assert message in str(e.value)
    assert len(str(e.value)) < 600
