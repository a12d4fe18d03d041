"""The dialects, passes and targets of all installed packages: their `xdsl.universe` entry points.

Ours are among them, and xDSL's own. A package that provides some is used by all tools, without a
word on the command line.
"""

from functools import cache

from xdsl.universe import Universe

from shardir.diagnostics import ShardirError


@cache
def installed() -> Universe:
    """Return what is installed: one load per process.

    Raises:
        ShardirError: a package cannot be loaded, or two have one name for something.
    """
    try:
        return Universe.get_multiverse()
    except Exception as e:
        raise ShardirError(
            f"expected installed packages with an xdsl.universe that loads, got "
            f"{type(e).__name__}: {e}; repair or uninstall that package"
        ) from e
