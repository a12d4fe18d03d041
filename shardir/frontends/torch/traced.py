"""A module of torch, traced: its loss and the gradients that autograd computes, as one graph.

The backward part is traced as it runs, including gradients written by hand
(torch.autograd.Function). The graph has the ops below autograd, so a linear layer is a transpose
and a product.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export.graph_signature import (
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, GraphModule, Node, traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardir.frontends.torch.functional import without_writes

MUTATIONS = {
    InputKind.PARAMETER: OutputKind.PARAMETER_MUTATION,
    InputKind.BUFFER: OutputKind.BUFFER_MUTATION,
    InputKind.USER_INPUT: OutputKind.USER_INPUT_MUTATION,
}

_NAMED = TensorArgument("result")


@dataclass(frozen=True)
class Signature:
    """The arguments of a graph, and its results, in order."""

    input_specs: list[InputSpec]
    output_specs: list[OutputSpec]


@dataclass(frozen=True)
class TracedProgram:
    """A graph with the roles of its arguments, as torch.export has them of a module."""

    graph_module: GraphModule
    graph_signature: Signature
    state_dict: dict[str, torch.Tensor]
    gradients: list[str]
    """The names of the parameters whose gradients the graph returns, after loss and metrics."""
    constants: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return self.graph_module.graph


def traced(
    wrapper: torch.nn.Module, work: Callable[..., Any], inputs: list[torch.Tensor]
) -> TracedProgram:
    """Trace the loss of a module and its gradients. `work(states, inputs)` returns the loss and the
    metrics, where `states` has the parameters and buffers by their names."""
    parameters = dict(wrapper.named_parameters())
    states = {**parameters, **dict(wrapper.named_buffers())}
    trained = [name for name, p in parameters.items() if p.requires_grad]

    def step(states: dict[str, torch.Tensor], inputs: list[torch.Tensor]) -> Any:
        differentiable = {n: x.detach().requires_grad_(n in trained) for n, x in states.items()}
        loss, *metrics = work(
            {n: differentiable[n] if n in trained else states[n] for n in states}, inputs
        )
        computed = torch.autograd.grad(
            loss, [differentiable[n] for n in trained], allow_unused=True
        )
        used = {n: g for n, g in zip(trained, computed, strict=True) if g is not None}
        gradients[:] = used
        return (loss, *metrics, *used.values())

    gradients: list[str] = []
    kernels = sdpa_kernel(SDPBackend.MATH)  # fused kernels have backward parts of their own
    no_mkldnn = torch.backends.mkldnn.flags(enabled=False)
    with traceback.preserve_node_meta(), no_mkldnn, kernels, _unchanged(wrapper):
        module = make_fx(
            step, tracing_mode="fake", _allow_non_fake_inputs=True, record_stack_traces=True
        )(states, inputs)
        module, written = without_writes(module)
    kinds = [InputKind.PARAMETER if n in parameters else InputKind.BUFFER for n in states]
    places: list[tuple[InputKind, str | None]] = list(zip(kinds, states, strict=True))
    places += [(InputKind.USER_INPUT, None)] * len(inputs)
    arguments = [n for n in module.graph.nodes if n.op == "placeholder"]
    specs = [
        InputSpec(kind, TensorArgument(node.name), target, persistent=kind is InputKind.BUFFER)
        for (kind, target), node in zip(places, arguments, strict=True)
    ]
    results = module.graph.output_node().args[0]
    assert isinstance(results, tuple | list)
    outputs = [OutputSpec(MUTATIONS[places[i][0]], _NAMED, places[i][1]) for i in written]
    outputs += [OutputSpec(OutputKind.USER_OUTPUT, _NAMED, None)] * (len(results) - len(written))
    return TracedProgram(without_detach(module), Signature(specs, outputs), states, gradients)


@contextmanager
def _unchanged(wrapper: torch.nn.Module) -> Iterator[None]:
    """A context that ends with the attributes of modules as they were: some retain what they have
    computed."""

    def copied(x: Any) -> Any:
        return copy(x) if isinstance(x, dict | list) else x

    before = [(m, {n: copied(x) for n, x in vars(m).items()}) for m in wrapper.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def without_detach(module: GraphModule) -> GraphModule:
    """The graph without aten.detach: nothing in it is differentiated."""
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            source = node.args[0]
            assert isinstance(source, Node)
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)
    module.recompile()
    return module
