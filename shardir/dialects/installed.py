"""The dialects, passes and targets of all installed packages: their `xdsl.universe` entry points.

Ours and xDSL's own are among them. All tools use an installed plugin without an option on the
command line. A plugin that does not load is left out, with a warning that names it.
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
    """Return the universe of all plugins, loaded once per process. Warns about each plugin that
    does not load, or that provides a name of another plugin."""
    everything = Universe()
    for plugin in sorted(entry_points(group="xdsl.universe"), key=_order):
        try:
            universe = plugin.load()
            if not isinstance(universe, Universe):
                raise TypeError(f"expected an xdsl.universe.Universe, got {universe!r}")
            _add(everything, universe, plugin.name)
        except Exception as e:
            warnings.warn(
                f"the plugin {plugin.name} ({plugin.value}) is left out: {type(e).__name__}: {e}; "
                "repair or uninstall its package",
                stacklevel=2,
            )
    return everything


def _order(plugin: Any) -> tuple[bool, str]:
    """Sort key: ours and xDSL's first, so that no other plugin takes their names."""
    return plugin.name not in ("shardir", "xdsl"), plugin.name


def _add(everything: Universe, universe: Universe, plugin: str) -> None:
    """Add a plugin's dialects, passes and targets. Raises ValueError for a name that is taken."""
    new: dict[str, Mapping[str, Any]] = {kind: getattr(universe, kind) for kind in KINDS}
    for kind in KINDS:
        if taken := sorted(getattr(everything, kind).keys() & new[kind].keys()):
            raise ValueError(f"expected new names, got {', '.join(taken)}, which others have")
    for kind in KINDS:
        checks = kind != "all_targets"  # a target's tool says which package it needs
        for name, make in new[kind].items():
            getattr(everything, kind)[name] = _checked(make, plugin, name) if checks else make


def _checked(make: Callable[[], Any], plugin: str, name: str) -> Callable[[], Any]:
    """Return a loader whose failure is a ShardirError that names the plugin."""

    def load() -> Any:
        try:
            return make()
        except Exception as e:
            raise ShardirError(
                f"{name} of the plugin {plugin} cannot be loaded: {type(e).__name__}: {e}; repair "
                "or uninstall its package"
            ) from e

    return load
