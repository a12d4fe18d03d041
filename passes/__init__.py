"""Floor 4: one file a pass, each found through this table, and the named pipelines."""

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from xdsl.passes import ModulePass


def _pass(file: str, name: str) -> Callable[[], type[ModulePass]]:
    return lambda: getattr(import_module(f"shardir.passes.{file}"), name)


PASSES: dict[str, Callable[[], type[ModulePass]]] = {
    "inline-calls": _pass("inline_calls", "InlineCalls"),
    "mixed-precision": _pass("mixed_precision", "MixedPrecision"),
    "search-mesh": _pass("search_mesh", "SearchMesh"),
    "data-parallel": _pass("data_parallel", "DataParallel"),
    "require-layouts": _pass("require_layouts", "RequireLayouts"),
    "propagate-strategies": _pass("propagate_strategies", "PropagateStrategies"),
    "search-strategies": _pass("search_strategies", "SearchStrategies"),
    "save-strategies": _pass("save_strategies", "SaveStrategies"),
    "load-strategies": _pass("load_strategies", "LoadStrategies"),
    "insert-redistributions": _pass("insert_redistributions", "InsertRedistributions"),
    "distributed-autodiff": _pass("distributed_autodiff", "DistributedAutodiff"),
    "recompute": _pass("recompute", "Recompute"),
    "lower-to-spmd": _pass("lower_to_spmd", "LowerToSpmd"),
    "simplify-communication": _pass("simplify_communication", "SimplifyCommunication"),
    "fuse-communication": _pass("fuse_communication", "FuseCommunication"),
    "overlap-communication": _pass("overlap_communication", "OverlapCommunication"),
    "strip-layouts": _pass("strip_layouts", "StripLayouts"),
}


DECIDERS = ("propagate-strategies", "search-strategies", "load-strategies")
"""The passes that decide where values lie."""


def on_one_device(p: ModulePass) -> bool:
    """Whether what a pass does is a part of the program of one device too: a pass says so by
    ONE_DEVICE."""
    return getattr(p, "ONE_DEVICE", False)


_LAID_OUT = "insert-redistributions,distributed-autodiff,recompute"
_LOWERED = "lower-to-spmd,simplify-communication,fuse-communication,overlap-communication"

PIPELINES: dict[str, str] = {
    "train": f"inline-calls,propagate-strategies,{_LAID_OUT},{_LOWERED}",
    "auto": (
        "inline-calls,distributed-autodiff,search-strategies,insert-redistributions,recompute,"
        f"{_LOWERED}"
    ),
    "data": f"inline-calls,data-parallel,propagate-strategies,{_LAID_OUT},{_LOWERED}",
    "hybrid": (
        f"inline-calls,data-parallel{{hybrid=true}},propagate-strategies,{_LAID_OUT},{_LOWERED}"
    ),
    "manual": f"inline-calls,require-layouts,{_LAID_OUT},{_LOWERED}",
    "single-device": "inline-calls,strip-layouts,distributed-autodiff,recompute",
}
"""Names for sequences of passes, to be used like a pass."""


class Mode(NamedTuple):
    """How much of a plan the text states, and who decides on the rest."""

    pipeline: str
    does: str


MODES: dict[str, Mode] = {
    "stand_alone": Mode("single-device", "one device: what is stated of layouts is left out"),
    "data": Mode("data", "inputs split by rows over all devices, parameters whole on each; what "
                 "is stated otherwise is an error"),
    "hybrid": Mode("hybrid", "what is stated, and data parallel all that it leaves open"),
    "semi_auto": Mode("train", "what is stated spreads to the rest"),
    "auto": Mode("auto", "a search decides, for the least cost; what is stated stays"),
    "manual": Mode("manual", "everything is stated, in the local view or by layouts; what is not "
                   "is an error"),
}  # fmt: skip
"""What `--mode` takes: the names of the documents, without their `_parallel`."""
