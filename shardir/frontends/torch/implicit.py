"""Views, writes and conversions in a graph that torch's functionalization does not see, as ops.

    %y = aten.dropout(%x, 0.1, False)              ->    %y = aten.alias(%x)
    %y = aten.einsum("ij->ji", [%x])               ->    %y = aten.permute(%x, [1, 0])
    %y = aten.instance_norm(%x, ..., %b, ...)      ->    %y = ...; aten.copy_(%b, %mean)
    %y = aten.as_strided(aten.t(%x), ...)         ->    %y = aten.as_strided(%x, ...)
    aten.copy_(%b, %x) of another dtype            ->    aten.copy_(%b, aten._to_copy(%x))
    aten.copy_(%b, 0.5)                            ->    aten.copy_(%b, aten.full_like(%b, 0.5))

The first are views and writes that the schema of an op does not name: such an op is made of others,
and for some arguments it returns a view of an operand, or writes to one. A graph without writes
takes its result for a copy, and its operands for what they were, so the op is replaced by its
decomposition. A strided view is one of memory, and not of the view that it is taken of. After the
last two, readers of %b would get %x without
the conversion, or a number that is no tensor.
"""

from collections.abc import Iterator
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from shardir.compat.torch import OpOverload, schema_of, tree_leaves
from shardir.diagnostics import ShardirError
from shardir.frontends.torch.decompose import decomposed
from shardir.frontends.torch.names import place_of
from shardir.frontends.torch.static import is_view

DROPOUTS = (
    torch.ops.aten.dropout.default, torch.ops.aten.feature_dropout.default,
    torch.ops.aten.alpha_dropout.default, torch.ops.aten.feature_alpha_dropout.default,
)  # fmt: skip
"""Ops that return their operand itself where they are off; fake tensors have a copy there."""


def write_out(program: GraphModule) -> None:
    """Replace calls whose results share the memory of an operand, or that write to one, though
    their schema does not say so, by their decompositions; and convert what is copied into a tensor
    of another dtype. A graph with such calls is made anew: torch.export leaves users of nodes in it
    that are not its own."""
    for module in [m for m in program.modules() if isinstance(m, GraphModule)]:
        nodes = module.graph.nodes
        if any(_is_hidden(node) or _converts(node) or _is_strided(node) for node in nodes):
            module.graph = _copied(module.graph)
            module.recompile()


def _converts(node: Node) -> bool:
    """Whether a call copies a number, or elements of another dtype than those that it writes."""
    if node.target is not torch.ops.aten.copy_.default:
        return False
    written, source = node.args[:2]
    assert isinstance(written, Node)
    return not isinstance(source, Node) or written.meta["val"].dtype != source.meta["val"].dtype


def _is_strided(node: Node) -> bool:
    """Whether a call is a strided view of a view, which has all elements of the memory: of others
    torch drops a part of the gradient.

    Raises:
        ShardirError: it has not.
    """
    if node.target is not torch.ops.aten.as_strided.default:
        return False
    viewed, base = node.args[0], _base(node.args[0])
    assert isinstance(viewed, Node)
    if viewed.meta["val"].numel() != base.meta["val"].numel():
        raise ShardirError(
            f"expected as_strided of a tensor with all elements of its memory, got a part"
            f"{place_of(node)}; clone it first, or index the tensor itself"
        )
    return viewed != base


def _base(x: Any) -> Any:
    """The value whose memory a view has."""
    while isinstance(x, Node) and x.args and (x.target is getitem or is_view(x.target)):
        x = x.args[0]
    return x


def _is_hidden(node: Node) -> bool:
    """Whether a call returns a view, or writes, and its schema does not say so."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if node.target in DROPOUTS:
        return not (node.args[1] and node.args[2])
    if node.target is torch.ops.aten.instance_norm.default:
        _, _, _, running_mean, _, uses_batch, *_ = node.args
        return running_mean is not None and bool(uses_batch)
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


def _copied(graph: Graph) -> Graph:
    """Return a graph of nodes with the same names, in which nothing is implicit."""
    new, made = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        if _is_hidden(node) and (base := _viewed(new, node, made)) is not None:
            view = torch.ops.aten.alias.default
            made[node] = new.create_node("call_function", view, (base,), name=node.name)
            made[node].meta = dict(node.meta)
        else:
            made[node] = new.node_copy(node, made.__getitem__)
            if _converts(node):
                _convert(new, made[node])
            if _is_strided(node):
                viewed, *layout = node.args
                made[node].args = (made[_base(viewed)], *layout)
    return new


def _convert(new: Graph, copy: Node) -> None:
    """Add the conversion of what a call copies."""
    written, source, *rest = copy.args
    assert isinstance(written, Node)
    name, aten = f"{copy.name}_source", torch.ops.aten
    dtype = {"dtype": written.meta["val"].dtype}
    with new.inserting_before(copy):
        if isinstance(source, Node):
            found = new.create_node("call_function", aten._to_copy.default, (source,), dtype, name)
        else:
            given = (written, source)
            found = new.create_node("call_function", aten.full_like.default, given, dtype, name)
    found.meta = {n: x for n, x in copy.meta.items() if n != "val"}
    copy.args = (written, found, *rest)


def _viewed(new: Graph, node: Node, made: dict[Node, Node]) -> Node | None:
    """Add the ops of which a call is made, and return their result; None if they are not known."""
    if node.target in DROPOUTS:
        return made[node.all_input_nodes[0]]
    if (inner := decomposed(node)) is None:
        return None
    module, given, written = inner
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
    for i, value in written.items():
        copied = (made[given[i]], places[value])
        new.create_node(
            "call_function", torch.ops.aten.copy_.default, copied, name=f"{node.name}_{i}"
        ).meta = {n: x for n, x in node.meta.items() if n != "val"}
    result = module.graph.output_node().args[0]
    return places.get(result) if isinstance(result, Node) else None
