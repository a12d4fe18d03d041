"""Floor 4: one file a pass, each found through this table, and the named pipelines."""

from collections.abc import Callable

from xdsl.passes import ModulePass

PASSES: dict[str, Callable[[], type[ModulePass]]] = {}
PIPELINES: dict[str, str] = {}
