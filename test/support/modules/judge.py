"""The judge of random modules: a module, trained as it is by torch on one device, is the oracle.

judged(module, wanted).kind      right, wrong, warned, crashed, refused, ...
"""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from xdsl.dialects.func import FuncOp

import shardir
from shardir.api.model import CompiledModel
from shardir.diagnostics import ShardirError
from shardir.dialects.train import arguments, updated_keys
from shardir.interpret import run
from shardir.interpret.evaluator import function
from shardir.interpret.values import tensor_type
from support.modules.text import ClassText, ModuleText, Statement, loss_of

STEPS = 3
TOLERANCE = 1e-9
"""Relative to the largest element of a value, and of a gradient at least to 1e-2 of the largest."""
NOISE, GROWN, LARGEST = 1e-9, 1e-6, 1e3
"""A module is drawn again where a change of its inputs by NOISE changes a result by more than
GROWN, as at a kink or a tie, or where an element is larger than LARGEST."""

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: Mapping[str, Optimizer] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    # a large eps: of a gradient that is zero but for rounding the step would have any sign
    # without decay, which torch has for a parameter whose every use is overwritten (models.md)
    "adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-2, weight_decay=0.0),
}
GRADIENT = {"sgd": (".momentum", 0.9, 1.0), "adamw": (".exp_avg", 0.9, 0.1)}
"""The state from which a gradient follows: state = decay * state before + share * gradient."""


@contextmanager
def in_double() -> Iterator[None]:
    """Tensors are f64 where no type is given."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # torch deprecates it
            warnings.filterwarnings("error", "An output with one or more elements was resized")
            yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Trained:
    """The results of a training: the loss and the gradients by step, and the states at its end."""

    losses: list[np.ndarray]
    gradients: list[dict[str, np.ndarray]]
    states: dict[str, np.ndarray]


@dataclass(frozen=True)
class Verdict:
    """The kind of a judgement, with the differences or the message."""

    kind: str
    detail: str = ""
    wrong: frozenset[str] = field(default=frozenset())
    """The kinds of values that are wrong: loss, gradient, parameter, buffer, output, module."""


def states_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module by each of their names."""
    named = model.named_parameters(remove_duplicate=False)
    return {**dict(named), **dict(model.named_buffers(remove_duplicate=False))}


def copied(x: torch.Tensor) -> np.ndarray:
    return x.detach().numpy().copy()


def trained_by_torch(
    model: nn.Module, batches: list[tuple[torch.Tensor, ...]], optimizer: str = "sgd"
) -> Trained:
    """Train a module, and change it. Raises whatever torch raises."""
    used = [p for p in model.parameters() if p.requires_grad]
    steps = OPTIMIZERS[optimizer](used)
    losses, gradients = [], []
    for batch in batches:
        steps.zero_grad()
        loss = loss_of(model(*(x.clone() for x in batch)))
        loss.backward()
        losses.append(copied(loss))
        named = model.named_parameters(remove_duplicate=False)
        gradients.append({name: copied(p.grad) for name, p in named if p.grad is not None})
        steps.step()
        for owner in model.modules():  # a buffer has no history of the step before
            for name, x in owner.named_buffers(recurse=False):
                if x.requires_grad:
                    setattr(owner, name, x.detach())
    return Trained(losses, gradients, {name: copied(x) for name, x in states_of(model).items()})


def compiled(
    model: nn.Module, batch: tuple[torch.Tensor, ...], optimizer: str = "sgd", **options: Any
) -> CompiledModel:
    used = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    inputs = tuple(x.clone() for x in batch)
    program = shardir.compile(model, inputs, loss=loss_of, optimizer=used, **options)
    assert isinstance(program, CompiledModel)
    return program


def trained_by_shardir(
    program: CompiledModel, batches: list[tuple[torch.Tensor, ...]], optimizer: str = "sgd"
) -> Trained:
    """Run the steps of a compiled program in the interpreter."""
    f = function(program.module, "step")
    suffix, decay, share = GRADIENT[optimizer]
    values = {name: copied(x) for name, x in program.values.items()}
    for argument, t in zip(arguments(f), f.function_type.inputs, strict=True):
        if argument.key and argument.key not in values:
            values[argument.key] = np.zeros(tensor_type(t).get_shape())
    losses, gradients = [], []
    for batch in batches:
        given = iter(batch)
        inputs = [copied(next(given)) if a.key is None else values[a.key] for a in arguments(f)]
        results = dict(zip(updated_keys(f), run(program.module, "step", inputs), strict=True))
        losses.append(np.asarray(results.pop(None)))
        gradients.append({
            key.removesuffix(suffix): (x - decay * values[key]) / share
            for key, x in results.items() if key and key.endswith(suffix)
        })  # fmt: skip
        values |= {key: np.asarray(x) for key, x in results.items() if key}
    model = program.imported.model
    held = {id(x): values[name] for name, x in states_of(model).items() if name in values}
    states = {name: held[id(x)] for name, x in states_of(model).items() if id(x) in held}
    return Trained(losses, gradients, states)


def difference(found: np.ndarray, wanted: np.ndarray, scale: float = 0.0) -> float:
    """The largest difference of two arrays, relative to the largest element, or to `scale`."""
    if found.shape != wanted.shape:
        return np.inf
    if wanted.dtype.kind != "f":
        return 0.0 if np.array_equal(found, wanted) else np.inf
    scale = max(np.abs(wanted).max(initial=0.0), scale, 1e-6)
    distance = np.abs(found - wanted).max(initial=0.0)
    return float(distance / scale) if np.isfinite(distance) else np.inf


def differences(
    found: Trained, wanted: Trained, start: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """The differences by kind and name. A gradient that is missing is zero, and a state that the
    program does not have has its first value."""
    out: dict[str, float] = {}
    for i, (x, y) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        out[f"loss {i}"] = difference(x, y, 1.0)
    for i, (ours, theirs) in enumerate(zip(found.gradients, wanted.gradients, strict=True)):
        largest = max((np.abs(g).max(initial=0.0) for g in theirs.values()), default=0.0)
        for name in {*ours, *theirs}:
            if name not in ours and any(
                np.array_equal(g, theirs[name]) for other, g in theirs.items() if other in ours
            ):
                continue  # the gradient of a tied parameter has one of its names
            zero = np.zeros_like(theirs[name] if name in theirs else ours[name])
            x, y = ours.get(name, zero), theirs.get(name, zero)
            out[f"gradient {i} {name}"] = difference(x, y, 1e-2 * largest)
    for name, y in wanted.states.items():
        x = found.states.get(name, start[name])
        out[f"state {name}"] = difference(x, y, 1e-2) if x.dtype == y.dtype else np.inf
    return out


def smooth(module: ModuleText, optimizer: str) -> Trained | None:
    """Torch's results, or None where rounding decides on them. Raises whatever torch raises."""
    batches = module.batches(STEPS)
    wanted = trained_by_torch(module.made(), batches, optimizer)
    near = [tuple(x * (1 + NOISE * torch.linspace(-1, 1, x.numel()).view(x.shape)) for x in b)
            for b in batches]  # fmt: skip
    moved = trained_by_torch(module.made(), near, optimizer)
    values = [
        *wanted.losses,
        *wanted.states.values(),
        *(g for d in wanted.gradients for g in d.values()),
    ]
    if not all(
        np.isfinite(x).all() and np.abs(x).max(initial=0) < LARGEST
        for x in values
        if x.dtype != bool
    ):
        return None
    start = {name: copied(x) for name, x in states_of(module.made()).items()}
    if max(differences(moved, wanted, start).values()) > GROWN:
        return None
    return wanted


def is_defined(module: ModuleText) -> bool:
    """Whether the gradient of torch is that of what was computed: `.data` lets a module change a
    value that the backward part has yet to read, which `detach()` refuses."""
    if not re.search(r"\.data\b", module.body):
        return True
    guarded = [replace(c, init=tuple(replace(s, text=without_data(s.text)) for s in c.init),
                       forward=tuple(replace(s, text=without_data(s.text)) for s in c.forward))
               for c in module.classes]  # fmt: skip
    try:
        trained_by_torch(replace(module, classes=tuple(guarded)).made(), module.batches(1))
    except RuntimeError:
        return False
    return True


def without_data(text: str) -> str:
    """The text with `detach()` for `.data` where it is read, and a write in place where it is
    assigned."""
    text = re.sub(r"(\S+)\.data = (.*)", r"\1.detach().copy_(\2)", text)
    text = re.sub(r"(\S+)\.data ([-+*/]=) (.*)", r"data = \1.detach(); data \2 \3", text)
    return re.sub(r"\.data\b", ".detach()", text)


def outcome(module: ModuleText, optimizer: str = "sgd") -> Trained | None:
    """Torch's results of a module that can be judged, or None."""
    with in_double():
        try:
            wanted = smooth(module, optimizer)
            if wanted is None or not any(
                np.abs(g).max(initial=0) > 1e-6 for g in wanted.gradients[0].values()
            ):
                return None
            return wanted if is_defined(module) else None
        except Exception:  # torch refuses the module, in one of many ways
            return None


def judged(
    module: ModuleText, wanted: Trained, optimizer: str = "sgd", outputs: bool = False,
    ranks: bool = False,
) -> Verdict:  # fmt: skip
    """Compile a module, train it and compare.

    Args:
        outputs: compare the outputs of a program for inference too.
        ranks: on two real ranks, in place of the interpreter.
    """
    with in_double():
        model, batches = module.made(), module.batches(STEPS)
        before = states_of(model)
        start = {name: copied(x) for name, x in before.items()}
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                found = trained(model, batches, optimizer, ranks)
            if ranks:  # a run returns no gradients
                wanted = replace(wanted, gradients=found.gradients)
            wrong = differences(found, wanted, start)
            if outputs and not ranks:
                wrong |= of_outputs(module, batches[0])
        except ShardirError as error:
            return Verdict(kind_of_refusal(module, str(error)), str(error))
        except Exception as error:  # of any kind: none may leave the compiler
            return Verdict("crashed", f"{type(error).__name__}: {error}")
        after = states_of(model)
        if {n: id(x) for n, x in before.items()} != {n: id(x) for n, x in after.items()} or any(
            not np.array_equal(copied(after[n]), x) for n, x in start.items()
        ):
            wrong["module changed by compile"] = np.inf
    wrong = {name: x for name, x in wrong.items() if not x <= TOLERANCE}
    text = ", ".join(f"{name}: {x:.2g}" for name, x in wrong.items())
    if wrong and any(str(w.message).startswith(WARNED) for w in warned):
        return Verdict("warned", text)
    return Verdict("wrong" if wrong else "right", text, frozenset(n.split(" ")[0] for n in wrong))


REFUSED = (
    "shapes that do not depend on the data",
    "control flow that does not depend on values",
    "gradients without hooks",
    "operations whose gradients follow",
    "tensors that share no memory",
    "buffers where forward writes in place",
    "parameters that forward writes in place",
    "of one shape and dtype",
    "with memory of its own",
    "one tensor as buffers",
    "no write to a tensor of two names",
    "a write without a gradient to a detached tensor that is read later",
    "a mutation on a view chain",
    "results with memory of their own",
    "no write through a transposed view",
    "a view that can be written to",
    "parameters and buffers that keep their shape",
    "no view of a tensor that is read after its data is assigned",
    "as_strided of a tensor with all elements of its memory",
    "as_strided of a contiguous tensor",
)
"""What may be refused although torch.export takes it (docs/guides/imported.md), by words of the
messages."""

WARNED = ("forward changes", "forward assigns")
"""The beginnings of the warnings of what a program has not: state of Python, and tensors that are
no buffers."""


def kind_of_refusal(module: ModuleText, message: str) -> str:
    """The kind of a refusal: torch.export's, one that is documented, or one that is neither."""
    if any(words in message for words in REFUSED):
        return "refused as documented"
    try:
        torch.export.export(module.made(), module.batches(1)[0]).run_decompositions({})
    except Exception:  # torch.export or its functionalization refuses it, in one of many ways
        return "refused by torch.export"
    return "refused"


GOOD = ("right", "warned", "refused as documented", "refused by torch.export")
"""The verdicts with which the compiler is right."""


def trained(
    model: nn.Module, batches: list[tuple[torch.Tensor, ...]], optimizer: str, ranks: bool
) -> Trained:
    if not ranks:
        program = compiled(model, batches[0], optimizer, pipeline="single-device")
        return trained_by_shardir(program, batches, optimizer)
    program = compiled(model, batches[0], optimizer, mesh="d = 2", plan="fsdp")
    report = program.run([tuple(x.clone() for x in b) for b in batches], steps=len(batches))
    states = {
        **program.values,
        **program.state_dict(),
    }  # buffers that are not persistent; tied names
    states = {name: copied(x) for name, x in states.items()}
    return Trained([np.asarray(x) for x in report.losses["step"]], [{}] * len(batches), states)


def of_outputs(module: ModuleText, batch: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """The differences of the outputs and buffers of a program for inference."""
    model = module.made()
    try:
        with torch.no_grad():
            wanted = module.made()(*(x.clone() for x in batch))
    except RuntimeError:  # it can't be run without gradients
        return {}
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    inputs = tuple(x.clone() for x in batch)
    program = shardir.compile(model, inputs, train=False, pipeline="single-device")
    assert isinstance(program, CompiledModel)
    f = next(f for f in program.module.body.ops if isinstance(f, FuncOp))
    name = f.sym_name.data
    given = iter(batch)
    values = {name: copied(x) for name, x in program.values.items()}
    unused = np.zeros(())  # the state of random numbers, of which none is drawn
    arrays = [copied(next(given)) if a.key is None else values.get(a.key, unused)
              for a in arguments(f)]  # fmt: skip
    results = zip(updated_keys(f), run(program.module, name, arrays), strict=True)
    found = [np.asarray(x) for key, x in results if key is None]
    if len(found) != len(wanted):
        return {"output": np.inf}
    return {f"output {i}": difference(x, copied(y), 1e-2)
            for i, (x, y) in enumerate(zip(found, wanted, strict=True))}  # fmt: skip


def valid_part(module: ModuleText, optimizer: str) -> tuple[ModuleText, Trained] | None:
    """The module without the statements of its last class that torch refuses in the backward part,
    and what torch has of it; None if nothing is left."""
    module = replace(module, classes=named_classes(module.classes))
    wanted = outcome(module, optimizer)
    if wanted is not None:
        return module, wanted
    *parts, last = module.classes
    kept: list[Statement] = []
    for statement in last.forward:
        forward = (*kept, statement)
        if runs(replace(module, classes=(*parts, shown(replace(last, forward=forward))))):
            kept.append(statement)
    found = replace(module, classes=(*parts, shown(replace(last, forward=tuple(kept)))))
    found = replace(found, classes=named_classes(found.classes))
    wanted = outcome(found, optimizer)
    return None if wanted is None else (found, wanted)


def named_classes(classes: tuple[ClassText, ...]) -> tuple[ClassText, ...]:
    """The classes, without those that no later one names."""
    kept: tuple[ClassText, ...] = ()
    for c in reversed(classes):
        if not kept or any(f"{c.name}(" in str(other) for other in kept):
            kept = (c, *kept)
    return kept


def runs(module: ModuleText) -> bool:
    with in_double():
        try:
            trained_by_torch(module.made(), module.batches(1))
        except RuntimeError as error:
            return "does not require grad" in str(error)
        except Exception:
            return False
    return True


def shown(c: ClassText) -> ClassText:
    """The class, with those of its results that it still has."""
    text = "\n".join(s.text for s in c.forward)
    made = set(re.findall(r"\b([vt]\d+)\b", text))
    found = [r for r in c.returns if r in made or not r.startswith(("v", "t"))]
    last = [n for n in re.findall(r"^\s*(v\d+)\b", text, re.MULTILINE)]
    return replace(
        c, returns=tuple(found) if any(r in made for r in found) else (last[-1] if last else "x0",)
    )
