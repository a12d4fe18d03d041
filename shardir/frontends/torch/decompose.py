"""Ops that have no entry in the table, by torch's own decompositions."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from shardir.compat.torch import (
    COMPOSITE,
    OpOverload,
    decomposition_table,
    tree_flatten,
    tree_unflatten,
    unset_fake_temporarily,
)
from shardir.frontends.torch.functional import functional_graph


def decomposition(target: OpOverload) -> Callable[..., Any] | None:
    """Return torch's decomposition of an op, if there is one."""
    if target in decomposition_table:
        return decomposition_table[target]
    if target.has_kernel_for_dispatch_key(COMPOSITE):
        return target.decompose
    return None


def decompose_call(node: Node) -> tuple[GraphModule, list[Node], dict[int, Node]] | None:
    """Return the decomposition of a call: its graph, without writes in place; the nodes that are
    its arguments; and the new values of the arguments that it writes to, by index. None without a
    decomposition."""
    assert isinstance(node.target, OpOverload)
    function = decomposition(node.target)
    if function is None:
        return None
    leaves, spec = tree_flatten((node.args, dict(node.kwargs)))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Node)
          and isinstance(leaf.meta.get("val"), torch.Tensor)]  # fmt: skip
    constants = [leaf.meta["val"] if isinstance(leaf, Node) else leaf for leaf in leaves]

    def call(*tensors: torch.Tensor) -> Any:
        leaves_of_call = list(constants)
        for i, x in zip(at, tensors, strict=True):
            leaves_of_call[i] = x
        args, kwargs = _with_mutable_lists(tree_unflatten(leaves_of_call, spec))
        return function(*args, **kwargs)

    examples = [constants[i] for i in at]
    mode = next((x.fake_mode for x in examples if hasattr(x, "fake_mode")), None)
    # torch chooses kernels of oneDNN for tensors on a CPU; they have no decomposition.
    no_mkldnn = torch.backends.mkldnn.flags(enabled=False)
    with warnings.catch_warnings(action="ignore"), mode or unset_fake_temporarily(), no_mkldnn:
        try:
            module, written = functional_graph(call, examples)
        except Exception:  # of any kind: some decompositions refuse these arguments
            return None
    if any(inner.target is node.target for inner in module.graph.nodes):
        return None  # it calls itself, with different strides
    return module, [leaves[i] for i in at], written


def _with_mutable_lists(tree: Any) -> Any:
    """Return the arguments with mutable lists, which a decomposition may change; the lists of a
    graph are immutable."""
    if isinstance(tree, list):
        return [_with_mutable_lists(x) for x in tree]
    if isinstance(tree, dict):
        return {name: _with_mutable_lists(x) for name, x in tree.items()}
    return tuple(map(_with_mutable_lists, tree)) if type(tree) is tuple else tree
