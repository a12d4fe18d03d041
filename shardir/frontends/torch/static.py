"""The check that a program is one of shapes and numbers that are known when it is compiled.

h[h > 0]                an index of a mask: how many rows it has depends on the data
h * h.sum().item()      a number of Python, from the elements of a tensor
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from shardir.compat.torch import tree_leaves
from shardir.diagnostics import ShardirError

IGNORED = ("_assert", "sym_", "_check", "item", "_local_scalar_dense")
"""Ops that only check, or whose result only others of these use."""

NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def check_static(node: Node, known: Mapping[Any, Any], at: Callable[[], str]) -> None:
    """Check that the shapes of results, and the numbers that a call gets, do not depend on the
    data. `known`: what was made of each node before; `at` returns the place.

    Raises:
        ShardirError: they do.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.name.partition("::")[2].startswith(IGNORED):
        return
    found = [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]
    if not all(isinstance(n, int) for x in found for n in x.shape):
        raise ShardirError(
            f"expected shapes that do not depend on the data, got a result of {node.target}{at()} "
            "whose size does; keep all elements, with a mask: torch.where"
        )
    given = (n for n in node.all_input_nodes if isinstance(n.meta.get("val"), NUMBERS))
    if found and any(known.get(n) is None for n in given):
        raise ShardirError(
            f"expected numbers that do not depend on the data, got one from a tensor in "
            f"{node.target}{at()}; use the tensor itself, without item()"
        )
