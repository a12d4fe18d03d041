"""Views, writes and conversions in a graph that torch's functionalization does not see, as ops.

    %y, %z = aten.broadcast_tensors([%x, %b])      ->    %y = aten.expand(%x, ...), ...
    %y = aten.einsum("ij->ji", [%x])               ->    %y = aten.permute(%x, [1, 0])
    %y = aten.instance_norm(%x, ..., %b, ...)      ->    %y = ...; aten.copy_(%b, %mean)
    %y = aten.as_strided(aten.t(%x), ...)         ->    %y = aten.as_strided(%x, ...)
    %y = aten.flatten(%x), where it is a view      ->    %y = aten.view(%x, [...])
    aten.copy_(%b, %x) of another dtype or shape   ->    aten.copy_(%b, aten.expand(_to_copy(%x)))
    aten.copy_(%b, 0.5)                            ->    aten.copy_(%b, aten.full_like(%b, 0.5))

The first three are views and writes that the schema of an op does not name: the op is composite,
and for some arguments it returns a view of an operand, or writes to one. A graph without writes
would take its result for a copy, and its operands for unchanged, so the op is replaced by its
decomposition. A strided view is a view of memory, not of the view that it is taken of. Whether
`flatten` returns a view or a copy depends on strides, which functionalization changes: where there
is a write later, it is made the one that it was. After the last two, readers of %b would get %x
without the conversion, or a number that is no tensor.
"""

from collections.abc import Iterator, Sequence
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from shardir.compat.torch import OpOverload, schema_of, tree_leaves
from shardir.diagnostics import ShardirError
from shardir.frontends.torch.decompose import decompose_call
from shardir.frontends.torch.names import place_of
from shardir.frontends.torch.static import is_view, written_nodes


def write_out(program: GraphModule) -> None:
    """Replace calls whose results share the memory of an operand, or that write to an operand,
    without saying so in their schema, by their decompositions. Convert sources that are copied into
    a tensor of a different dtype or shape. A graph with such calls is rebuilt: torch.export leaves
    foreign users of nodes in it."""
    for module in [m for m in program.modules() if isinstance(m, GraphModule)]:
        nodes = module.graph.nodes
        if _depending_on_strides(module.graph) or any(
            _is_hidden(node) or _converts(node) or _is_strided(node) for node in nodes
        ):
            module.graph = _rebuild(module.graph)
            module.recompile()


def _converts(node: Node) -> bool:
    """Whether a call copies a number, or elements of a dtype or shape different from the
    target's."""
    if node.target is not torch.ops.aten.copy_.default:
        return False
    written, source = node.args[:2]
    assert isinstance(written, Node)
    if not isinstance(source, Node):
        return True
    to, x = written.meta["val"], source.meta["val"]
    return (to.dtype, to.shape) != (x.dtype, x.shape)


def _is_strided(node: Node) -> bool:
    """Whether a call is a strided view of a view. The view must have all elements of the memory, in
    order of its dimensions: of a part torch loses a part of the gradient, and a graph without
    writes stores tensors in this order.

    Raises:
        ShardirError: it does not.
    """
    if node.target is not torch.ops.aten.as_strided.default:
        return False
    viewed, base = node.args[0], _views(node.args[0])[-1]
    assert isinstance(viewed, Node)
    if viewed.meta["val"].numel() != base.meta["val"].numel():
        raise ShardirError(
            f"expected as_strided of a tensor with all elements of its memory, got a part"
            f"{place_of(node)}; clone it first, or index the tensor itself"
        )
    if not base.meta["val"].is_contiguous():
        raise ShardirError(
            f"expected as_strided of a contiguous tensor, got one of the strides "
            f"{list(base.meta['val'].stride())}{place_of(node)}; use x.contiguous() first"
        )
    return viewed != base


def _views(x: Any) -> list[Any]:
    """The views from a value to the one whose memory it has, which is the last. A call that may
    return a view, such as `reshape`, may have made a copy, which has memory of its own."""
    found = [x]
    while isinstance(x, Node):
        call = x.args[0] if x.target is getitem else x  # one of several views, as of split
        viewed = call.args[0] if isinstance(call, Node) and is_view(call.target) else None
        if not isinstance(viewed, Node) or {*_addresses(x)}.isdisjoint(_addresses(viewed)):
            break
        found.append(x := viewed)
    return found


RESHAPES = frozenset({
    "aten::contiguous", "aten::flatten", "aten::ravel", "aten::reshape", "aten::reshape_as",
})  # fmt: skip
"""The ops that return a view where strides allow it, else a copy."""


def _depending_on_strides(graph: Graph) -> set[Node]:
    """Return the reshapes whose operand or result is written later."""
    found, written = set[Node](), set[int]()
    for node in reversed(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        if schema_of(node.target).name in RESHAPES and isinstance(x := node.args[0], Node):
            of_both = {*_addresses(node), *_addresses(x)}
            if not written.isdisjoint(of_both):
                found.add(node)
        written |= {address for x in written_nodes(node) for address in _addresses(x)}
    return found


def _is_hidden(node: Node) -> bool:
    """Whether a call returns a view, or writes, and its schema does not say so."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if node.target is torch.ops.aten.instance_norm.default:
        _, _, _, running_mean, _, uses_batch, *_ = node.args
        return running_mean is not None and bool(uses_batch)
    schema = schema_of(node.target)
    if any(a.alias_info is not None for a in (*schema.returns, *schema.arguments)):
        return False
    operands = {address for n in node.all_input_nodes for address in _addresses(n)}
    return not operands.isdisjoint(_addresses(node))


def _addresses(node: Node) -> Iterator[int]:
    """Yield the storages of a node's values."""
    for x in tree_leaves(node.meta.get("val")):
        if isinstance(x, torch.Tensor):
            yield x.untyped_storage()._cdata


def _rebuild(graph: Graph) -> Graph:
    """Return a graph of nodes with the same names, in which nothing is implicit."""
    new, made, parts = Graph(), dict[Node, Node](), dict[Node, Sequence[Node]]()
    of_strides = _depending_on_strides(graph)
    for node in graph.nodes:
        base = None
        if _is_hidden(node) and (results := _inline_decomposition(new, node, made)) is not None:
            if not isinstance(node.meta["val"], torch.Tensor):
                parts[node] = results
                continue
            (base,) = results
        elif node.target is getitem and node.args[0] in parts:
            base = parts[node.args[0]][node.args[1]]
        if base is not None:
            view = torch.ops.aten.alias.default
            made[node] = new.create_node("call_function", view, (base,), name=node.name)
            made[node].meta = dict(node.meta)
        elif node in of_strides:
            made[node] = _reshape(new, node, made)
        else:
            made[node] = new.node_copy(node, made.__getitem__)
            if _converts(node):
                _convert(new, made[node])
            if _is_strided(node):
                viewed, *layout = node.args
                made[node].args = (_owner(new, made[node], made, _views(viewed)), *layout)
    return new


def _reshape(new: Graph, node: Node, made: dict[Node, Node]) -> Node:
    """Add a reshape as the view or the copy that it is, whatever the strides of its operand."""
    aten, shape, operand = torch.ops.aten, [*node.meta["val"].shape], node.args[0]
    assert isinstance(operand, Node)
    x = made[operand]
    if {*_addresses(node)}.isdisjoint(_addresses(operand)):
        x = new.call_function(aten.clone.default, (x,), {"memory_format": torch.contiguous_format})
        x.meta = {key: value for key, value in node.meta.items() if key != "val"}
    view = new.create_node("call_function", aten.view.default, (x, shape), name=node.name)
    view.meta = dict(node.meta)
    return view


def _owner(new: Graph, call: Node, made: dict[Node, Node], views: Sequence[Node]) -> Node:
    """Return the tensor on which a call takes a strided view, instead of the first of `views`: the
    last one, detached if another view is detached from it."""
    owner, detach = made[views[-1]], torch.ops.aten.detach.default
    if all(view.target is not detach for view in views[:-1]):
        return owner
    with new.inserting_before(call):
        detached = new.call_function(detach, (owner,))
    detached.meta = dict(views[-1].meta)
    return detached


def _convert(new: Graph, copy: Node) -> None:
    """Give a call that copies a source of the dtype and shape of the tensor that it writes."""
    written, source, *rest = copy.args
    assert isinstance(written, Node)
    to, aten = written.meta["val"], torch.ops.aten
    meta = {n: x for n, x in copy.meta.items() if n != "val"}

    def call(op: OpOverload, *args: Any, **kwargs: Any) -> Node:
        name = f"{copy.name}_source"
        node = new.create_node("call_function", op, args, kwargs, name)
        node.meta = dict(meta)
        return node

    with new.inserting_before(copy):
        if not isinstance(source, Node):
            source = call(aten.full_like.default, written, source, dtype=to.dtype)
        elif source.meta["val"].dtype != to.dtype:
            source = call(aten._to_copy.default, source, dtype=to.dtype)
        expanded = call(aten.expand.default, source, [*to.shape])
    copy.args = (written, expanded, *rest)


def _inline_decomposition(new: Graph, node: Node, made: dict[Node, Node]) -> list[Node] | None:
    """Add the decomposition of a call, and return its results; None without a decomposition."""
    if (inner := decompose_call(node)) is None:
        return None
    module, operand_nodes, written = inner
    places: dict[Node, Any] = {}
    operands = iter(operand_nodes)
    for part in module.graph.nodes:
        if part.op == "placeholder":
            places[part] = made[next(operands)]
        elif part.op == "call_function":
            args, kwargs = map_arg((part.args, part.kwargs), places.__getitem__)
            name = f"{node.name}_{part.name}"
            places[part] = new.create_node(part.op, part.target, args, kwargs, name=name)
            places[part].meta = {n: x for n, x in node.meta.items() if n != "val"}
    for i, value in written.items():
        copied = (made[operand_nodes[i]], places[value])
        new.create_node(
            "call_function", torch.ops.aten.copy_.default, copied, name=f"{node.name}_{i}"
        ).meta = {n: x for n, x in node.meta.items() if n != "val"}
    results = module.graph.output_node().args[0]
    return [places[x] for x in tree_leaves(results)]
