"""The comparison of a program with its module, which torch runs on one device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from xdsl.dialects.builtin import ModuleOp

from shardir import pipelines
from shardir.api.batches import arrays_of, repeat_batches
from shardir.api.compiled import Compiled
from shardir.api.located import run_located
from shardir.api.training_state import TrainingState
from shardir.backend.torch.launch.report import TOLERANCES
from shardir.diagnostics import ShardirError
from shardir.dialects.nn.base import Array
from shardir.dialects.nn.types import element_name, unsharded_type
from shardir.dialects.train import (
    LR_SCALE,
    OWN_LR,
    RULE,
    WEIGHT_DECAY,
    InitAttr,
    OptimizerAttr,
    Role,
    StepOp,
    arg_attrs,
    arguments,
    set_arg_attrs,
    updated_keys,
)
from shardir.frontends.torch.capture import flat_inputs
from shardir.frontends.torch.eager import (
    EagerModule,
    ProgramValues,
    first_difference,
    random_op,
    tensors_of,
    uses_of,
)
from shardir.frontends.torch.importer import FUNCTION, KEY, STEP
from shardir.interpret.evaluator import function, run
from shardir.rewriting.copying import copied
from shardir.rewriting.functions import bodies

OWN_NUMBERS = {LR_SCALE, OWN_LR, WEIGHT_DECAY, RULE}
"""The attributes by which a parameter is not updated as others are."""

LARGE_RATE = 2.0**20
"""A rate of gradient descent by which the change of a parameter has all digits of its gradient."""

SMALL_RATE = 2.0**5
"""A rate for half precision, which holds no values as large as with LARGE_RATE."""

SHARE = 1e-2
"""Gradients below this share of the largest gradient of all parameters count as rounding errors."""


@dataclass(frozen=True)
class ComparedValue:
    """The difference between a value of a program and the module's value."""

    name: str
    largest: float
    """The largest absolute difference."""
    relative: float
    """`largest` relative to the largest value."""
    allowed: float
    """The largest absolute difference that rounding explains."""

    @property
    def agrees(self) -> bool:
        return self.largest <= self.allowed

    def __str__(self) -> str:
        verdict = "agree" if self.agrees else "DIFFER"
        return (
            f"{self.name}: largest difference {self.largest:.2g}, relative {self.relative:.2g} "
            f"(allowed {self.allowed:.2g}): {verdict}"
        )


@dataclass
class ModuleCheck:
    """The comparison of a program with its module.

    Attributes:
        values: losses, gradients, parameters, buffers and outputs, in this order.
        place: the first op whose result differs, if any.
        notes: the values that are not compared, with reasons.
    """

    values: list[ComparedValue] = field(default_factory=list)
    place: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def differing(self) -> list[ComparedValue]:
        return [v for v in self.values if not v.agrees]

    def __str__(self) -> str:
        lines = [str(v) for v in sorted(self.values, key=lambda v: v.agrees)]
        if self.place:
            lines.insert(0, self.place)
        return "\n".join([*lines, *self.notes])

    def check(self, message: str) -> None:
        """Raise ShardirError with a message if values differ."""
        if self.differing:
            names = ", ".join(v.name for v in self.differing[:5])
            more = f" and {len(self.differing) - 5} more" if len(self.differing) > 5 else ""
            raise ShardirError(f"{message} in {names}{more}\n{self}")

    def add(self, name: str, ours: Any, theirs: Any, tolerance: float, floor: float = 0.0) -> None:
        """Compare a value. The tolerance is relative to its largest element, or to `floor` where
        that is larger."""
        a, b = (np.asarray(x, np.float64) for x in (ours, theirs))
        if a.shape != b.shape or not (np.isfinite(a) == np.isfinite(b)).all():
            self.values.append(ComparedValue(name, np.inf, np.inf, 0.0))
            return
        finite = np.isfinite(b)
        most = float(np.abs(b[finite]).max(initial=0.0))
        largest = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
        allowed = tolerance * max(most, floor)
        self.values.append(ComparedValue(name, largest, largest / max(most, 1e-300), allowed))


def compare(program: Any, batches: Sequence[Any], steps: int) -> ModuleCheck:
    """Compare a program with its module. Both start from the values at the compilation, and neither
    changes.

    Raises:
        ShardirError: they differ, or can't be compared.
    """
    comparison = _Comparison(program)
    if program.outputs is None:
        report = comparison.compare_steps(batches, steps)
    else:
        report = comparison.compare_outputs(batches)
    report.check("the program differs from its module")
    return report


def tolerance_of(module: ModuleOp) -> float:
    """Return the relative difference that rounding explains: that of the narrowest floats."""
    kinds = [element_name(t.element_type) for t in _result_types(module)]
    return max((TOLERANCES[k] for k in kinds if k in TOLERANCES), default=0.0)


class _Comparison:
    def __init__(self, program: Any):
        self.program, self.eager, self.report = program, program.eager, ModuleCheck()
        if KEY in [a.key for a in arguments(program.imported.function.func)]:
            raise ShardirError(
                "expected a module without random numbers, which are others in torch, got "
                f"{random_op(self.eager.captured)}; compare it with p = 0, or in eval()"
            )
        self.first: TrainingState = program.state.fresh()
        self.tolerance = tolerance_of(program.input_module)

    def compare_outputs(self, batches: Sequence[Any]) -> ModuleCheck:
        """Compare the outputs of the first batch, and the buffers after it."""
        trial = replace(self.program, state=self.first)
        copy = self.eager.copy_with(self.first.values)
        inputs = batches[0]
        with torch.no_grad():
            theirs = copy.outputs(inputs)
        args, named = ((), inputs) if isinstance(inputs, Mapping) else (
            (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs), {})  # fmt: skip
        ours = trial(*args, **{**self.eager.keywords, **named})
        pairs = zip(_tensors(ours), _tensors(theirs), strict=True)
        for i, (a, b) in enumerate(pairs):
            self.report.add(f"output {i}", _array(a), _array(b), self.tolerance)
        self._compare_states("after a call", trial.state.values, copy)
        self._find_first_difference(copy, batches[0], None)
        return self.report

    def compare_steps(self, batches: Sequence[Any], steps: int) -> ModuleCheck:
        """Compare the first `steps` steps."""
        op = next(op for op in self.program.input_module.body.ops if isinstance(op, StepOp))
        if op.sync is not None:
            raise ShardirError(
                "expected a program whose devices agree after each step, got one with sync=...; "
                "compare it without"
            )
        count, is_mean = op.microbatches, True
        over_tokens = op.accumulate is not None and op.accumulate.kind == "tokens"
        if op.accumulate is not None:
            is_mean = op.accumulate.averages
            if over_tokens and count > 1 and any(updated_keys(op.find())):
                raise ShardirError(
                    "expected a module without buffers that change, since torch runs all "
                    "microbatches of accumulate <tokens> as one batch, got some; compare it "
                    "without microbatches"
                )
        repeated = repeat_batches(batches)
        used = [next(repeated)[1] for _ in range(count * steps)]
        form = self.program.optimizer
        states = None if form is None else form.state_dict(self.first.states, 0)
        copy = self.eager.copy_with(self.first.values, states)
        by_step = [[self._pair(x) for x in used[i * count : (i + 1) * count]] for i in range(steps)]
        if over_tokens:
            by_step = [[_concatenate(pairs)] for pairs in by_step]
        loss, gradients = copy.gradients(by_step[0], is_mean)
        self._compare_gradients(used[:count], loss, gradients)
        if self.report.differing:
            self.report.notes.append("steps are not compared: their gradients differ")
        elif copy.optimizer is None:
            self.report.notes.append(
                "steps are not compared: the optimizer is a text, which torch does not have"
            )
        else:
            self._compare_updates(copy, used, by_step, is_mean, gradients)
        copy = self.eager.copy_with(self.first.values, states)
        self._find_first_difference(copy, used[0], loss)
        return self.report

    def _pair(self, batch: Any) -> tuple[Any, Any]:
        """Return the inputs and the labels of a batch."""
        labelled = any(n.startswith("labels") for n, _ in self.program.imported.inputs)
        is_pair = isinstance(batch, tuple | list) and len(batch) == 2
        return (batch[0], batch[1]) if is_pair and labelled else (batch, None)

    def _compare_gradients(
        self, batches: list[Any], loss: float, theirs: dict[str, torch.Tensor]
    ) -> None:
        """Compare the loss and the gradients of the first step. The program's gradients are the
        changes of its parameters by gradient descent."""
        is_half = any(x.dtype is torch.float16 for x in self.first.values.values())
        rate = SMALL_RATE if is_half else LARGE_RATE
        descent = _with_gradient_descent(self.program.input_module, rate, one_microbatch=False)
        trial = replace(
            self.program, **_run_passes_again(self.program, descent), state=self.first.fresh()
        )
        report = trial.run(batches, steps=1, allow_nan=True)
        self.report.add("loss of step 1", report.losses[STEP][0], loss, self.tolerance, 1e-3)
        parameters = {a.key for a in arguments(self.program.imported.function.func)
                      if a.role is Role.PARAMETER}  # fmt: skip
        most = max((float(g.abs().max()) for g in theirs.values() if g.numel()), default=0.0)
        for name, before in self.first.values.items():
            if name in parameters:
                ours = (_array(before).astype(np.float64) - _array(trial.values[name])) / rate
                zero = torch.zeros_like(before)
                self.report.add(f"gradient of {name}", ours, _array(theirs.get(name, zero)),
                                self.tolerance, SHARE * most)  # fmt: skip

    def _compare_updates(
        self, copy: EagerModule, used: list[Any], by_step: list[Any], is_mean: bool,
        gradients: Mapping[str, torch.Tensor],
    ) -> None:  # fmt: skip
        """Compare parameters and buffers after the first step, and the losses of later steps."""
        trial = replace(self.program, state=self.first.fresh())
        count = len(used) // len(by_step)
        trial.run(used[:count], steps=1, allow_nan=True)
        copy.update()
        self._compare_states("after step 1", trial.values, copy, gradients)
        losses = []
        for batches in by_step[1:]:
            losses.append(copy.gradients(batches, is_mean)[0])
            copy.update()
        if losses:
            ours = trial.run(used[count:], steps=len(losses), allow_nan=True).losses[STEP]
            for i, (a, b) in enumerate(zip(ours, losses, strict=True)):
                self.report.add(f"loss of step {i + 2}", a, b, self.tolerance * (i + 2), 1e-3)

    def _compare_states(
        self, when: str, values: Mapping[str, torch.Tensor], copy: EagerModule,
        gradients: Mapping[str, torch.Tensor] = {},
    ) -> None:  # fmt: skip
        """Compare parameters and buffers, except elements whose gradients are rounding errors: an
        optimizer that normalises gradients amplifies them to full steps."""
        theirs = tensors_of(copy.model)
        most = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
        for name, ours in values.items():
            if name not in theirs:
                continue
            a, b = _array(ours), _array(theirs[name])
            if name in gradients:
                noise = np.abs(_array(gradients[name])) <= self.tolerance * SHARE * most
                a = np.where(noise, b, a)
            self.report.add(f"{name} {when}", a, b, self.tolerance, 1e-3)

    def _find_first_difference(self, copy: EagerModule, batch: Any, loss: float | None) -> None:
        """If values differ, report the first op whose result differs."""
        if not self.report.differing:
            return
        try:
            values = ProgramValues(10 * self.tolerance)
            self._evaluate(batch, values)
            tensors = dict(flat_inputs(copy.model, *self._inputs_and_labels(batch)))
            if loss is not None:
                loss, _ = copy.gradients([self._pair(batch)], True)
            copy = self.eager.copy_with(
                self.first.values,
                None
                if copy.optimizer is None
                else self.program.optimizer.state_dict(self.first.states, 0),
            )
            place = first_difference(self.eager.captured, copy, tensors, values, loss)
        except Exception as e:  # of torch or numpy: the comparison itself stands
            self.report.notes.append(f"no op is named: {type(e).__name__}: {e}")
            return
        prefix = "gradient of "
        parameters = [v.name.removeprefix(prefix) for v in self.report.differing
                      if v.name.startswith(prefix)]  # fmt: skip
        if not place and parameters:
            place = f"first at the gradient of {uses_of(self.eager.captured, parameters[0])}"
        self.report.place = place

    def _inputs_and_labels(self, batch: Any) -> tuple[Any, Any]:
        inputs, labels = self._pair(batch)
        if self.eager.keywords and isinstance(inputs, Mapping):
            inputs = {**self.eager.keywords, **inputs}
        return inputs, labels

    def _evaluate(self, batch: Any, values: ProgramValues) -> None:
        """Evaluate the single-device program in numpy, and record its `values`."""
        source, name = self.program.input_module, FUNCTION
        if self.program.outputs is None:
            source, name = _with_gradient_descent(source, SMALL_RATE, one_microbatch=True), STEP
        module = copied(source)
        for p in pipelines.build("single-device"):
            p.apply(self.program.context, module)
        f, inputs = function(module, name), iter(arrays_of(self.program.imported, 0, batch))
        args = [next(inputs) if a.role is Role.INPUT else self._value(a) for a in arguments(f)]
        run(module, name, args, values.add)

    def _value(self, argument: Any) -> Array:
        if argument.key in self.first.values:
            return _array(self.first.values[argument.key])
        assert isinstance(argument.init, InitAttr)
        return np.asarray(argument.init.values["value"])


def _with_gradient_descent(source: ModuleOp, rate: float, one_microbatch: bool) -> ModuleOp:
    """Return a copy of a program whose step is plain gradient descent."""
    module = copied(source)
    for op in module.body.ops:
        if isinstance(op, StepOp):
            op.properties["optimizer"] = OptimizerAttr(
                OptimizerAttr.from_text(f"sgd, lr = {rate!r}")
            )
            for name in ("clip", "loss_scale", "ema", "separate_update"):
                op.properties.pop(name, None)
            if one_microbatch:
                for name in ("accumulate", "pipeline"):
                    op.properties.pop(name, None)
    for f, _ in bodies(module):
        attributes = [
            {k: v for k, v in attrs.items() if k not in OWN_NUMBERS} for attrs in arg_attrs(f)
        ]
        set_arg_attrs(f, attributes)
    return module


def _run_passes_again(program: Compiled, source: ModuleOp) -> dict[str, Any]:
    """Run the passes of a program on another module; return the changed fields of the program."""
    module, original = copied(source), source

    def work() -> None:
        nonlocal original
        for p in program.passes:
            p.apply(program.context, module)
            if pipelines.runs_on_one_device(p):
                original = copied(module)

    run_located(program.source, work)
    return {"module": module, "original": original, "input_module": source}


def _concatenate(batches: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Concatenate batches, pairs of inputs and labels, along dimension 0."""
    from shardir.compat.torch import tree_map

    return tree_map(
        lambda *parts: torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].dim()
        else parts[0],
        *batches,
    )  # fmt: skip


def _result_types(module: ModuleOp) -> list[Any]:
    return [unsharded_type(r) for f, _ in bodies(module) for op in f.body.block.ops
            for r in op.results]  # fmt: skip


def _array(x: Any) -> Array:
    from shardir.frontends.torch.weights import array_of

    return array_of(x) if isinstance(x, torch.Tensor) else np.asarray(x)


def _tensors(tree: Any) -> list[torch.Tensor]:
    from shardir.compat.torch import tree_leaves

    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
