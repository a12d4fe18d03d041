"""The comparison of a program with several steps with its module, which torch trains on one
device."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from shardir.api.checks import ModuleCheck, tolerance_of
from shardir.compat.torch import tree_leaves
from shardir.diagnostics import ShardirError
from shardir.dialects.train import arguments
from shardir.frontends.torch.capture import called_with, evaluating, scalars_of
from shardir.frontends.torch.eager import let_schedulers_see, random_op, tensors_of
from shardir.frontends.torch.importer import KEY
from shardir.frontends.torch.steps import Inference, Step, training_only
from shardir.frontends.torch.weights import array_of


def compare_steps(program: Any, rounds: int) -> ModuleCheck:
    """Compare all functions of a program with the module, on the example inputs: in each round each
    step once, in their order; then the other functions, and parameters and buffers. Both begin with
    the values at the compilation, and neither changes.

    Raises:
        ShardirError: they differ, or can't be compared.
    """
    report, tolerance = ModuleCheck(), tolerance_of(program.input_module)
    for name, imported in program.imported.items():
        if KEY in [a.key for a in arguments(imported.function.func)]:
            raise ShardirError(
                "expected functions without random numbers, which are others in torch, got "
                f"{random_op(program.captured[name])} in {name}; compare with p = 0, or in eval()"
            )
    first = replace(program, state=program.state.fresh())
    eager = _TorchSteps(first)
    with first.ranks() as trainer:
        for i in range(rounds):
            for name, step in first.functions.items():
                if isinstance(step, Step):
                    inputs = _inputs(first, name, step)
                    ours, theirs = trainer[name].step(inputs), eager.step(name, step)
                    floor, allowed = 1e-3, tolerance * (i + 1)
                    report.add(f"loss of {name} in round {i + 1}", ours, theirs, allowed, floor)
        for name, f in first.functions.items():
            if isinstance(f, Inference):
                ours = trainer.call(name, _inputs(first, name, f))
                pairs = zip(tree_leaves(ours), eager.outputs(f), strict=True)
                for k, (a, b) in enumerate(pairs):
                    report.add(f"result {k} of {name}", array_of(a), array_of(b), tolerance, 1e-3)
        values = trainer.state_dict()
    theirs = tensors_of(eager.model)
    for name in (name for name in values if name in theirs):
        a, b = array_of(values[name]), array_of(theirs[name].detach())
        report.add(f"{name} after round {rounds}", a, b, tolerance * rounds, 1e-3)
    report.check("the program differs from its module")
    return report


def _inputs(program: Any, name: str, step: Step | Inference) -> dict[str, torch.Tensor]:
    """Return the example inputs of a function by name, repeated for all microbatches."""
    accumulate = step.accumulate if isinstance(step, Step) else None
    count = 1 if accumulate is None else int(accumulate.partition("=")[2].partition(",")[0])
    inputs = program.imported[name].inputs
    return {key: torch.cat([x] * count) if count > 1 else x for key, x in inputs}


class _TorchSteps:
    """A copy of the module and of the optimizers, with the values at the compilation."""

    def __init__(self, program: Any):
        steps: Mapping[str, Any] = program.steps
        if texts := [name for name, s in steps.items() if isinstance(s.optimizer, str)]:
            raise ShardirError(
                f"expected optimizers of torch.optim, which torch has, got a text in {texts[0]}"
            )
        originals = program.model, {n: (s.optimizer, s.scheduler) for n, s in steps.items()}
        try:
            self.model, self.optimizers = deepcopy(originals)
        except Exception as e:
            raise ShardirError(
                f"expected a module that copy.deepcopy copies, got {type(e).__name__}: {e}"
            ) from None
        tensors = tensors_of(self.model)
        with torch.no_grad():
            for name, value in program.values.items():
                if value.is_meta:
                    raise ShardirError(
                        f"expected the values of {name}, got the meta device; load weights first"
                    )
                tensors[name].data = value.detach().clone()
        for name, (optimizer, scheduler) in self.optimizers.items():
            if scheduler is not None:
                let_schedulers_see(optimizer)
            optimizer.load_state_dict(program.forms[name].state_dict(program.state.states, 0))
            if scheduler is not None:
                scheduler.load_state_dict(deepcopy(steps[name].schedule))

    def step(self, name: str, step: Step) -> float:
        """Return the loss of a step, after it."""
        optimizer, scheduler = self.optimizers[name]
        held = [p for group in optimizer.param_groups for p in group["params"]]
        with training_only(self.model, held):
            optimizer.zero_grad()
            loss, _ = scalars_of(called_with(step.function, self.model, step.inputs))
            assert loss is not None
            kind, _, options = (step.accumulate or "mean").partition(",")
            times = int(options.partition("=")[2] or 1) if kind.strip() == "sum" else 1
            (times * loss).backward()
        if step.clip is not None:
            kind, _, bound = step.clip.partition(",")
            by = {"norm": clip_grad_norm_, "value": clip_grad_value_}
            by[kind.strip()](held, float(bound.partition("=")[2]))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        return times * float(loss.detach())

    def outputs(self, f: Inference) -> list[torch.Tensor]:
        """Return the results of a function without training."""
        with torch.no_grad():
            if f.train:
                results = called_with(f.function, self.model, f.inputs)
            else:
                with evaluating(self.model):
                    results = called_with(f.function, self.model, f.inputs)
        return [x for x in tree_leaves(results) if isinstance(x, torch.Tensor)]
