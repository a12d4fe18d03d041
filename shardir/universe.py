"""The dialects, passes and target of shardir for any xDSL tool: the `xdsl.universe` entry point.

UNIVERSE has those of all extensions of shardir too, OWN those of shardir alone.
"""

from typing import Any

from shardir.backend import BACKENDS, TEXTS
from shardir.compat.xdsl import universe_of
from shardir.dialects import DIALECTS
from shardir.dialects.installed import installed
from shardir.pipelines import PASSES


def _frontend() -> Any:
    from shardir.syntax.frontend import IrFrontend

    return IrFrontend


OWN = universe_of(DIALECTS, PASSES, {**BACKENDS, **TEXTS}, {"ir": _frontend})


def __getattr__(name: str) -> Any:
    if name != "UNIVERSE":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return installed().universe(OWN)
