"""Updates of torch's optimizers as rules of ours (shardir/dialects/train/rules.py): the step of an
optimizer's class on one parameter, traced.

    torch.optim.RAdam      @radam: (%w, %g, %exp_avg, %exp_avg_sq, %lr, %done) -> (...)

Parameters of one type, in groups with equal numbers, have one rule. The learning rate and the
number of steps are its arguments, so that schedules are as for other optimizers.
"""

import inspect
import math
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from torch.fx import GraphModule, traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from shardir.build import Module
from shardir.compat.torch import DATA, tree_map_only
from shardir.diagnostics import ShardirError
from shardir.dialects.train import ELEMENTWISE, WHOLE, first_on_whole, not_elementwise
from shardir.frontends.torch.capture import Capture, place_of_error, quiet
from shardir.frontends.torch.dtypes import dtype_name
from shardir.frontends.torch.function_optimizer import STEP, FunctionOptimizer
from shardir.frontends.torch.functional import without_writes
from shardir.frontends.torch.importer import Importer
from shardir.frontends.torch.names import is_of_user, place_of
from shardir.frontends.torch.optimizer_states import name_of_state
from shardir.frontends.torch.optimizers import ParamGroup
from shardir.frontends.torch.traced import Signature, TracedProgram, without_detach

SINGLE = {"foreach": False, "fused": False}
"""Options of groups by which torch updates one parameter after another."""

NOT_OF_RULE = {
    "params", "lr", "initial_lr", "whole", "foreach", "fused", "capturable", "differentiable",
}  # fmt: skip
"""Keys of groups that do not change the update."""

SMALL = 4096
"""The elements of a parameter up to which steps are tried at its own size. At first, tensors of 4
along each dimension stand for larger ones."""

TOLERANCE = 1e-5
"""The relative difference of three steps of the optimizer and of its rule, which may be in f32."""

GET_DATA, SET_DATA = DATA.__get__, DATA.__set__

USE = "write the update as a function: shardir.optimizer(update, ...)"
KEEP = "keep what changes between steps in a state"


class _Tracing(TorchFunctionMode):
    """The functions of torch by which a step would leave the graph: `p.add_(d, alpha=-lr)` reads
    the number of a tensor and becomes a product; `p.data` is the parameter. Nodes get the lines of
    the user's code, of which make_fx records those of modules alone."""

    SCALED = ("add", "add_", "sub", "sub_", "addcmul", "addcmul_", "addcdiv", "addcdiv_")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        traceback.set_stack_trace(_line_of_caller())
        if func == GET_DATA:
            return args[0]
        if func == SET_DATA:
            return args[0].copy_(args[1])
        kwargs = dict(kwargs or {})
        for name in ("alpha", "value"):
            if isinstance(kwargs.get(name), torch.Tensor) and func.__name__ in self.SCALED:
                x = args[1].to(torch.result_type(args[0], args[1])) * kwargs.pop(name)
                args = (args[0], x, *args[2:])
        return func(*args, **kwargs)


def _line_of_caller() -> list[str]:
    """Return the line of the innermost frame of the user's code in a step, as in a stack trace."""
    frame = sys._getframe(2)
    while frame is not None and not is_of_user(frame.f_code.co_filename):
        frame = None if frame.f_code is run_step.__code__ else frame.f_back
    return [] if frame is None else [f'File "{frame.f_code.co_filename}", line {frame.f_lineno}']


class _FirstStates(dict[str, Any]):
    """The states of a parameter. `first` has copies of the values that were set first."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        self.first.setdefault(name, value.clone() if isinstance(value, torch.Tensor) else value)
        super().__setitem__(name, value)


def run_step(
    optimizer: torch.optim.Optimizer, group: ParamGroup, parameter: torch.Tensor,
    gradient: torch.Tensor, state: dict[str, Any], lr: Any, **options: Any,
) -> None:  # fmt: skip
    """Let an optimizer's class make one step, in place, on one parameter with these states."""
    trial = object.__new__(type(optimizer))
    vars(trial).update(vars(optimizer))
    options = {name: x for name, x in {**SINGLE, **options}.items() if name in group}
    trial.param_groups = [{**group, **options, "params": [parameter], "lr": lr}]
    trial.state = defaultdict(dict)
    trial.state[parameter] = state
    parameter.grad = gradient
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(trial)
    parameter.grad = None


@dataclass(frozen=True)
class TracedUpdate:
    """The update of the parameters of a group with one shape and dtype."""

    optimizer: torch.optim.Optimizer
    group: ParamGroup
    shape: tuple[int, ...]
    dtype: torch.dtype
    small: float = SMALL
    """The elements up to which steps are tried at this shape."""

    @property
    def name(self) -> str:
        function = getattr(self.optimizer, "function", None)
        return getattr(function, "__name__", type(self.optimizer).__name__)

    @property
    def computed(self) -> torch.dtype:
        """The dtype of the update: f32 for parameters of half precision, which has no 0.999."""
        return torch.promote_types(self.dtype, torch.float32)

    @cached_property
    def sample(self) -> torch.Tensor:
        """A parameter with elements that states do not have by chance, to try steps."""
        size = torch.Size(self.shape).numel()
        shape = self.shape if size <= self.small else tuple(min(n, 4) for n in self.shape)
        count = torch.Size(shape).numel()
        return (
            torch.linspace(0.739, 1.618, count, dtype=torch.float64).reshape(shape).to(self.dtype)
        )

    @cached_property
    def other(self) -> torch.Tensor:
        """A sample with other elements, of another size where samples stand for larger ones."""
        w = -100 * self.sample
        is_whole = w.shape == self.shape
        return w if is_whole else w.new_full(tuple(min(n, 5) for n in self.shape), -7.0)

    @cached_property
    def first(self) -> dict[str, Any]:
        """The states before the first step, of the size of the sample."""
        return self.first_of(self.sample)

    def first_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the states of a parameter before the first step: in torch most optimizers make
        them in it."""
        if isinstance(self.optimizer, FunctionOptimizer):
            return {STEP: 0, **self.optimizer.first_states(parameter)}
        state, w = _FirstStates(), parameter.clone()
        run_step(self.optimizer, self.group, w, torch.zeros_like(w), state, float(self.group["lr"]))
        return state.first

    @property
    def states(self) -> dict[str, torch.Tensor]:
        """The states before the first step that are tensors, but for the number of steps."""
        return {n: x for n, x in self.first.items() if n != STEP and isinstance(x, torch.Tensor)}

    def init_of(self, name: str) -> str:
        """Return the text of the values of a state before the first step."""
        x = self.states[name]
        numbers = x.flatten().tolist()
        if x.shape not in (self.sample.shape, ()) or not numbers:
            raise ShardirError(
                f"expected states of the parameter's shape or scalars, got {name} of "
                f"{list(x.shape)} for one of {list(self.sample.shape)} in {self.name}; {USE}"
            )
        again = self.first_of(self.other)[name]  # the sample has one sign, and may be smaller
        if torch.equal(x, self.sample) and torch.equal(again, self.other):
            return 'copy, of = "parameter"'
        if all(n == numbers[0] for n in [*numbers, *again.flatten().tolist()]):
            return f"constant, value = {float(numbers[0]) + 0.0!r}"
        is_function = isinstance(self.optimizer, FunctionOptimizer)
        use = "make another first value in the update: torch.where(step == 1, ...)"
        raise ShardirError(
            f"expected states that begin with one number or with the parameter, got {name} of "
            f"{self.name}; {use if is_function else USE}"
        )

    def traced(self, shape: Sequence[int], dtype: torch.dtype) -> GraphModule:
        """Return the graph of a step: from the parameter, its gradient, its states, the rate and
        the number of completed steps to the new parameter and states."""
        states = {n: x.dtype for n, x in self.states.items()}
        constants = {n: x for n, x in self.first.items() if n not in states}

        def step(w: Any, g: Any, values: Sequence[Any], lr: Any, done: Any) -> Any:
            # numbers are computed in double precision, as those of Python
            kept = [x.dim() or (not w.dim() and x.dtype is w.dtype) for x in values]
            dtypes = [x.dtype if k else torch.float64 for x, k in zip(values, kept, strict=True)]
            copies = [x.to(d, copy=True) for x, d in zip(values, dtypes, strict=True)]
            w, state = w.clone(), dict(zip(states, copies, strict=True))
            given = {**constants, **({STEP: done.clone()} if STEP in self.first else {}), **state}
            with _Tracing(), patch.object(torch.compiler, "is_compiling", lambda: True):
                run_step(self.optimizer, self.group, w, g, given, lr, capturable=True)
            return (w, *(given[n] for n in states))

        w, scalar = torch.empty(tuple(shape), dtype=dtype), torch.zeros((), dtype=torch.float64)
        values = [
            torch.empty(() if not x.dim() else w.shape, dtype=dtype if x.dtype is self.dtype
                        else x.dtype)
            for x in self.states.values()
        ]  # fmt: skip
        with traceback.preserve_node_meta(), torch.no_grad():
            graph = make_fx(
                step, tracing_mode="fake", _allow_non_fake_inputs=True, record_stack_traces=True
            )(w, torch.empty_like(w), values, scalar, scalar.clone())
            graph, _ = without_writes(graph)
        return without_detach(graph)

    def check(self) -> None:
        """Compare three steps of the optimizer with its rule, in f64.

        Raises:
            ShardirError: they differ: its steps are not one function of the states.
        """
        update = replace(self, dtype=torch.float64)
        try:
            with quiet():
                update._compare()
        except Exception:
            if update.sample.shape == self.shape:
                raise
            replace(update, small=math.inf)._compare()  # a function may be for this shape alone

    def _compare(self) -> None:
        """Compare three steps on the sample."""
        is_function = isinstance(self.optimizer, FunctionOptimizer)
        shape = self.sample.shape
        graph = self.traced(shape, torch.float64)
        lr, state, random = float(self.group["lr"]), dict[str, Any](), torch.Generator()
        theirs, ours = self.sample.clone(), [self.sample, *self.states.values()]
        for done in range(3):
            gradient = torch.randn(shape, dtype=torch.float64, generator=random.manual_seed(done))
            run_step(self.optimizer, self.group, theirs, gradient.clone(), state, lr)
            numbers = (torch.tensor(x, dtype=torch.float64) for x in (lr, done))
            ours = graph(ours[0], gradient, *ours[1:], *numbers)
            wanted = [theirs, *(state[n] for n in self.states)]
            for name, x, y in zip(("the parameter", *self.states), ours, wanted, strict=True):
                if not torch.allclose(x.double(), y.double(), TOLERANCE, 1e-12, equal_nan=True):
                    raise ShardirError(
                        f"expected an optimizer whose steps are one function of its states, got "
                        f"{self.name}, whose step {done + 1} makes another value of {name} than "
                        f"its other steps would; {KEEP if is_function else USE}"
                    )


def add_rules(
    module: Module, optimizer: torch.optim.Optimizer, names: Mapping[int, str], prefix: str = ""
) -> dict[str, str]:
    """Add the rules of an optimizer's parameters to a module; return them by parameter.

    Args:
        prefix: the beginning of the names of its functions.
        names: the names of trained parameters, by id.

    Raises:
        ShardirError: the steps of the optimizer can't be traced, or are not elementwise.
    """
    rules: dict[Any, str] = {}
    rule_of: dict[str, str] = {}
    checked = set[Any]()
    for group in optimizer.param_groups:
        for p in (p for p in group["params"] if id(p) in names):
            given = sorted((n, x) for n, x in group.items() if n not in NOT_OF_RULE)
            # a tensor is printed with 4 digits
            numbers = repr(tree_map_only(torch.Tensor, torch.Tensor.tolist, given))
            key = (tuple(p.shape), p.dtype, numbers, bool(group.get("whole")))
            if key not in rules:
                update = TracedUpdate(optimizer, group, tuple(p.shape), p.dtype)
                is_checked = (numbers, p.dim()) in checked
                name = re.sub(r"\W", "_", f"{prefix}{update.name.lower()}_{len(rules)}")
                rules[key] = _add_rule(module, update, name, is_checked)
                checked.add((numbers, p.dim()))
            rule_of[names[id(p)]] = rules[key]
    return rule_of


def _add_rule(module: Module, update: TracedUpdate, name: str, is_checked: bool) -> str:
    is_function = isinstance(update.optimizer, FunctionOptimizer)
    try:
        graph = update.traced(update.shape, update.computed)
        _check_deterministic(graph)
        if not is_checked:
            update.check()
    except ShardirError as error:
        raise ShardirError(f"{error}{place_of_error(error)}") from None
    except Exception as error:
        line = next((l.strip() for l in str(error).splitlines() if l.strip()), "")
        use = "" if is_function else f"; {USE}"
        if "DataDependent" in type(error).__name__:
            line = "an `if`, or a number of Python, that depends on a tensor: `lr` and `step` are"
            use = f" tensors; use torch.where and torch.sqrt{use}"
        raise ShardirError(
            f"expected an update that can be traced, got {type(error).__name__} in {update.name}"
            f"{place_of_error(error)}: {line:.200}{use}"
        ) from None
    whole = bool(update.group.get("whole"))
    program = TracedProgram(graph, Signature([], []), {}, [])
    importer = Importer(
        Capture(program, torch.nn.Module(), [], [], {}, {}), module, name, train=True, private=True,
        rule=WHOLE if whole else ELEMENTWISE,
    )  # fmt: skip
    _translate(importer, graph, update)
    if not whole and (op := first_on_whole(importer.function.func)) is not None:
        of_class = "" if is_function else ' in its group, {"params": ..., "whole": True}'
        raise ShardirError(
            f"{not_elementwise(op)} in {update.name}; use whole=True{of_class}: the update then "
            "sees the whole parameter"
        )
    return name


def _check_deterministic(graph: GraphModule) -> None:
    """Raise ShardirError if a step draws random numbers."""
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise ShardirError(
                f"expected an update without random numbers, got {node.target}{place_of(node)}"
            )


def _translate(importer: Importer, graph: GraphModule, update: TracedUpdate) -> None:
    """Translate the graph of a step into the function of an importer."""
    f = importer.function
    nodes = iter([n for n in graph.graph.nodes if n.op == "placeholder"])
    dtype, computed = dtype_name(update.dtype), dtype_name(update.computed)
    for name in ("parameter", "gradient"):
        importer.known[next(nodes)] = f.input(name, update.shape, dtype).to(computed)
    for name, x in update.states.items():
        shape = update.shape if x.dim() else ()
        state = f.state(
            name_of_state(update.optimizer, name), shape, dtype_name(x.dtype),
            init=update.init_of(name),
        )  # fmt: skip
        importer.known[next(nodes)] = state.to(computed) if x.dtype is update.dtype else state
    for name, node in zip(("lr", "done"), nodes, strict=True):
        if node.users:
            importer.known[node] = f.scalar(name)
    results = importer.translate_graph(graph)
    dtypes = [dtype, *(dtype_name(x.dtype) for x in update.states.values())]
    f.returns(*(value.to(d) for value, d in zip(results, dtypes, strict=True)))
