"""A module of torch, exported: torch.export of the module with its loss.

The graph is not decomposed: linear layers, attention and norms stay one op each.
"""

import inspect
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from shardir.compat.torch import (
    UncapturedHigherOrderOpError,
    UserError,
    functionalize,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)
from shardir.diagnostics import ShardirError, check_call, describe, report_progress
from shardir.frontends.torch.autocasts import autocast_of_any_device
from shardir.frontends.torch.dtypes import dtype_name
from shardir.frontends.torch.histories import Histories
from shardir.frontends.torch.implicit import write_out
from shardir.frontends.torch.module_state import check_trained, recorded_attributes
from shardir.frontends.torch.names import is_of_user, user_line
from shardir.frontends.torch.regions import annotated
from shardir.frontends.torch.stand_ins import stand_ins
from shardir.frontends.torch.static import CHOICE, check_exported
from shardir.frontends.torch.traced import TracedProgram, traced
from shardir.frontends.torch.unchecked import unchecked
from shardir.syntax.source import warn

LossFunction = Callable[..., Any]

OF_DATA = "write it without control flow and shapes that depend on the data"

CONTROL_FLOW = ("cond", "while_loop", "map", "scan", "associative_scan")
"""Ops of torch with functions as arguments that run, or not, by the values of tensors."""

UNTRAINED = (
    "expected parameters that require gradients, of which the loss depends, got none; use "
    "requires_grad_(), or train=False"
)

RETURNED = (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)
WRITTEN = (OutputKind.PARAMETER_MUTATION, OutputKind.BUFFER_MUTATION)


@dataclass(frozen=True)
class Capture:
    """An exported module."""

    program: ExportedProgram | TracedProgram
    model: torch.nn.Module
    inputs: list[tuple[str, torch.Tensor]]
    """The name and the example of each input, in the order of the graph's."""
    metrics: list[str]
    """The names of the scalars that the graph returns last: the metrics of a loss, or all results
    of a function."""
    held: dict[str, torch.Tensor]
    """The parameters and buffers of the module, by their names in the graph."""
    constants: dict[str, Any]
    """The arguments that are no tensors, by their names: they are part of the program."""

    @property
    def writes(self) -> list[str | None]:
        """For each result of the graph, the parameter or buffer that it replaces; "" for an input;
        None for a result of the module."""
        return [
            None if spec.kind in RETURNED else spec.target if spec.kind in WRITTEN else ""
            for spec in self.program.graph_signature.output_specs
        ]

    def tensor(self, target: str | None) -> torch.Tensor | None:
        """Return the parameter, buffer or constant of a graph's argument; None for an input."""
        return self.held.get(target or "", self.program.constants.get(target or ""))

    @property
    def gradients(self) -> list[str]:
        """The parameters whose gradients the program returns last, if it is traced."""
        return self.program.gradients if isinstance(self.program, TracedProgram) else []


class _WithLoss(torch.nn.Module):
    """A module whose results are its loss and its metrics, or all of its outputs.

    Attributes:
        noted: called with the names of the metrics, since torch.export undoes changes of a module's
            own attributes.
        remarked: called with warnings.
    """

    def __init__(
        self, model: torch.nn.Module, loss: LossFunction | None, train: bool,
        noted: Callable[[list[str]], object], remarked: Callable[[str], object],
        function: Callable[..., Any] | None = None,
    ):  # fmt: skip
        super().__init__()
        self.model = model
        self._function = function
        self._loss, self._train, self._noted, self._remarked = loss, train, noted, remarked
        self.histories = Histories(train)

    def forward(self, args: Any, kwargs: Any, labels: Any) -> Any:
        attributes = recorded_attributes(self.model, self._remarked)
        with self.histories.recording(), attributes as retained:
            return tree_map(retained, self._results(args, kwargs, labels))

    def _results(self, args: Any, kwargs: Any, labels: Any) -> Any:
        if self._function is None:
            outputs = self.model(*args, **kwargs)
        else:
            outputs = self._function(self.model, *args, **kwargs)
        if not self._train:
            if self._function is not None:
                self._noted(_names_of_scalars(outputs))
            return tree_map(self._exported, outputs)
        outputs_or_loss = outputs if self._loss is None else self._loss(outputs, *labels)
        loss, metrics = scalars_of(outputs_or_loss)
        if loss is None:
            got = _described_output(outputs_or_loss)
            raise ShardirError(
                f"expected a scalar loss among the model's outputs, got {got}; use loss=..., a "
                "function of the outputs and the labels"
                if self._loss is None
                else f"expected a scalar tensor of the loss function, got {got}; reduce it: "
                "losses.mean()"
            )
        if loss.is_floating_point() and not loss.requires_grad:
            raise ShardirError(UNTRAINED)
        self._noted(list(metrics))
        values = [x.detach() for x in metrics.values()]
        return (loss, *(x if x.is_floating_point() else x.float() for x in values))

    def _exported(self, x: Any) -> Any:
        """An output that torch.export takes; None for another one, such as a cache of keys and
        values. A view is cloned: torch refuses some views of parameters that are written."""
        if isinstance(x, torch.Tensor) and x._is_view():
            return x.clone()
        if x is None or isinstance(x, torch.Tensor | bool | int | float | str):
            return x
        self._remarked(
            f"the model's output of type {type(x).__name__} is left out, since a program returns "
            "tensors"
        )
        return None


def scalars_of(outputs: Any) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
    """Return the loss among the outputs, and the metrics by name.

    The loss is the only output, the output `loss`, or the first one; None if it is no scalar.
    Metrics are the other scalars. A dict names them; the third output of a tuple is `result_2`.
    """
    if isinstance(outputs, Mapping):
        named = dict(outputs)
    elif hasattr(outputs, "loss"):
        named = {"loss": outputs.loss}
    elif isinstance(outputs, tuple | list):
        named = dict[str, Any]()
        for i, x in enumerate(outputs):
            named |= x if i and isinstance(x, Mapping) else {f"result_{i}" if i else "loss": x}
    else:
        named = {"loss": outputs}
    scalars = {str(name): x for name, x in named.items()
               if isinstance(x, torch.Tensor) and x.dim() == 0}  # fmt: skip
    return scalars.pop("loss", None), scalars


def _names_of_scalars(outputs: Any) -> list[str]:
    """Return the names of scalars, as those of a loss and its metrics, in the order in which they
    are exported; none if there are other outputs."""
    loss, metrics = scalars_of(outputs)
    names = {id(x): name for name, x in metrics.items()} | {id(loss): "loss"}
    leaves = tree_leaves(outputs)
    return [names[id(x)] for x in leaves] if all(id(x) in names for x in leaves) else []


def _described_output(value: Any) -> str:
    """Return a short description of a value."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {list(value.shape)}"
    return describe(value)


def capture(
    model: torch.nn.Module,
    inputs: Any,
    labels: Any = None,
    loss: LossFunction | None = None,
    train: bool = True,
    keywords: Mapping[str, Any] | None = None,
    derived: Collection[str] = (),
    trace: bool = False,
    function: Callable[..., Any] | None = None,
) -> Capture:
    """Export a module, or a function of it.

    A module on the meta device takes inputs of any device. Dropout and batch norms train according
    to the module's own `training`.

    Args:
        inputs: example arguments: a tensor, a tuple of positional arguments, or a dict of keyword
            arguments, to which `keywords` are added.
        labels: example labels of the loss.
        derived: names of autograd functions whose gradients are derived from their forward part.
        trace: whether the backward part is traced too, instead of an export.
        function: what is called in place of the module, with the module as its first argument.

    Raises:
        ShardirError: torch.export refuses the module, or there is no loss.
    """
    args, kwargs, label_args = _arguments(inputs, labels)
    kwargs |= keywords or {}
    call = model.forward if function is None else partial(function, model)
    name = f"{type(model).__name__}.forward" if function is None else name_of(function)
    check_call(call, name, args, kwargs)
    if loss is not None:
        _check_loss(loss, label_args)
    leaves = _named(call, args, kwargs, label_args)
    named = [(name, x) for name, x in leaves if isinstance(x, torch.Tensor)]
    constants = {name: x for name, x in leaves if not isinstance(x, torch.Tensor)}
    args, kwargs, label_args = _distinct((args, kwargs, label_args))
    if train:
        check_trained(model)
    metrics: list[str] = []
    notes: dict[str, None] = {}

    def noted(names: list[str]) -> None:
        metrics[:] = names

    wrapper = _WithLoss(model, loss, train, noted, notes.setdefault, function)
    wrapper.training = model.training  # parts of the module may have another mode: a frozen norm
    try:
        with (
            quiet(),
            torch.set_grad_enabled(train),
            stand_ins(model, (args, kwargs, label_args)) as fake_args,
            autocast_of_any_device(_device_type(model), notes.setdefault),
        ):
            if trace:
                program = _trace(wrapper, fake_args)
            else:
                histories = wrapper.histories
                with annotated(train, derived, histories, notes.setdefault), unchecked():
                    report_progress("torch.export of the module")
                    program = torch.export.export(wrapper, fake_args, strict=False)
                check_exported(program.graph_module)
                write_out(program.graph_module)
                program = _functionalize(program, model)
    except ShardirError as error:
        raise ShardirError(f"{error}{place_of_error(error, model)}") from None
    except Exception as error:
        raise refusal_of(error, model, "make_fx" if trace else "torch.export") from None
    for note in notes:
        warn(None, note)
    held = dict(wrapper.named_parameters(remove_duplicate=False))
    held |= dict(wrapper.named_buffers(remove_duplicate=False))
    return Capture(program, model, named, metrics, held, constants)


def _functionalize(program: ExportedProgram, model: torch.nn.Module) -> ExportedProgram:
    """Return an exported program without writes in place.

    Raises:
        ShardirError: torch refuses it: a tensor is written that has two names; or one is written
            through a transposed view, whose strides its new value has, and another view has none;
            or a parameter is a result after a write to its alias.
    """
    try:
        return functionalize(program)
    except ValueError as error:
        view = re.search(r"Cannot view a tensor with shape torch.Size\((.*?)\) and", str(error))
        if view is None:
            raise
        line = user_line(str(error))
        place = "" if line is None else f", read at {line[0]}:{line[1]}"
        raise ShardirError(
            "expected no write through a transposed view of a tensor of which a view is read, got "
            f"a view of {view[1]}{place}; write to the tensor itself"
        ) from None
    except RuntimeError as error:
        if "A view was created in no_grad mode" not in str(error):
            raise
        raise ShardirError(
            "expected results with memory of their own, got a parameter that forward writes "
            "through an alias in no_grad mode; return a clone()"
        ) from None
    except AssertionError as error:
        names: dict[int, list[str]] = {}
        for path, part in model.named_modules(remove_duplicate=False):
            held = (of(recurse=False, remove_duplicate=False)
                    for of in (part.named_parameters, part.named_buffers))  # fmt: skip
            for name, x in chain(vars(part).items(), *held):
                if isinstance(x, torch.Tensor):
                    names.setdefault(id(x), []).append(f"{path}.{name}".lstrip("."))
        tied = [" and ".join(found[:2]) for found in names.values() if len(found) > 1]
        if not tied or "compiled_fn" not in str(error):
            raise
        raise ShardirError(
            f"expected no write to a tensor of two names, got one of {', '.join(tied[:3])}; "
            "register it once, and write it by that name"
        ) from None


def _device_type(model: torch.nn.Module) -> str:
    """Return the type of the device on which a module is traced."""
    return next((p.device.type for p in model.parameters() if not p.is_meta), "cpu")


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Set a module to eval() for a block."""
    before = {part: part.training for part in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for part, training in before.items():
            part.training = training


@contextmanager
def quiet() -> Iterator[None]:
    """A context in which torch shows no warnings, and neither logs nor prints texts of its
    exceptions, which our message repeats. Lower levels that TORCH_LOGS requests are logged."""
    from shardir.compat.torch import export_trace  # an export imports it

    all_loggers = logging.root.manager.loggerDict
    loggers = [x for n, x in all_loggers.items() if n.split(".")[0] == "torch"]
    loggers = [x for x in loggers if isinstance(x, logging.Logger)]

    def is_requested(record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING

    for logger in loggers:
        logger.addFilter(is_requested)
    try:
        with (
            warnings.catch_warnings(),
            # an exception with the graph so far is printed where it passes
            patch.object(export_trace, "print", lambda *_, **__: None, create=True),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_requested)


def _check_loss(loss: Any, labels: tuple[Any, ...]) -> None:
    """Check that a loss is a function of the outputs and the labels. Raises ShardirError."""
    if isinstance(loss, type):
        raise ShardirError(
            f"expected a loss function, got {describe(loss)}; make one: {loss.__name__}()"
        )
    try:
        check_call(loss, name_of(loss), (None, *labels), {})
    except ShardirError as e:
        raise ShardirError(
            f"the loss, of the outputs and {len(labels)} labels: {e}; pass labels=..., one for "
            "each of its parameters"
        ) from None


def _distinct(examples: Any) -> Any:
    """Return examples in which no two are one tensor: torch.export would take two such inputs for
    one."""
    seen = set[int]()

    def clone_repeated(x: torch.Tensor) -> torch.Tensor:
        is_repeated = id(x) in seen
        seen.add(id(x))
        return x.clone() if is_repeated else x

    return tree_map_only(torch.Tensor, clone_repeated, examples)


def _trace(wrapper: torch.nn.Module, arguments: tuple[Any, ...]) -> TracedProgram:
    leaves, form = tree_flatten(arguments)
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def work(states: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]) -> Any:
        leaves_of_call = list(leaves)
        for i, x in zip(at, inputs, strict=True):
            leaves_of_call[i] = x
        return torch.func.functional_call(
            wrapper, dict(states), tree_unflatten(leaves_of_call, form)
        )

    return traced(wrapper, work, [leaves[i] for i in at])


def flat_inputs(model: torch.nn.Module, inputs: Any, labels: Any = None) -> list[tuple[str, Any]]:
    """Return the leaves of a module's arguments and labels, with their names, in the order of the
    graph's inputs. Raises ShardirError."""
    return _named(model.forward, *_arguments(inputs, labels))


def _arguments(inputs: Any, labels: Any) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """Return positional and keyword arguments, and the labels. Raises ShardirError."""
    label_args = () if labels is None else labels if isinstance(labels, tuple) else (labels,)
    if isinstance(inputs, Mapping):
        return (), dict(inputs), label_args
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}, label_args
    if isinstance(inputs, Sequence) and not isinstance(inputs, str):
        return tuple(inputs), {}, label_args
    raise ShardirError(f"expected inputs: a tensor, a tuple or a dict, got {describe(inputs)}")


def called_with(function: Callable[..., Any], model: torch.nn.Module, inputs: Any) -> Any:
    """Return what a function of a module returns for example inputs."""
    args, kwargs, _ = _arguments(inputs, None)
    return function(model, *args, **kwargs)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function for messages."""
    return getattr(function, "__name__", type(function).__name__)


def _named(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
    labels: tuple[Any, ...],
) -> list[tuple[str, Any]]:  # fmt: skip
    """Return the leaves of the inputs with their names: names of the arguments of what is called,
    and `labels`."""
    parameters = inspect.signature(call).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            names += [f"{p.name}.{i}" for i in range(len(args) - len(names))]
    named_leaves: list[tuple[str, Any]] = []

    def add(name: str, tree: Any) -> None:
        leaves, _ = tree_flatten_with_path(tree)
        for path, leaf in leaves:
            parts = keystr(path).replace("[", ".").replace("]", "").replace("'", "")
            named_leaves.append((name + parts, _dense(leaf, name + parts)))

    for i, tree in enumerate(args):
        add(names[i] if i < len(names) else f"input_{i}", tree)
    for name, tree in kwargs.items():
        add(name, tree)
    for i, tree in enumerate(labels):
        add("labels" if len(labels) == 1 else f"labels_{i}", tree)
    return named_leaves


def _dense(leaf: Any, name: str) -> Any:
    """Return a leaf unchanged.

    Raises:
        ShardirError: it is a sparse tensor, of an unsupported dtype, or an array.
    """
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        dtype_name(leaf.dtype, name)
        return leaf
    if isinstance(leaf, torch.Tensor) or hasattr(leaf, "__array__"):
        got = leaf.layout if isinstance(leaf, torch.Tensor) else describe(leaf)
        use = "to_dense()" if isinstance(leaf, torch.Tensor) else "torch.as_tensor"
        raise ShardirError(f"expected a dense tensor as {name}, got {got}; use {use}")
    return leaf


def refusal_of(error: Exception, model: torch.nn.Module, by: str = "torch.export") -> ShardirError:
    """Return the error of a module that can't be exported, or traced."""
    if (op := _control_flow(error)) is not None:
        return ShardirError(
            f"expected a module without control flow on tensors, got {op}"
            f"{place_of_error(error, model)}; {CHOICE}"
        )
    of_data = isinstance(error, UserError) or "DataDependent" in type(error).__name__
    use = OF_DATA if of_data else "correct the module, the loss or the example inputs"
    first_line = next(
        (l.strip() for l in str(error).splitlines() if l.strip()), type(error).__name__
    )
    return ShardirError(
        f"expected a module that {by} takes, got {type(error).__name__}"
        f"{place_of_error(error, model)}: {first_line:.300}; {use}"
    )


def _control_flow(error: Exception) -> str | None:
    """Return the op of torch with functions as arguments, such as torch.cond, that raised an
    exception; None if none did."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    ops = [Path(file).stem for file in files if "/torch/_higher_order_ops/" in file]
    ops = [op for op in ops if op in CONTROL_FLOW]
    if ops:
        return f"torch.{ops[0].strip('_')}"
    return "such an op" if isinstance(error, UncapturedHigherOrderOpError) else None


def place_of_error(error: Exception, model: torch.nn.Module | None = None) -> str:
    """Return the place of an error, " in 'layers.0' at model.py:12": the module's path, and the
    line of the user's source."""
    paths = {} if model is None else {id(m): name for name, m in model.named_modules()}
    where, path = "", ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        owner = frame.f_locals.get("self")
        if id(owner) in paths:
            path = paths[id(owner)]
        if is_of_user(file):
            where = f"{file}:{line}"
    return (f" in {path!r}" if path else "") + (f" at {where}" if where else "")
