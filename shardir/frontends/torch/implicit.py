"""Views that the schema of an op does not name, made visible in an exported graph.

    %y = aten.dropout(%x, 0.1, False)              ->    %y = aten.alias(%x)
    %y = aten.einsum("ij->ji", [%x])               ->    %y = aten.permute(%x, [1, 0])

Such an op is made of others, and returns a view of an operand for some arguments. A graph without
writes takes its result for a copy, so the op is replaced by its decomposition.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from shardir.compat.torch import OpOverload, schema_of, tree_leaves
from shardir.frontends.torch.decompose import decomposed

DROPOUTS = (
    torch.ops.aten.dropout.default, torch.ops.aten.feature_dropout.default,
    torch.ops.aten.alpha_dropout.default, torch.ops.aten.feature_alpha_dropout.default,
)  # fmt: skip
"""Ops that return their operand itself where they are off; fake tensors have a copy there."""


def expose_views(program: GraphModule) -> None:
    """Replace calls whose results share the memory of an operand, though their schema does not say
    so, by views. A graph with such calls is copied: torch.export leaves users of nodes in it that
    are not its own."""
    for module in [m for m in program.modules() if isinstance(m, GraphModule)]:
        hidden = {node for node in module.graph.nodes if _is_hidden_view(node)}
        if hidden:
            module.graph = _copied(module.graph, hidden)
            module.recompile()


def _is_hidden_view(node: Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if node.target in DROPOUTS:
        return not (node.args[1] and node.args[2])
    schema = schema_of(node.target)
    if any(a.alias_info is not None for a in (*schema.returns, *schema.arguments)):
        return False
    operands = {address for n in node.all_input_nodes for address in _addresses(n)}
    return isinstance(node.meta.get("val"), torch.Tensor) and not operands.isdisjoint(
        _addresses(node)
    )


def _addresses(node: Node) -> Iterator[int]:
    """Yield the storages of a node's values."""
    for x in tree_leaves(node.meta.get("val")):
        if isinstance(x, torch.Tensor):
            yield x.untyped_storage()._cdata


def _copied(graph: Graph, hidden: set[Node]) -> Graph:
    """Return a graph of nodes with the same names, of which the `hidden` ones are views."""
    new, made = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        if node not in hidden or (base := _viewed(new, node, made)) is None:
            made[node] = new.node_copy(node, made.__getitem__)
        else:
            view = torch.ops.aten.alias.default
            made[node] = new.create_node("call_function", view, (base,), name=node.name)
            made[node].meta = dict(node.meta)
    return new


def _viewed(new: Graph, node: Node, made: dict[Node, Node]) -> Node | None:
    """Add the ops of which a call is made, and return their result; None if they are not known."""
    if node.target in DROPOUTS:
        return made[node.all_input_nodes[0]]
    if (inner := decomposed(node)) is None:
        return None
    module, given = inner
    places: dict[Node, Any] = {}
    operands = iter(given)
    for part in module.graph.nodes:
        if part.op == "placeholder":
            places[part] = made[next(operands)]
        elif part.op == "call_function":
            args, kwargs = map_arg((part.args, part.kwargs), places.__getitem__)
            name = f"{node.name}_{part.name}"
            places[part] = new.create_node(part.op, part.target, args, kwargs, name=name)
            places[part].meta = {n: x for n, x in node.meta.items() if n != "val"}
    result = module.graph.output_node().args[0]
    return places.get(result) if isinstance(result, Node) else None
