"""The names of values, the paths of the modules that compute them, and their lines.

layers.0.attn.q_proj            the result of the module
layers.0.attn.softmax           a value within one, by its op
"""

import operator
import os
import re
from itertools import pairwise
from pathlib import Path
from sysconfig import get_path

import torch
from torch.fx import GraphModule, Node
from xdsl.dialects.builtin import LocationAttr

from shardir.build.function import file_line, hint_of
from shardir.dialects.locations import file_location

WRAPPED = "model"
"""The attribute of the exported module that is the user's."""


TORCH, OWN, STDLIB = (
    f"{folder}{os.sep}"
    for folder in (Path(torch.__file__).parent, Path(__file__).parent, get_path("stdlib"))
)


def is_of_user(file: str) -> bool:
    """Whether code in a file is neither torch's, nor ours, nor Python's."""
    is_python = file.startswith(STDLIB) and "site-packages" not in file
    return not (is_python or file.startswith((TORCH, OWN)) or "<" in file)


def user_line(trace: str) -> tuple[str, int] | None:
    """Return the file and the line of the innermost frame of the user's code in the text of a stack
    trace; None without one."""
    frames = re.findall(r'File "(.+?)", line (\d+)', trace)
    return next(((f, int(n)) for f, n in reversed(frames) if is_of_user(f)), None)


def path_of(node: Node, outer: str = "") -> str:
    """Return the path of the module that a node is of; `outer` is the path of the module that
    contains the graph."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return outer
    path, _ = list(stack.values())[-1]
    return "" if path in ("", WRAPPED) else path.removeprefix(f"{WRAPPED}.")


def value_names(module: GraphModule, outer: str = "") -> dict[Node, str]:
    """Return the name of the results of each call of a graph, but for results of several."""
    calls = [n for n in module.graph.nodes
             if n.op == "call_function" and n.target is not operator.getitem]  # fmt: skip
    paths = [path_of(n, outer) for n in calls]
    names: dict[Node, str] = {}
    for node, (path, after) in zip(calls, pairwise([*paths, None]), strict=True):
        kind = re.sub(r"_\d+$", "", node.name)
        ends = path and path not in (outer, after) and not f"{after}.".startswith(f"{path}.")
        names[node] = hint_of(path if path and ends else f"{path}.{kind}" if path else kind)
    return names


def location_of(node: Node) -> LocationAttr | None:
    """Return the line of the user's source; None for a node of a decomposition."""
    line = user_line(node.meta.get("stack_trace") or "")
    return None if line is None else file_line(*line)


def place_of(node: Node, outer: str = "") -> str:
    """Return the path of a node's module and the line of the user's source, for a message."""
    path, location = path_of(node, outer), location_of(node)
    place = file_location(location) if location is not None else None
    return (f" in {path!r}" if path else "") + (f" at {place[0]}:{place[1]}" if place else "")
