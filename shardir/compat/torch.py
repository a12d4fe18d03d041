"""Private names of torch, and names that differ between its versions."""

from collections.abc import Callable
from inspect import getattr_static
from operator import getitem
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch._decomp import decomposition_table
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import checkpoint
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

if TYPE_CHECKING:
    from torch._dynamo.exc import UncapturedHigherOrderOpError, UserError
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
    from torch.export import _trace as export_trace

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "StridedShard",
    "TreeSpec",
    "UncapturedHigherOrderOpError",
    "UserError",
    "decomposition_table",
    "export_trace",
    "keystr",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "unset_fake_temporarily",
]

LATE = {
    "StridedShard": "torch.distributed.tensor.placement_types._StridedShard",
    "UncapturedHigherOrderOpError": "torch._dynamo.exc.UncapturedHigherOrderOpError",
    "UserError": "torch._dynamo.exc.UserError",
    "export_trace": "torch.export._trace",
}
"""Names that take long to load, and are imported on first use."""


def __getattr__(name: str) -> Any:
    if name not in LATE:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return resolve_name(LATE[name])


COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
"""The dispatch key of composite ops, whose gradients follow from their parts."""

NON_REENTRANT = next(
    name
    for name in (
        "_checkpoint_without_reentrant_generator_impl",  # from torch 2.14 on
        "_checkpoint_without_reentrant_generator",
    )
    if hasattr(checkpoint, name)
)
"""The generator of torch.utils.checkpoint that runs a non-reentrant checkpoint."""

DATA = torch._C.TensorBase.__dict__["data"]
"""The attribute `data` of tensors: it makes an alias outside any graph."""

SET_GRAD_ENABLED = torch._C._set_grad_enabled
"""The function by which contexts such as no_grad turn autograd on and off."""


def set_grad_enabled(enabled: bool) -> None:
    """Turn autograd on or off for eager tensors, without a node in the graph being traced."""
    with torch._C.DisableTorchFunction():
        SET_GRAD_ENABLED(enabled)


def functionalize(program: ExportedProgram) -> ExportedProgram:
    """Return the exported program without in-place writes and, within an autocast, with its
    conversions: `run_decompositions` with an empty table. That traces the program once more, so one
    that it would not change, except for unused calls, is returned. Torch's own call prepares all
    its composite ops, which takes 0.3 s; this one only the composite ops that the program calls."""
    from torch.export import exported_program

    prepared = "_collect_all_valid_cia_ops"
    is_prepared = getattr(exported_program, "_is_preservable_cia_op", None)
    if is_prepared is None or not hasattr(exported_program, prepared):
        return program.run_decompositions({})
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, GraphModule)]
    targets = {n.target for graph in graphs for n in graph.nodes if n.op == "call_function"}
    is_plain = len(graphs) == 1 and not torch._C._is_any_autocast_enabled()
    if is_plain and all(_is_functional(target, is_prepared) for target in targets):
        graphs[0].eliminate_dead_code()
        program.graph_module.recompile()
        return program
    composites = {op for op in targets if isinstance(op, OpOverload) and is_prepared(op)}
    with patch.object(exported_program, prepared, lambda: composites):
        return program.run_decompositions({})


def _is_functional(target: Any, is_prepared: Callable[[OpOverload], bool]) -> bool:
    """Whether `run_decompositions` leaves the calls of a target as they are: it writes to no
    operand, and is no composite op, except one that torch can leave whole."""
    if not isinstance(target, OpOverload):
        return target is getitem
    is_composite = target.has_kernel_for_dispatch_key(COMPOSITE)
    return not target._schema.is_mutable and (not is_composite or is_prepared(target))


_apply = getattr_static(torch.autograd.Function, "apply")


def apply_function(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """Call torch's own `apply` of an autograd function, even while it is patched: a class method of
    Python or, from torch 2.14 on, of C."""
    return _apply.__get__(None, cls)(*args, **kwargs)


def schema_of(op: OpOverload) -> Any:
    """Return the schema of an op: its name, arguments and returns."""
    return op._schema


def overload_of(op: OpOverload) -> str:
    """Return the name of the overload of an op: `Tensor` of `aten.add.Tensor`."""
    return op._overloadname


def scheduler_parts(scheduler: Any) -> list[Any]:
    """Return the schedulers within a composite scheduler of torch.optim.lr_scheduler."""
    return scheduler._schedulers


def last_milestone(scheduler: Any) -> int:
    """Return the step from which a SequentialLR uses its last scheduler."""
    return scheduler._milestones[-1]


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether functions are to be called before or after the steps of an optimizer."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return bool(before or after)
