"""A module as torch runs it, on one device: the reference for its program.

1. The module, its loss, its optimizer and its scheduler are copied together, and begin with the
   initial values of the program. They do not pass through the import.
2. If a program differs, torch runs the exported graph node by node, and each value and gradient is
   looked up among the program's, by its line and its elements.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.export.graph_signature import InputKind
from torch.fx import Interpreter, Node
from xdsl.ir import Operation, SSAValue

from shardir.diagnostics import ShardirError
from shardir.dialects.locations import file_location
from shardir.dialects.nn.base import Array
from shardir.frontends.torch.capture import Capture, scalars_of
from shardir.frontends.torch.names import location_of, path_of, value_names
from shardir.frontends.torch.weights import array_of


@dataclass(frozen=True)
class Eager:
    """The module, the loss and the optimizer that a program was compiled from."""

    captured: Capture
    loss: Callable[..., Any] | None
    keywords: Mapping[str, Any]
    optimizer: Any
    scheduler: Any
    schedule: Any
    """The state of the scheduler when it was compiled."""
    clip: str | None
    modes: Mapping[str, bool]
    """Whether each of its modules was in its training mode, by their paths."""

    def copy_with(self, values: Mapping[str, torch.Tensor], states: Any = None) -> "EagerModule":
        """Return a copy that begins with these values, and its optimizer with these states.

        Raises:
            ShardirError: the module can't be copied.
        """
        of_torch = isinstance(self.optimizer, torch.optim.Optimizer)
        originals = (
            self.captured.model,
            self.loss,
            self.optimizer if of_torch else None,
            self.scheduler,
        )
        try:
            model, loss, optimizer, scheduler = deepcopy(originals)
        except Exception as e:
            raise ShardirError(
                f"expected a module that copy.deepcopy copies, got {type(e).__name__}: {e}"
            ) from None
        for path, module in model.named_modules():
            module.training = self.modes.get(path, module.training)
        tensors = tensors_of(model)
        with torch.no_grad():
            for name, value in values.items():
                if value.is_meta:
                    raise ShardirError(
                        f"expected the values of {name}, got the meta device; load weights first"
                    )
                if name in tensors:
                    tensors[name].data = value.detach().clone()
        if optimizer is not None:
            if scheduler is not None:
                let_schedulers_see(optimizer)
            optimizer.load_state_dict(states)
        if scheduler is not None:
            scheduler.load_state_dict(deepcopy(self.schedule))
        return EagerModule(model, loss, optimizer, scheduler, self.keywords, self.clip)


@dataclass
class EagerModule:
    """A copy of a module, which trains."""

    model: torch.nn.Module
    loss: Callable[..., Any] | None
    optimizer: torch.optim.Optimizer | None
    scheduler: Any
    keywords: Mapping[str, Any]
    clip: str | None

    def outputs(self, inputs: Any) -> Any:
        """Return the outputs for arguments of the form of the examples."""
        if isinstance(inputs, Mapping):
            return self.model(**{**self.keywords, **inputs})
        args = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        return self.model(*args, **self.keywords)

    def gradients(
        self, batches: Sequence[tuple[Any, Any]], mean: bool
    ) -> tuple[float, dict[str, torch.Tensor]]:
        """Return the loss of microbatches, their mean or sum, and its gradients by name."""
        self.model.zero_grad(set_to_none=True)
        total, share = 0.0, 1 / len(batches) if mean else 1.0
        for inputs, labels in batches:
            outputs = self.outputs(inputs)
            if self.loss is not None:
                label_args = (
                    labels if isinstance(labels, tuple) else () if labels is None else (labels,)
                )
                outputs = self.loss(outputs, *label_args)
            loss, _ = scalars_of(outputs)
            assert loss is not None
            (loss * share).backward()
            total += float(loss.detach()) * share
        named = self.model.named_parameters()
        return total, {name: p.grad.clone() for name, p in named if p.grad is not None}

    def update(self) -> None:
        """Let the optimizer and the scheduler make a step with the present gradients."""
        assert self.optimizer is not None
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.clip is not None:
            kind, _, bound = self.clip.partition(",")
            by = {"norm": torch.nn.utils.clip_grad_norm_, "value": torch.nn.utils.clip_grad_value_}
            by[kind.strip()](held, float(bound.partition("=")[2]))
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()


def let_schedulers_see(optimizer: torch.optim.Optimizer) -> None:
    """Let the schedulers of a copied optimizer see its steps, as those of the original do: without
    it they warn of steps in the wrong order. The rates are to be loaded afterwards."""
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers by each of their names."""
    return {**dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False))}  # fmt: skip


def random_op(captured: Capture) -> str:
    """Return an op of a module whose results are random, and its place; "" if there is none."""
    for node in captured.program.graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags:
            return f"{node.target}{place_of(node)}"
    return ""


def line_of(node: Node) -> tuple[str, int] | None:
    """Return the file and the line of the user's source of a node."""
    location = location_of(node)
    place = None if location is None else file_location(location)
    return None if place is None else place[:2]


def place_of(node: Node) -> str:
    """Return the place of a node, " in 'layers.0' at model.py:12"."""
    path, line = path_of(node), line_of(node)
    at = f" at {line[0]}:{line[1]}" if line is not None else ""
    return (f" in {path!r}" if path else "") + at


# ---- the first difference --------------------------------------------------------------------


class ProgramValues:
    """The values of a program on one device, in which torch's values are looked up."""

    def __init__(self, tolerance: float):
        self.tolerance = tolerance
        self._found: dict[int, list[tuple[Any, str | None, Array]]] = {}

    def add(self, value: SSAValue, array: Array) -> None:
        assert isinstance(value.owner, Operation)
        place = file_location(value.owner.location)
        entry = None if place is None else place[:2], value.name_hint, np.asarray(array).ravel()
        self._found.setdefault(array.size, []).append(entry)

    def has(self, expected: torch.Tensor, name: str = "", line: Any = None) -> bool | None:
        """Whether a value of torch is among the program's values: of its name if there are any,
        otherwise of the ops of its line. None if no value has its number of elements."""
        x = array_of(expected).ravel().astype(np.float64)
        candidates = self._found.get(x.size, [])
        named = [y for at, hint, y in candidates if hint == name and line in (None, at)]
        # an op of torch becomes several ops of one name: the last one has its result
        near = named[-1:] or [y for at, _, y in candidates if line is None or at == line]
        if not near or x.size == 0:
            return None
        allowed = self.tolerance * max(float(np.abs(x).max(initial=0.0)), 1e-30)
        return any(y.dtype.kind in "fiub" and bool((np.abs(y - x) <= allowed).all()) for y in near)


class _Recorded(Interpreter):
    """Runs a graph, and retains what each node computes."""

    def __init__(self, module: Any):
        super().__init__(module)
        self.values: dict[Node, torch.Tensor] = {}
        self.copies: dict[Node, torch.Tensor] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_function" and isinstance(value, torch.Tensor):
            if value.requires_grad and value.is_floating_point():
                value.retain_grad()
            self.values[n], self.copies[n] = value, value.detach().clone()
        return value


def first_difference(
    captured: Capture, copy: EagerModule, batch: Mapping[str, torch.Tensor], values: ProgramValues,
    loss: float | None,
) -> str:  # fmt: skip
    """Return the op at which a program's value, or its gradient, differs from torch's.

    Args:
        batch: the inputs by name.
        loss: the loss of the module, or None.
    """
    recorded = _Recorded(captured.program.graph_module)
    outputs = recorded.run(*_arguments(captured, copy.model, batch))
    result: torch.Tensor = outputs[-1 - len(captured.metrics)] if len(outputs) > 1 else outputs[0]
    bound = 0.0 if loss is None else values.tolerance * max(abs(loss), 1e-3)
    if loss is not None and abs(float(result.detach()) - loss) > bound:
        return "the graph that torch.export makes differs from the module"
    nodes = [n for n in recorded.values if not _is_view(n)]
    names = value_names(captured.program.graph_module)
    right = {n: values.has(recorded.copies[n], names[n], line_of(n)) for n in nodes}
    for n in nodes:
        users = [u for u in _users(n) if u in right]
        if right[n] is False and not (users and all(right[u] for u in users)):
            return f"first at {n.target}{place_of(n)}"
    if loss is None:
        return ""
    result.backward()
    for n in reversed([n for n in recorded.values if not _is_view(_maker(n))]):
        grad = recorded.values[n].grad
        if grad is not None and values.has(grad) is False:
            users = [u for u in _users(n) if u.op == "call_function"]
            ops = " and ".join(f"{u.target}{place_of(u)}" for u in users[:2])
            return f"first at the gradient of {ops}"
    return ""


def uses_of(captured: Capture, name: str) -> str:
    """Return the ops that read a parameter, with their places."""
    program = captured.program
    placed = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        if (spec.target or "").removeprefix("model.") == name:
            node = placed.get(getattr(spec.arg, "name", ""))
            users = [] if node is None else list(_users(node))[:2]
            return " and ".join(f"{u.target}{place_of(u)}" for u in users)
    return ""


def _arguments(
    captured: Capture, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]
) -> Iterator[Any]:
    program, tensors = captured.program, tensors_of(model)
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    inputs = iter(captured.inputs)
    for spec in program.graph_signature.input_specs:
        node, target = nodes.get(getattr(spec.arg, "name", "")), spec.target or ""
        if spec.kind is InputKind.USER_INPUT:
            example = None if node is None else node.meta.get("val")
            yield batch[next(inputs)[0]] if isinstance(example, torch.Tensor) else example
        elif (name := target.removeprefix("model.")) in tensors:
            yield tensors[name]
        else:
            constant = program.constants.get(target, program.state_dict.get(target))
            yield constant


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(r.alias_info is not None for r in schema.returns)


def _maker(node: Node) -> Node:
    """Return the op that makes a node: the node itself, or the op whose results it indexes."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _users(node: Node) -> Iterator[Node]:
    """Yield the ops that read a node, directly or through views."""
    for user in node.users:
        if user.op == "call_function" and _is_view(user):
            yield from _users(user)
        else:
            yield user
