"""Floor 4: one file a pass, each found through this table, and the named pipelines."""

from collections.abc import Callable
from importlib import import_module

from xdsl.passes import ModulePass


def _pass(file: str, name: str) -> Callable[[], type[ModulePass]]:
    return lambda: getattr(import_module(f"shardir.passes.{file}"), name)


PASSES: dict[str, Callable[[], type[ModulePass]]] = {
    "inline-calls": _pass("inline_calls", "InlineCalls"),
    "mixed-precision": _pass("mixed_precision", "MixedPrecision"),
    "propagate-strategies": _pass("propagate_strategies", "PropagateStrategies"),
    "search-strategies": _pass("search_strategies", "SearchStrategies"),
    "insert-redistributions": _pass("insert_redistributions", "InsertRedistributions"),
    "distributed-autodiff": _pass("distributed_autodiff", "DistributedAutodiff"),
    "recompute": _pass("recompute", "Recompute"),
    "lower-to-spmd": _pass("lower_to_spmd", "LowerToSpmd"),
    "simplify-communication": _pass("simplify_communication", "SimplifyCommunication"),
    "fuse-communication": _pass("fuse_communication", "FuseCommunication"),
    "strip-layouts": _pass("strip_layouts", "StripLayouts"),
}


def on_one_device(p: ModulePass) -> bool:
    """Whether what a pass does is a part of the program of one device too: a pass says so by
    ONE_DEVICE."""
    return getattr(p, "ONE_DEVICE", False)


PIPELINES: dict[str, str] = {
    "train": (
        "inline-calls,propagate-strategies,insert-redistributions,distributed-autodiff,recompute,"
        "lower-to-spmd,simplify-communication,fuse-communication"
    ),
    "auto": (
        "inline-calls,distributed-autodiff,search-strategies,insert-redistributions,recompute,"
        "lower-to-spmd,simplify-communication,fuse-communication"
    ),
    "single-device": "inline-calls,strip-layouts,distributed-autodiff,recompute",
}
"""Names for sequences of passes, to be used like a pass."""
