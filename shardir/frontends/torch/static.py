"""The check that a program is one of shapes and numbers that are known when it is compiled.

h[h > 0]                an index of a mask: how many rows it has depends on the data
h * h.sum().item()      a number of Python, from the elements of a tensor
"""

from collections.abc import Callable, Iterator, Mapping
from operator import getitem
from typing import Any

import torch
from torch.fx import GraphModule, Node

from shardir.compat.torch import HigherOrderOperator, OpOverload, schema_of, tree_leaves
from shardir.diagnostics import ShardirError
from shardir.frontends.torch.names import place_of

CHOICE = (
    "write it without control flow on tensors: torch.where computes both sides, a loop of Python "
    "repeats ops"
)
"""The remedy for ops with functions as arguments."""

IGNORED = ("_assert", "sym_", "_check", "item", "_local_scalar_dense")
"""Ops that only check, or whose result only such ops use."""

REGIONS = ("wrap_with_autocast",)
"""Ops that run a subgraph unchanged."""

NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def check_static(node: Node, known: Mapping[Any, Any], at: Callable[[], str]) -> None:
    """Check that the shapes of results, and the numbers that a call gets, do not depend on the
    data. `known`: the results of each node before; `at` returns the place.

    Raises:
        ShardirError: they do.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.name.partition("::")[2].startswith(IGNORED):
        return
    tensors = [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]
    if not all(isinstance(n, int) for x in tensors for n in x.shape):
        raise ShardirError(
            f"expected shapes that do not depend on the data, got a result of {node.target}{at()} "
            "whose size does; keep all elements, with a mask: torch.where"
        )
    numbers = (n for n in node.all_input_nodes if isinstance(n.meta.get("val"), NUMBERS))
    if tensors and any(known.get(n) is None for n in numbers):
        raise ShardirError(
            f"expected numbers that do not depend on the data, got one from a tensor in "
            f"{node.target}{at()}; use the tensor itself, without item()"
        )


def check_exported(program: GraphModule) -> None:
    """Check that an exported graph is one that a program can have: no op depends on the data for
    its choice of computation, or writes to elements that overlap in memory, which torch itself
    refuses.

    Raises:
        ShardirError: there is such an op.
    """
    graphs = [m.graph for m in program.modules() if isinstance(m, GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes):
        for expected, is_wrong, got, fix in _REFUSED:
            if is_wrong(node):
                message = got.format(node.target)
                raise ShardirError(f"expected {expected}, got {message}{place_of(node)}; {fix}")


def _is_control_flow(node: Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and str(node.target) not in REGIONS


def written_nodes(node: Node) -> Iterator[Node]:
    """Yield the values that a call writes to: in place, as `out=`, or in lists of `_foreach_`
    functions."""
    if isinstance(node.target, OpOverload):
        schema = schema_of(node.target).arguments
        by_name = dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs
        for argument in schema:
            if argument.alias_info is not None and argument.alias_info.is_write:
                leaves = tree_leaves(by_name.get(argument.name))
                yield from (x for x in leaves if isinstance(x, Node))


def _repeats_elements(x: Any) -> bool:
    example = x.meta.get("val") if isinstance(x, Node) else None
    return isinstance(example, torch.Tensor) and any(
        step == 0 and n > 1 for n, step in zip(example.shape, example.stride(), strict=True)
    )


def _changes_shape(node: Node) -> bool:
    """Whether a call makes an argument of the graph a view of itself, as `t_` does."""
    if not isinstance(node.target, OpOverload) or torch.Tag.inplace_view not in node.target.tags:
        return False
    viewed = node.args[0]
    return isinstance(viewed, Node) and viewed.op == "placeholder"


def _is_of_windows(x: Any) -> bool:
    """Whether a value is a view of windows (`unfold`) that are not all elements, each once: torch
    refuses a write, or makes the elements between them 0."""
    while isinstance(x, Node) and x.args:
        args: Any = x.args
        if x.target == torch.ops.aten.unfold.default:
            source, dim, size, step = args
            shape = source.meta["val"].shape
            if shape and (size != step or shape[dim] % step):
                return True
        x = args[0] if x.target is getitem or is_view(x.target) else None
    return False


def is_view(op: Any) -> bool:
    """Return whether an op returns a view of its first argument."""
    first = schema_of(op).arguments[:1] if isinstance(op, OpOverload) else []
    return bool(first) and first[0].alias_info is not None


_REFUSED: tuple[tuple[str, Callable[[Node], bool], str, str], ...] = (
    ("a module without control flow on tensors", _is_control_flow, "torch.{}", CHOICE),
    (
        "a view that can be written to",
        lambda node: any(map(_repeats_elements, written_nodes(node))),
        "a write to one that repeats elements", "clone it first",
    ),
    (
        "a view that can be written to", lambda node: any(map(_is_of_windows, written_nodes(node))),
        "a write to windows that overlap or leave elements out",
        "clone them first, or write to slices",
    ),
    (
        "arguments, parameters and buffers that keep their shape", _changes_shape, "{} of one",
        "use the function that returns a new view, such as t()",
    ),
)  # fmt: skip
"""Calls that a program can't have: the expectation, the predicate, the call found, and the fix."""
