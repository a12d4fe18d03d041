"""One record for each fault of others: who reported what, a program, and what it prints.

The page docs/understand/bugs-of-others.md is made of the records, and test_bugs_of_others.py runs
each on ranks and in torch on one device.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import shardir

DOUBLE: Any = {"dtype": torch.float64}
Batch = dict[str, Tensor]
Results = dict[str, Any]


SHORT = re.compile(r"^def \w+\(\s*(.*?)\s*\):\n    return ([^\n]*)\n$", re.M | re.S)
"""A function of one line: its arguments, and what it returns."""


@dataclass(frozen=True)
class Bug:
    """A program whose right result is known, and which others computed wrongly or not at all.

    `program` is a function or a class of modules. A function has its values as defaults: floats are
    parameters in f64, integers and booleans inputs. If it returns one number, that is a loss, and
    one step is trained; else its results are computed. A module returns its loss for each batch of
    its `batches`, with one step for each; ranks get its microbatches."""

    threads: tuple[str, ...]
    """OWNER/REPOSITORY#NUMBER of the public threads, the one with the clearest report first."""
    reported: str
    """What the thread says happened, in words of our own."""
    program: Callable[..., Any]
    mesh: str
    plan: Any
    prints: str
    """Results as they are printed, `NAME: VALUE; NAME: VALUE`; or the error, if `refused`."""
    refused: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of shardir.compile."""

    @property
    def name(self) -> str:
        return self.program.__name__

    @property
    def printed(self) -> dict[str, str]:
        """The parts of `prints` by their names."""
        return dict(part.split(": ", 1) for part in self.prints.split("; "))

    @property
    def lines(self) -> list[str]:
        """The arguments and the expression of a short program; the name of any other one."""
        if not isinstance(self.program, type):
            source = inspect.getsource(self.program)
            match = SHORT.search(source)
            if match is not None:
                arguments = " ".join(match[1].replace(": Any", "").split()).rstrip(",")
                return [*([arguments] * (len(arguments) < 60)), match[2]]
        return [self.name]

    @property
    def split(self) -> str:
        """The mesh, and what splits the program over it."""
        lines = self.plan.splitlines() if isinstance(self.plan, str) else [
            f"{name}: {layout}" for name, layout in self.plan.items()
        ]  # fmt: skip
        return "; ".join([self.mesh, *lines, *(f"{k}: {x}" for k, x in self.options.items())])

    def build(self) -> tuple[nn.Module, list[Batch]]:
        """The module and its batches, by the names of the inputs."""
        torch.manual_seed(0)
        if isinstance(self.program, type):
            written: Any = self.program()
            return written, written.batches()
        module = Function(self.program)
        return module, [module.inputs]


class Function(nn.Module):
    """A function as a module, whose parameters are its floats."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.inputs = function, dict[str, Tensor]()
        for name, argument in inspect.signature(function).parameters.items():
            value = torch.as_tensor(argument.default)
            if value.is_floating_point():
                self.register_parameter(name, nn.Parameter(value.double()))
            else:
                self.inputs[name] = value

    def forward(self, **inputs: Tensor) -> Any:
        return self.function(**dict(self.named_parameters()), **inputs)


def bug(
    threads: str, reported: str, mesh: str, prints: str, **options: Any
) -> Callable[[Any], Bug]:
    """A decorator of a program. Layouts of a function's arguments are options of their names."""

    def record(program: Any) -> Bug:
        layouts = dict[str, str]()
        if not isinstance(program, type):
            inputs = Function(program).inputs
            for name in inspect.signature(program).parameters:
                if name in options:
                    layouts[key_of(name, inputs)] = options.pop(name)
        plan = options.pop("plan", layouts)
        refused = options.pop("refused", False)
        return Bug(
            tuple(threads.split(", ")), " ".join(reported.split()), program, mesh, plan, prints,
            refused, options,
        )  # fmt: skip

    return record


def key_of(name: str, inputs: Batch) -> str:
    """What a plan has before the layout of an argument."""
    return f'inputs "{name}"' if name in inputs else name


def bugs_in(names: Mapping[str, object]) -> list[Bug]:
    """The records among the names of a file, in their order."""
    return [x for x in names.values() if isinstance(x, Bug)]


# ---- results, by name ----


def trains(module: nn.Module, batch: Batch) -> bool:
    """Whether the module returns one number that depends on its parameters."""
    result = deepcopy(module)(**batch)
    return isinstance(result, Tensor) and result.dim() == 0 and result.requires_grad


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """Gradient descent, whose first step tells the gradient."""
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=1.0)


def on_one_device(bug: Bug) -> Results:
    """What torch computes of whole batches, without shardir."""
    module, batches = bug.build()
    if not trains(module, batches[0]):
        with torch.no_grad():
            return results_of(module(**batches[0]))
    before, optimizer, results = states(module), optimizer_of(module), dict[str, Any]()
    for batch in batches:
        optimizer.zero_grad()
        loss = module(**batch)
        loss.backward()
        results.setdefault("loss", []).append(loss.item())
        if "clip" in bug.options:
            limit = float(bug.options["clip"].rpartition("=")[2])
            norm = nn.utils.clip_grad_norm_(module.parameters(), limit)
            results.setdefault("gradient_norm", []).append(norm.item())
        optimizer.step()
    return trained(module, results, before, states(module))


def on_ranks(bug: Bug) -> Results:
    """What the ranks of the mesh compute, and what they send."""
    module, batches = bug.build()
    options: dict[str, Any] = {"mesh": bug.mesh, "plan": bug.plan or None, **bug.options}
    if not trains(module, batches[0]):
        program = shardir.compile(module, batches[0], train=False, **options)
        return results_of(program(**batches[0])) | {"sent": sent(program.program)}
    parts = int(options.get("accumulate", "= 1").rpartition("=")[2])
    microbatches = [
        {name: x.chunk(parts)[i] for name, x in batch.items()}
        for batch in batches for i in range(parts)
    ]  # fmt: skip
    if "clip" in options:
        options["metrics"] = "gradient_norm"
    optimizer = optimizer_of(module)
    program = shardir.compile(module, microbatches[0], optimizer=optimizer, **options)
    report = program.run(microbatches if batches[0] else None, steps=len(batches))
    results = {"loss": report.losses["step"]}
    if "clip" in options:
        results |= report.metrics["step"]
    return trained(module, results, states(module), program.state_dict()) | {
        "sent": sent(program.program)
    }


def results_of(outputs: Any) -> Results:
    if isinstance(outputs, Tensor):
        return {"result": outputs}
    return {f"result {i}": x for i, x in enumerate(outputs)}


def states(module: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in module.state_dict().items()}


def trained(
    module: nn.Module, of_steps: dict[str, list[float]], before: Batch, after: Batch
) -> Results:
    """The numbers of each step, and the states; after a single step, gradients in place of
    parameters."""
    if len(of_steps["loss"]) > 1:
        numbers = {name: torch.tensor(x) for name, x in of_steps.items()}
        return {"losses": numbers.pop("loss"), **numbers, **after}
    results: Results = {name: torch.tensor(x[0]) for name, x in of_steps.items()}
    for name, x in before.items():
        if name not in dict(module.named_buffers()):
            results[f"gradient of {name}"] = x - after[name]
        else:
            results[name] = after[name]
    return results


SENT = re.compile(r"# ([a-z-]+(?: exchange)?)\b[^#\n]*? over [\w, ]+ \(\d+ ranks\), ([\d.]+ \w+):")


def sent(program: str) -> str:
    """The collectives of a program, by its comments."""
    found = Counter(SENT.findall(re.sub(r"\n *#   ", " ", program)))
    of_kinds = [f"{n} x " * (n > 1) + f"{kind} of {size}" for (kind, size), n in found.items()]
    return ", ".join(of_kinds) or "nothing"


def text(value: Any) -> str:
    """A result as the page shows it: four digits."""
    if isinstance(value, Tensor):
        return text(value.tolist())
    if isinstance(value, list):
        return f"[{', '.join(map(text, value))}]"
    if isinstance(value, float):
        return f"{value + 0.0:.4g}"
    return str(value)
