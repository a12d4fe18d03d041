"""Names of arguments, from their paths in JAX."""

import re
from collections.abc import Sequence


def name_of(path: str) -> str:
    """Return the name of an argument: `p.layers.0` of `p['layers'][0]`."""
    return ".".join(re.findall(r"[\w-]+", path))


def unique_names(paths: Sequence[str]) -> list[str]:
    """Return a name for each argument, also without a path."""
    names: dict[str, None] = {}
    for i, path in enumerate(paths):
        name = name_of(path) or f"arg{i}"
        while name in names:
            name += "_"
        names[name] = None
    return list(names)
