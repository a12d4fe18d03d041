"""Graphs without writes, by torch's functionalization: views are computed anew after a write."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from shardir.compat.torch import OpOverload, schema_of

_COPY = torch.ops.aten.copy_.default


def functional_graph(
    function: Callable[..., Any], examples: Sequence[torch.Tensor]
) -> tuple[GraphModule, dict[int, Node]]:
    """Return the graph of a function of tensors, without writes, and the new values of the
    arguments that it writes to, by their indices."""
    module = make_fx(torch.func.functionalize(function))(*examples)
    if any(map(_writes, module.graph.nodes)):  # those of a composite kernel, called by itself
        traced = module
        module = make_fx(torch.func.functionalize(lambda *given: Interpreter(traced).run(*given)))(
            *examples
        )
    graph = module.graph
    arguments = [n for n in graph.nodes if n.op == "placeholder"]
    written: dict[int, Node] = {}
    for node in list(graph.nodes):
        if node.target is _COPY and node.args[0] in arguments:
            written[arguments.index(node.args[0])] = node.args[1]
            graph.erase_node(node)
    return module, written


def _writes(node: Node) -> bool:
    """Whether a node writes in place. Functionalization ends in copies to arguments."""
    target = node.target
    return isinstance(target, OpOverload) and schema_of(target).is_mutable and target is not _COPY


def without_writes(module: GraphModule) -> tuple[GraphModule, list[int]]:
    """Return an equivalent graph without writes, and the indices of the arguments to which the
    original writes: their new values are the first results."""
    examples = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    new, written = functional_graph(lambda *given: Interpreter(module).run(*given), examples)
    end = new.graph.output_node()
    results = end.args[0]
    assert isinstance(results, tuple | list)
    end.args = ((*written.values(), *results),)
    new.graph.eliminate_dead_code()
    new.recompile()
    return new, list(written)
