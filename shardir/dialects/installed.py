"""The dialects, passes and targets of all installed packages: their `xdsl.universe` entry points.

Ours are among them, and xDSL's own. A package that provides some is used by all tools, without a
word on the command line. One that does not load is left out, with a warning that names it.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from xdsl.universe import Universe

from shardir.diagnostics import ShardirError

KINDS = ("all_dialects", "all_passes", "all_targets")


@cache
def installed() -> Universe:
    """Return what is installed: one load per process. Warns about each package that does not load,
    or that has the name of something of another."""
    found = Universe()
    for plugin in sorted(entry_points(group="xdsl.universe"), key=_order):
        try:
            universe = plugin.load()
            if not isinstance(universe, Universe):
                raise TypeError(f"expected an xdsl.universe.Universe, got {universe!r}")
            _add(found, universe, plugin.name)
        except Exception as e:
            warnings.warn(
                f"the plugin {plugin.name} ({plugin.value}) is left out: {type(e).__name__}: {e}; "
                "repair or uninstall its package",
                stacklevel=2,
            )
    return found


def _order(plugin: Any) -> tuple[bool, str]:
    """Ours and xDSL's first: no other package takes their names."""
    return plugin.name not in ("shardir", "xdsl"), plugin.name


def _add(found: Universe, universe: Universe, plugin: str) -> None:
    """Add what a plugin provides. Raises ValueError where something has a name that is taken."""
    new: dict[str, Mapping[str, Any]] = {kind: getattr(universe, kind) for kind in KINDS}
    for kind in KINDS:
        if taken := sorted(getattr(found, kind).keys() & new[kind].keys()):
            raise ValueError(f"expected new names, got {', '.join(taken)}, which others have")
    for kind in KINDS:
        checks = kind != "all_targets"  # whose tools say which package a target needs
        for name, make in new[kind].items():
            getattr(found, kind)[name] = _checked(make, plugin, name) if checks else make


def _checked(make: Callable[[], Any], plugin: str, name: str) -> Callable[[], Any]:
    """Return a loader that raises ShardirError, with the name of the plugin, where it fails."""

    def load() -> Any:
        try:
            return make()
        except Exception as e:
            raise ShardirError(
                f"{name} of the plugin {plugin} cannot be loaded: {type(e).__name__}: {e}; repair "
                "or uninstall its package"
            ) from e

    return load
