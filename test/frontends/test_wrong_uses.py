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
from shardir.backend.runs import LaunchError
from shardir.diagnostics import ShardirError

X, Y = torch.randn(8, 4), torch.randint(3, (8,))
CROSS_ENTROPY = nn.functional.cross_entropy
SCHEDULERS = torch.optim.lr_scheduler
FOLDER = Path(__file__).parent


def net() -> Any:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


NET = net()
SGD = torch.optim.SGD(NET.parameters(), lr=0.1)
IN_ORDER: Any = (NET, X, Y, CROSS_ENTROPY)


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


def lines(plan: str) -> Callable[[], object]:
    return lambda: compiled(mesh="dp = 2", plan=plan)


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
    "inputs: shape": (
        lambda: compiled(inputs=torch.randn(8, 5)),
        "got RuntimeError in '0': a and b must have same reduction dim, but got [8, 5] X [4, 8",
    ),
    "inputs: too many": (
        lambda: compiled(inputs=(X, X)),
        "expected the arguments Sequential.forward(input), got 2 in order: too many positional",
    ),
    "inputs: none": (
        lambda: compiled(inputs=()),
        "expected the arguments Sequential.forward(input), got none: missing a required argument:",
    ),
    "inputs: keyword": (
        lambda: compiled(inputs={"y": X}),
        "expected an argument of Sequential.forward, got y; it has input",
    ),
    "inputs: numpy": (
        lambda: compiled(inputs=(X.numpy(),)),
        "expected a dense tensor as input, got a ndarray; use torch.as_tensor",
    ),
    "inputs: string": (
        lambda: compiled(inputs="x"),
        "expected inputs: a tensor, a tuple or a dict, got 'x'",
    ),
    "inputs: f64": (
        lambda: compiled(inputs=X.double()),
        "got torch.float64 and torch.float32; convert one, x.to(torch.float32), or give example",
    ),
    "inputs: i64": (
        lambda: compiled(inputs=X.long()),
        f"expected operands of one dtype of linear in '0' at {__file__}:",
    ),
    "inputs: complex": (
        lambda: compiled(nn.Linear(4, 3), X.to(torch.complex64)),
        "uint8 of input, got torch.complex64; write it with real numbers",
    ),
    "inputs: sparse": (
        lambda: compiled(inputs=X.to_sparse()),
        "expected a dense tensor as input, got torch.sparse_coo; use to_dense()",
    ),
    "inputs: loader": (
        lambda: compiled(inputs=iter([X])),
        "expected inputs: a tensor, a tuple or a dict, got a list_iterator",
    ),
    "inputs: names no text": (
        lambda: compiled(inputs={3: X}),
        "expected an argument of Sequential.forward, got 3; it has input",
    ),
    "inputs: keywords": (
        lambda: compiled(keywords=[X]),
        "expected a dict as keywords, got a list; keywords: further arguments by keyword",
    ),
    "inputs: keyword misspelt": (
        lambda: compiled(inputs={"inputs": X}),
        "expected an argument of Sequential.forward, got inputs; did you mean input?",
    ),
    "labels: missing": (
        lambda: compiled(labels=None),
        "missing a required argument: 'target'; pass labels=..., as many as it takes",
    ),
    "labels: without a loss": (
        lambda: compiled(loss=None),
        "got a tensor of [8, 3]; use loss=..., a function of the outputs and the labels",
    ),
    "labels: numpy": (
        lambda: compiled(labels=Y.numpy()),
        "expected a dense tensor as labels, got a ndarray; use torch.as_tensor",
    ),
    "labels: number": (
        lambda: compiled(labels=3),
        "argument 'target' (position 2) must be Tensor, not int; correct the module, the loss or",
    ),
    "loss: class": (
        lambda: compiled(loss=nn.CrossEntropyLoss),
        "expected a loss function, got the class CrossEntropyLoss; make one: CrossEntropyLoss()",
    ),
    "loss: without labels": (
        lambda: compiled(loss=lambda o: o.sum()),
        "expected the arguments <lambda>(o), got 2 in order: too many positional arguments",
    ),
    "loss: without gradient": (
        lambda: compiled(loss=lambda o, y: CROSS_ENTROPY(o.detach(), y)),
        "expected parameters that require gradients, of which the loss depends, got none; use",
    ),
    "loss: of inference": (
        lambda: compiled(train=False),
        "expected no loss with train=False, got a function; drop loss=...",
    ),
    "optimizer: of inference": (
        lambda: compiled(train=False, labels=None, loss=None),
        "expected no optimizer with train=False, got 'sgd, lr = 0.1'; drop optimizer=...",
    ),
    "stages: of inference": (
        lambda: shardir.compile(NET, X, train=False, clip="norm, max = 1.0"),
        "expected no clip with train=False, got 'norm, max = 1.0'; drop clip=...",
    ),
    "train: text": (lambda: compiled(train="no"), "expected True or False as train, got 'no'"),
    "derived: text": (
        lambda: compiled(derived="Tripled"),
        "expected a list as derived, got 'Tripled'; derived: the names of autograd functions",
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
        "expected a function as loss, got 'cross_entropy'; loss: a function of the outputs, and",
    ),
    "loss: none returned": (
        lambda: compiled(loss=lambda o, y: None),
        "expected a scalar tensor of the loss function, got none",
    ),
    "loss: python number": (
        lambda: compiled(loss=lambda o, y: 3.0),
        "expected a scalar tensor of the loss function, got 3.0; reduce it: losses.mean()",
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
        "expected text or a module, got the class Linear; make one",
    ),
    "model: function": (
        lambda: compiled(lambda x: x),
        "expected text or a module, got a function; use compile_file for a file",
    ),
    "model: weights": (
        lambda: compiled(NET.state_dict()),
        "expected text or a module, got an OrderedDict; use compile_file for a file",
    ),
    "model: name": (
        lambda: compiled("gpt2"),
        "expected an argument of compile, got labels; it has text_or_module, pipeline,",
    ),
    "model: f64": (
        lambda: compiled(nn.Linear(4, 3).double()),
        "got torch.float32 and torch.float64; convert one, x.to(torch.float64), or give example",
    ),
    "model: complex": (
        lambda: exported(lambda m, x: torch.fft.fft(x * m.w).real.sum()),
        "expected real numbers, got complex ones of aten.fft_fft.default at ",
    ),
    "model: in order": (
        lambda: shardir.compile(*IN_ORDER),
        "expected the arguments compile(model, inputs=..., keywords=..., labels=..., loss=...,",
    ),
    "model: as a file": (
        lambda: shardir.compile_file(NET),
        "expected a text or a path as path, got a Sequential",
    ),
    "model: run": (
        lambda: shardir.run(NET),
        "expected a text or a path or a Compiled as program, got a Sequential",
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
    "option: dynamic shapes": (
        lambda: compiled(mesh="dp = 2", dynamic_shapes={"x": {0: "batch"}}),
        "expected an option of compile, got dynamic_shapes; shapes are static: compile once for",
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
        lambda: compiled(optimizer=SGD, scheduler=SCHEDULERS.LambdaLR(SGD, lambda _: 1.0)),
        "expected the steps of the training for LambdaLR, whose rates are sampled, got none",
    ),
    "mesh: number": (
        lambda: compiled(mesh=4),
        "expected a text or a dict or a Mesh or a Cluster as mesh, got 4; mesh: the axes: `dp = 2",
    ),
    "mesh: sizes": (
        lambda: compiled(mesh={"dp": 2.0}),
        """expected the sizes of axes by their names, {"dp": 2}, got 2.0 of 'dp'""",
    ),
    "mesh: names": (
        lambda: compiled(mesh={0: 2}),
        """expected the sizes of axes by their names, {"dp": 2}, got 2 of 0""",
    ),
    "mesh: no names": (
        lambda: compiled(mesh="2x2"),
        "\"2x2\": expected a mesh: name = size, ..., got '2'",
    ),
    "mesh: list": (
        lambda: compiled(mesh=[2, 2]),
        "expected a text or a dict or a Mesh or a Cluster as mesh, got a list; mesh: the axes:",
    ),
    "cluster: number": (
        lambda: compiled(mesh="dp = 2", cluster=3),
        "expected a text or a Cluster as cluster, got 3; cluster: the name of a ready-made",
    ),
    "mode: unknown": (lambda: compiled(mode="atuo"), "there is no mode atuo; did you mean auto?"),
    "mode: number": (
        lambda: compiled(mode=3),
        "expected a text as mode, got 3; mode: stand_alone, data, hybrid, semi_auto (the default)",
    ),
    "mode: option": (
        lambda: compiled(mode="auto{memroy=1GB}"),
        "pipeline auto has no option memroy; did you mean memory?",
    ),
    "pipeline: list": (
        lambda: compiled(pipeline=["train"]),
        "expected a text as pipeline, got a list; pipeline: the names of passes",
    ),
    "target": (
        lambda: compiled(target="jax"),
        "expected a backend, one of torch, got 'jax'",
    ),
    "strategies: file": (
        lambda: compiled(mesh="dp = 2", save_strategies="no/where"),
        "cannot write no/where: No such file or directory",
    ),
    "mesh: no cluster": (
        lambda: compiled(mesh="h20"),
        'expected a mesh, "dp = 2, tp = 4", or a cluster, got h20; did you mean h200?',
    ),
    "mesh: devices": (
        lambda: compiled(mesh="dp = 2", devices=2),
        "expected devices without a mesh, which has them, got both: 2",
    ),
    "cluster: plan": (
        lambda: compiled(cluster="h200", plan="fsdp"),
        "expected a mesh beside a plan, got none; give mesh=..., or drop plan",
    ),
    "cluster: mode": (
        lambda: compiled(cluster="h200", mode="data"),
        "expected the mode auto, in which a mesh is searched for, got another one",
    ),
    "cluster: twice": (
        lambda: compiled(mesh="h200", cluster="h200"),
        "expected one cluster, got one as mesh and one as cluster",
    ),
    "cluster: devices": (
        lambda: compiled(cluster="h200", devices=10**6),
        "devices, as the cluster has, got 1000000",
    ),
    "plan: offload": (
        lambda: compiled(mesh="dp = 2", plan='"0.weight": offload'),
        'got offload; write the layout in host memory: "PATTERN" : [{axis}, ...] on host',
    ),
    "plan: stage": (
        lambda: compiled(mesh="dp = 2", plan='"0.weight": stage = 0'),
        'got stage; stages are of values: values "PATTERN" : stage = 1',
    ),
    "stages: number": (
        lambda: compiled(stages=2),
        "expected a text as stages, got 2; stages: `1f1b, ranks = 4`",
    ),
    "stages: microbatches": (
        lambda: compiled(stages="dualpipev, ranks = 2, chunks = 2"),
        "dualpipev: expected at least 4 microbatches, as many as stages, got 1; use 4 or more",
    ),
    "stages: unknown": (
        lambda: compiled(stages="2f2b, ranks = 2"),
        "\"2f2b, ranks = 2\": expected the name of a schedule, got '2f2b'; use gpipe, 1f1b,",
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
    "accumulate: int": (
        lambda: compiled(accumulate=4),
        "expected a text as accumulate, got 4; accumulate: as in a step of the text",
    ),
    "clip: number": (
        lambda: compiled(clip=1.0),
        "expected a text as clip, got 1.0; clip: `norm, max = 1.0`",
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
        "strategy, uses, got recomptue; did you mean recompute?",
    ),
    "plan: file": (
        lambda: compiled(mesh="dp = 2", plan="nowhere.plan"),
        "expected a plan, got nowhere.plan, which is neither a file nor presets; write",
    ),
    "plan: no mesh": (
        lambda: compiled(plan="fsdp"),
        "expected a mesh for the layouts of @forward, got none; declare one: dist.mesh @m <dp",
    ),
    "plan: preset in a product": (
        lines("megatorn(dp)"),
        "plan:1:1: error: [N4] expected a preset, got megatorn; did you mean megatron?",
    ),
    "plan: sum": (
        lines("megatron(dp) + fsdp(tp)"),
        "expected a plan, got megatron(dp) + fsdp(tp), which is neither a file nor presets",
    ),
    "plan: dimensions": (
        lines('"0.weight" : [{dp}, {}, {}]'),
        "[L1] expected a layout of 2 dimensions, as the tensor has, got 3; write an entry for each",
    ),
    "plan: dimensions of one": (
        lines('"*" : [{}, {dp}]'),
        'plan:1:1: error: "0.bias" of @forward: [L1] expected a layout of 1 dimensions, as the te',
    ),
    "plan: no quotes": (
        lines("0.weight : [{dp}]"),
        "plan:1:1: error: [N1] expected a pattern with layouts or marks, or presets, got '0'",
    ),
    "plan: bracket": (
        lines('"0.weight" : [{dp]'),
        "got ']'; write \"PATTERN\" : [{axis}, ...]",
    ),
    "plan: input": (
        lines('inputs "imput" : [{dp}]'),
        '[N2] expected a pattern of inputs of the program, got "imput"; the nearest names are',
    ),
    "plan: states of inputs": (
        lines("inputs : states [{dp}]"),
        "[N1] expected layout, recompute or uses of inputs, got states; write",
    ),
    "plan: type": (
        lambda: compiled(mesh="dp = 2", plan=3),
        "expected a text or a path or a dict or a list as plan, got 3; plan: layouts and marks",
    ),
    "plan: dict": (
        lambda: compiled(mesh="dp = 2", plan={"0.weight": ["dp"]}),
        'expected a line of a plan, "fsdp(dp)", or a pair, ("*.weight", "[{dp}]"), got a tuple',
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
        "expected shapes that do not depend on the data, got a result of aten.index.Tensor",
    ),
    "export: unique": (
        lambda: exported(lambda m, x: x.unique().sum() * m.w.sum()),
        "expected shapes that do not depend on the data, got a result of aten._unique2.default",
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
        "expected a dict as states, got 3; states: the values by the module's names for them",
    ),
    "weights: module": (
        lambda: program().load_state_dict(NET),
        "expected a dict as states, got a Sequential; states: the values by the module's names",
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
        "expected a text or a path as path, got 3; path: `.safetensors`, one of several with an",
    ),
    "file: state_dict": (
        lambda: program().load_weights(NET.state_dict()),
        "expected a text or a path as path, got an OrderedDict; path: `.safetensors`, one of",
    ),
    "file: no weights": (
        lambda: program().load_weights(__file__),
        "test_wrong_uses.py: expected tensors by their names, got a file that torch.load takes",
    ),
    "file: no folder to write to": (
        lambda: program().save_weights(f"{FOLDER}/no/weights.safetensors"),
        "cannot write",
    ),
    "save: file": (
        lambda: program().save(__file__),
        "expected a directory, got the file ",
    ),
    "save: number": (
        lambda: program().save(3),
        "expected a text or a path as directory, got 3",
    ),
    "load: file": (lambda: shardir.load(__file__), "is a file, not a compiled directory"),
    "load: folder": (
        lambda: shardir.load(FOLDER),
        "has no plan.json: it is not a compiled program",
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
        "option backend of a run: expected one of gloo, nccl, got glooo",
    ),
    "run: nan": (
        lambda: program().run([(X * float("nan"), Y)], steps=1),
        "expected a finite loss, got nan in step 1; use a lower learning rate,",
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
        "expected a cluster, got h300; use a readable file or ascend910, gloo, h200, pod2048",
    ),
    "explain: number": (lambda: program().explain(3), "expected a text as names, got 3"),
    "explain: name": (
        lambda: program().explain("0.wieght"),
        "expected names of values, or of modules, with layouts, got 0.wieght; the nearest names "
        "are 0.weight",
    ),
    "cost": (lambda: program().cost("nope"), "expected a function of step, got nope"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_use_has_one_message(name: str) -> None:
    use, message = WRONG[name]
    with pytest.raises((ShardirError, LaunchError)) as e:
        use()
    assert message in str(e.value)
    assert len(str(e.value)) < 600
    assert "Traceback" not in str(e.value)
