"""Wrong optimizers, meshes, clusters, modes and other options: each has one message with a fix."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.extent import sampled
from support.modules.wrong_uses import NET, X, assert_one_message, compiled, net

import shardir

SCHEDULERS = torch.optim.lr_scheduler
SGD = torch.optim.SGD(NET.parameters(), lr=0.1)


def optimized(kind: Callable[..., Any], **options: Any) -> Callable[[], object]:
    return lambda: compiled(optimizer=kind(NET.parameters(), **options))


def hooked() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(NET.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "option: dynamic shapes": (
        lambda: compiled(mesh="dp = 2", dynamic_shapes={"x": {0: "batch"}}),
        "expected an option of compile, got dynamic_shapes; shapes are static: compile once for",
    ),
    "option unknown": (
        lambda: compiled(optimiser="sgd"),
        "expected an option of compile, got optimiser; did you mean optimizer?",
    ),
    "optimizer: of inference": (
        lambda: compiled(train=False, labels=None, loss=None),
        "expected no optimizer with train=False, got 'sgd, lr = 0.1'; drop optimizer=...",
    ),
    "optimizer: unknown text": (
        lambda: compiled(optimizer="adamz, lr = 0.1"),
        "expected a train.optimizer of adafactor, adagrad, adam, adamax, adamw, lamb, lars,",
    ),
    "optimizer: option text": (
        lambda: compiled(optimizer="sgd, rate = 0.1"),
        "expected as option of sgd one of lr, weight_decay, got rate",
    ),
    "optimizer: negative lr": (
        lambda: compiled(optimizer="sgd, lr = -1"),
        "[G10] expected lr to be at least 0, got -1.0; use a number of the range",
    ),
    "optimizer: function": (
        lambda: compiled(optimizer=lambda parameter, gradient, state: parameter),
        "expected a function of the parameters that returns an optimizer, got <lambda>: TypeError",
    ),
    "optimizer: number": (
        lambda: compiled(optimizer=0.1),
        "expected an optimizer of torch.optim, a function (shardir.optimizer), or a text such as",
    ),
    "optimizer: differentiable": (
        optimized(torch.optim.AdamW, differentiable=True),
        "expected an optimizer without differentiable, got differentiable=True",
    ),
    "optimizer: hooks": (
        lambda: compiled(optimizer=hooked()),
        "expected an optimizer without hooks around its step, got some",
    ),
    "optimizer: dampening": (
        optimized(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
        "steps are one function of its states, got SGD, whose step 1 makes another value of the",
    ),
    "optimizer: needs a closure": (
        optimized(torch.optim.LBFGS),
        "expected an update that can be traced, got TypeError in LBFGS: LBFGS.step() missing 1",
    ),
    "optimizer: no switch": (
        lambda: compiled(optimizer="rmsprop, lr = 0.1, centered = 2"),
        "[G10] expected centered to be at least 0 and at most 1, got 2",
    ),
    "optimizer: others parameters": (
        lambda: compiled(optimizer=torch.optim.SGD(net().parameters(), lr=0.1)),
        "expected parameters of the module, got one outside of it, of [8, 4] in the optimizer",
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
        "expected a text or a dict or a Mesh or a Cluster as mesh, got 4; mesh: the axes as a text",
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
        "expected a text or a dict or a Mesh or a Cluster as mesh, got a list; mesh: the axes as",
    ),
    "mesh: no cluster": (
        lambda: compiled(mesh="h20"),
        'expected a mesh, "dp = 2, tp = 4", or a cluster, got h20; did you mean h200?',
    ),
    "mesh: devices": (
        lambda: compiled(mesh="dp = 2", devices=2),
        "expected devices without a mesh, which has them, got both: 2",
    ),
    "mesh: zero": (
        lambda: compiled(mesh="dp = 0"),
        "expected a size of at least 1 for axis dp, got 0",
    ),
    "mesh: twice": (
        lambda: compiled(mesh="dp = 2, dp = 2"),
        "expected axis dp once in the mesh, got it twice",
    ),
    "cluster: number": (
        lambda: compiled(mesh="dp = 2", cluster=3),
        "expected a text or a Cluster as cluster, got 3; cluster: the name or the text",
    ),
    "cluster: plan": (
        lambda: compiled(cluster="h200", plan="fsdp"),
        "expected a mesh beside a plan, got none; give mesh=..., or drop plan",
    ),
    "cluster: mode": (
        lambda: compiled(cluster="h200", mode="data"),
        "expected the mode auto without a mesh, which searches for one, got a mode without a",
    ),
    "cluster: twice": (
        lambda: compiled(mesh="h200", cluster="h200"),
        "expected one cluster, got one as mesh and one as cluster",
    ),
    "cluster: devices": (
        lambda: compiled(cluster="h200", devices=10**6),
        "devices, as the cluster has, got 1000000",
    ),
    "cluster: unknown": (
        lambda: compiled(mesh="dp = 2", cluster="h300"),
        "expected a ready-made cluster, got h300; did you mean h200?",
    ),
    "clip: of inference": (
        lambda: shardir.compile(NET, X, train=False, clip="norm, max = 1.0"),
        "expected no clip with train=False, got 'norm, max = 1.0'; drop clip=...",
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
    "pipeline: unknown": (
        lambda: compiled(pipeline="trian"),
        "there is no pass trian; did you mean train?",
    ),
    "mode and pipeline": (
        lambda: compiled(mode="auto", pipeline="train"),
        "expected a mode or a pipeline, got the mode auto and 'train'",
    ),
    "target": (
        lambda: compiled(target="jax"),
        "expected a backend, one of torch, got 'jax'",
    ),
    "strategies: file": (
        lambda: compiled(mesh="dp = 2", save_strategies="no/where"),
        "cannot write no/where: No such file or directory",
    ),
    "accumulate: int": (
        lambda: compiled(accumulate=4),
        "expected a text as accumulate, got 4; accumulate: `tokens, microbatches = 4`",
    ),
    "clip: number": (
        lambda: compiled(clip=1.0),
        "expected a text as clip, got 1.0; clip: `norm, max = 1.0`",
    ),
    "loss_scale": (
        lambda: compiled(loss_scale="dynamc"),
        "expected a train.loss_scale of static, dynamic, got 'dynamc'",
    ),
}


@pytest.mark.parametrize("name", sampled(WRONG, 16, also=["mesh: number"]))
def test_a_wrong_use_has_one_message(name: str) -> None:
    assert_one_message(*WRONG[name])
