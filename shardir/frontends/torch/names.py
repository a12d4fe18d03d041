"""The names of values: the paths of the modules that compute them.

layers.0.attn.q_proj            the result of the module
layers.0.attn.softmax           a value within one, by its op
"""

import re

from torch.fx import GraphModule, Node

from shardir.build.function import hint_of

WRAPPED = "model"
"""The attribute of the exported module that is the user's."""


def path_of(node: Node, outer: str = "") -> str:
    """Return the path of the module that a node is of; `outer` is that of what contains the
    graph."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return outer
    path, _ = list(stack.values())[-1]
    return "" if path in ("", WRAPPED) else hint_of(path.removeprefix(f"{WRAPPED}."))


def value_names(module: GraphModule, outer: str = "") -> dict[Node, str]:
    """Return the name of the results of each call of a graph."""
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    paths = [path_of(n, outer) for n in calls]
    names: dict[Node, str] = {}
    for node, path, after in zip(calls, paths, [*paths[1:], None], strict=True):
        kind = re.sub(r"_\d+$", "", node.name)
        ends = path and path not in (outer, after) and not f"{after}.".startswith(f"{path}.")
        names[node] = path if ends else f"{path}.{kind}" if path else kind
    return names
