"""Every argument of every entry of the table of ATen ops: results, their dtypes and gradients are
torch's, or an error names the op."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import getitem
from typing import Any

import numpy as np
import pytest
import torch
from support.extent import extent
from support.modules.aten_calls import UNVARIED, WITHOUT_EFFECT, Call, T, calls_of, name_of, ops
from support.modules.imported import with_gradients
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

import shardir
from shardir.compat.torch import tree_leaves
from shardir.diagnostics import ShardirError
from shardir.dialects.train import Role, arguments
from shardir.frontends.torch.capture import Capture
from shardir.frontends.torch.importer import KEY
from shardir.frontends.torch.weights import array_of
from shardir.interpret.evaluator import function, global_type, run

aten = torch.ops.aten

REFUSED = ("randint_like.Tensor-normal",)
"""Calls that the importer refuses, by their names."""

TORCH: Any = torch.__version__
AT_BOUNDS = ("clamp-special", "clamp.Tensor-special") if TORCH >= (2, 14) else ()
"""Calls whose gradient at the bounds is 0 from torch 2.14 on, and ours 1 (README)."""

OTHER_IN_TORCH = (
    *AT_BOUNDS,
    *(f"upsample_nearest{n}d-normal-scales" for n in (1, 2, 3)),
    "randint_like.Tensor", "as_strided_scatter", "topk-special", "topk-equal", "topk-zeros",
    "remainder.Tensor-special", "fmod.Tensor-special",
)  # fmt: skip
"""Beginnings of the names of calls of which torch's own decomposition, or kernels, have several
results, such as the indices of ties; derivatives by 0 (nn.remainder); and as_strided_scatter, whose
gradient in torch is that of the elements that it replaces."""


class One(nn.Module):
    """A call, whose float tensors are parameters."""

    def __init__(self, call: Call):
        super().__init__()
        self.call, self.trained = call, "backward" not in str(call.op)
        self.given = {name: self._held(name, x) for name, x in call.tensors().items()}
        with torch.no_grad():
            self.results()  # torch refuses some
        if self.trained and not self.has_gradient():
            self.trained = False
            for name, p in [*self.named_parameters()]:
                delattr(self, name)
                self.register_buffer(name, p.detach())

    def _held(self, name: str, x: Any) -> Any:
        """The name of a tensor that the module holds now, or the argument as it is."""
        if isinstance(x, list):
            return [self._held(f"{name}_{i}", y) for i, y in enumerate(x)]
        if not isinstance(x, torch.Tensor):
            return x
        name = f"{name}_"
        if x.is_floating_point() and self.trained:
            setattr(self, name, nn.Parameter(x))
        else:
            self.register_buffer(name, x)
        return Held(name)

    def results(self) -> list[torch.Tensor]:
        def tensor(x: Any) -> Any:
            if isinstance(x, list):
                return [tensor(y) for y in x]
            return getattr(self, x) if isinstance(x, Held) else x

        found = self.call.op(**{name: tensor(x) for name, x in self.given.items()})
        found = [x for x in found if x is not None] if isinstance(found, list | tuple) else [found]
        return found[:1] if "embedding_bag" in name_of(self.call.op) else found

    def has_gradient(self) -> bool:
        """Whether torch has a gradient of the op."""
        try:
            torch.autograd.grad(self(), list(self.parameters()), allow_unused=True)
        except (RuntimeError, NotImplementedError):
            return False
        return True

    def forward(self) -> torch.Tensor:
        """The results, each element of floats with its cotangent, in a sum."""
        total = torch.zeros((), dtype=torch.float64)
        for x in self.results():
            if x.is_floating_point():
                total = total + (x.double() * cotangent(x)).sum()
        return total

    def is_random(self) -> bool:
        name = name_of(self.call.op)
        return torch.Tag.nondeterministic_seeded in self.call.op.tags or "empty" in name


def cotangent(x: torch.Tensor) -> torch.Tensor:
    """1 for a number, and random numbers for others."""
    generator = torch.Generator().manual_seed(x.numel())
    drawn = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return drawn if x.dim() else torch.ones_like(drawn)


class Held(str):
    """The name of a tensor of a module."""


@dataclass(frozen=True)
class Program:
    """A graph of calls, with the roles of its arguments, as an exported program has them: faster
    than an export of all of them, whose graph has the same calls."""

    graph_module: GraphModule
    graph_signature: ExportGraphSignature
    state_dict: dict[str, torch.Tensor]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return self.graph_module.graph


def together(calls: Sequence[One]) -> Program:
    """A graph whose results are those of calls."""
    graph, mode = Graph(), FakeTensorMode()
    states: dict[str, torch.Tensor] = {}
    inputs: list[InputSpec] = []
    found: list[Node] = []

    def placeholder(call: int, name: str, x: torch.Tensor) -> Node:
        target = f"c{call}.{name}"
        trained = isinstance(x, nn.Parameter)
        states[target] = x
        node = graph.placeholder(f"c{call}_{name}")
        node.meta["val"] = mode.from_tensor(x)
        kind = InputKind.PARAMETER if trained else InputKind.BUFFER
        spec = InputSpec(kind, TensorArgument(node.name), target, None if trained else True)
        inputs.append(spec)
        return node

    held = [{n: placeholder(i, n, x) for n, x in [*c.named_parameters(), *c.named_buffers()]}
            for i, c in enumerate(calls)]  # fmt: skip
    for at, (call, nodes) in enumerate(zip(calls, held, strict=True)):
        positional, named = arguments_of(call, nodes)
        node = graph.call_function(call.call.op, tuple(positional), named)
        node.name = f"call{at}_"
        given, known = map_arg((tuple(positional), named), lambda n: n.meta["val"])
        with mode, torch.no_grad():
            results = node.meta["val"] = call.call.op(*given, **known)
        if not isinstance(results, list | tuple):
            found.append(node)
            continue
        for i in range(len(call.results())):
            part = graph.call_function(getitem, (node, i))
            part.meta["val"] = results[i]
            found.append(part)
    graph.output(tuple(found))
    outputs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in found]
    signature = ExportGraphSignature(inputs, outputs)
    return Program(GraphModule(nn.Module(), graph), signature, states)


def arguments_of(call: One, nodes: dict[str, Node]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call by their places, and those by their names, with nodes for tensors."""

    def node(x: Any) -> Any:
        if isinstance(x, list):
            return [node(y) for y in x]
        return nodes[x] if isinstance(x, Held) else x

    positional: list[Any] = []
    named: dict[str, Any] = {}
    for a in call.call.op._schema.arguments:
        if a.kwarg_only and a.name in call.given:
            named[a.name] = node(call.given[a.name])
        elif not a.kwarg_only:
            positional.append(node(call.given.get(a.name, a.default_value)))
    return positional, named


def differences(calls: Sequence[One]) -> dict[int, str]:
    """Differences of imported calls from torch, by the index of the call.

    Raises:
        ShardirError: a call is refused.
    """
    wanted = [call.results() for call in calls]
    for call in calls:
        call.zero_grad()
        if call.trained and (total := call()).requires_grad:
            total.backward()
    program: Any = together(calls)
    found = with_gradients(Capture(program, nn.Module(), [], [], program.state_dict, {}), None)
    compiled = shardir.compile(found.module, "single-device").module
    roles = arguments(found.function.func)
    given = [np.array(7) if a.key == KEY else array_of(found.values[a.key or ""]) for a in roles]
    floats = [x for results in wanted for x in results if x.is_floating_point() and x.dim()]
    given += [array_of(cotangent(x)) for x in floats]
    rest = function(compiled, "gradient").body.block.args[len(given) :]
    given += [np.zeros(global_type(a.type, {}).get_shape()) for a in rest]  # of new states
    with np.errstate(all="ignore"):
        results = iter(run(compiled, "gradient", given))
    problems: dict[int, str] = {}
    for i, call in enumerate(calls):
        for x in wanted[i]:
            have = next(results)
            if not call.is_random():
                compare(problems, i, "result", have, array_of(x.detach()))
    names = [a.key or "" for a in roles if a.role is Role.PARAMETER]
    gradients = dict(zip(names, [*results][-len(names) :] if names else [], strict=True))
    for i, call in enumerate(calls):
        for name, p in call.named_parameters():
            want = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
            if (have := gradients.get(f"c{i}.{name}")) is not None and not call.is_random():
                compare(problems, i, f"gradient of {name}", have, array_of(want))
    return problems


def signature(call: One) -> list[Any]:
    """Results of a call: shapes, dtypes, values and gradients."""
    with torch.no_grad():
        found: list[Any] = [(tuple(x.shape), x.dtype) for x in call.results()]
        found += [x.numpy().tobytes() for x in call.results()]
    total, given = call(), list(call.parameters())
    if given and total.requires_grad:
        gradients = torch.autograd.grad(total, given, allow_unused=True)
        found += [None if d is None else d.to_dense().numpy().tobytes() for d in gradients]
    return found


def accepted(calls: Iterable[Call]) -> Iterator[One]:
    """Yield the calls that torch takes."""
    for call in calls:
        try:
            yield One(call)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            assert call.argument or call.kind != "normal", f"torch refuses the base call {call}"


def test_every_argument_is_varied() -> None:
    """Each argument that is no tensor has, in some call, a value with another result."""
    missing, covered = [], 0
    for op in ops():
        base, *others = accepted([c for c in calls_of(op) if c.kind == "normal"])
        effects = {c.call.argument for c in others if signature(c) != signature(base)}
        for a in op._schema.arguments:
            if a.name in UNVARIED | WITHOUT_EFFECT or "Tensor" in str(a.type):
                covered += a.name in base.given
            elif a.name in effects or base.is_random():
                covered += 1
            else:
                missing.append(f"{name_of(op)}: {a.name}")
    print(f"{covered} arguments")
    assert not missing


WITH_POINTS = (
    "norm", "linalg_vector_norm", "max", "min", "amax", "prod", "std", "clamp", "maximum", "celu",
    "pdist", "sinc", "pow", "abs", "hardtanh", "hardswish",
)  # fmt: skip
"""Ops whose gradients at zeros, ties and bounds are in every form of the test."""


@cache
def all_calls() -> list[One]:
    """The calls of this form: a ninth of those with other arguments, or all, of all kinds."""
    every = [c for op in ops() for c in calls_of(op)]
    some = [c for c in every if c.kind == "normal"][::9]
    some += [c for c in every if c.kind in ("special", "zeros")
             and c.op._schema.name.removeprefix("aten::") in WITH_POINTS]  # fmt: skip
    mine = [c for c in extent(some, every) if not str(c).startswith((*REFUSED, *OTHER_IN_TORCH))]
    return [*accepted(mine)]


PARTS = extent(3, 40)


@pytest.mark.parametrize("part", range(PARTS))
def test_calls_are_torchs(part: int) -> None:
    """Values, dtypes and gradients, in the interpreter."""
    mine = all_calls()[part::PARTS]
    assert not {str(mine[i].call): text for i, text in differences(mine).items()}


def test_ops_write_to_what_their_schemas_name() -> None:
    """But for a norm whose running statistics the importer writes, and ops that torch marks."""
    wrong = []
    for op in ops():
        calls = [*calls_of(op)]
        if "running_mean" in {a.name for a in op._schema.arguments}:
            calls.append(with_statistics(calls[0]))
        for call in calls:
            given = call.tensors()
            tensors = [x for x in tree_leaves(given) if isinstance(x, torch.Tensor)]
            copies = [x.clone() for x in tensors]
            with contextlib.suppress(RuntimeError, IndexError, ValueError, TypeError):
                op(**given)
            if [bits(x) for x in tensors] != [bits(x) for x in copies]:
                wrong.append(op)
    marked = {op for op in wrong if torch.Tag.maybe_aliasing_or_mutating in op.tags}
    assert {*wrong} - marked == {aten.instance_norm.default}


def with_statistics(call: Call) -> Call:
    """A call of a norm that trains, with running statistics of its four channels."""
    trains = {a.name for a in call.op._schema.arguments} & {"training", "use_input_stats"}
    statistics = {"running_mean": T((4,)), "running_var": T((4,), "positive")}
    return replace(call, given=call.given | statistics | dict.fromkeys(trains, True))


def bits(x: torch.Tensor) -> bytes:
    return x.numpy().tobytes()


def on_scalars(call: Call, dim: int) -> Call:
    """A call with scalars in place of tensors, of their dimension."""

    def scalar(name: str, x: Any) -> Any:
        if name in ("dim", "dims"):
            return [dim] if isinstance(x, list) else dim
        if isinstance(x, torch.Tensor):
            return torch.zeros((), dtype=x.dtype)
        if isinstance(x, T):
            return T((), "1" if x.kind.isdigit() else x.kind)
        return x

    return replace(call, given={n: scalar(n, x) for n, x in call.given.items()}, argument="dim")


def test_a_scalar_has_a_dimension() -> None:
    """Ops that take a dimension take 0 and -1 of a scalar."""
    named = [op for op in ops() if {"dim", "dims"} & {a.name for a in op._schema.arguments}]
    every = [on_scalars(next(iter(calls_of(op))), dim) for op in named for dim in (0, -1)]
    calls = [*accepted(c for c in every if not str(c).startswith(OTHER_IN_TORCH))]
    assert len(calls) > 100
    assert not {str(calls[i].call): text for i, text in differences(calls).items()}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_op(name: str) -> None:
    (call,) = (c for op in ops() for c in calls_of(op) if str(c) == name)
    with pytest.raises(ShardirError, match=f"aten.{name_of(call.op)}"):
        differences([One(call)])


def test_small_integers_wrap_around() -> None:
    """200 + 100 is 44 of uint8, with its sign in int8 and int16."""
    calls = []
    for dtype in (torch.uint8, torch.int8, torch.int16):
        ends = torch.iinfo(dtype)
        x = torch.tensor([0, 1, 100, ends.max, ends.min, ends.max - 55], dtype=dtype)
        for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor):
            calls.append(One(Call(op, {"self": x, "other": x.flip(0)})))
        calls += [One(Call(op, {"self": x})) for op in (aten.neg.default, aten.bitwise_not.default)]
    assert not differences(calls)


def compare(problems: dict[int, str], at: int, what: str, have: Any, want: Any) -> None:
    if not np.allclose(have, want, rtol=1e-5, atol=1e-6, equal_nan=True):
        problems.setdefault(at, f"{what}: {have!r:.300} for {want!r:.300}")
