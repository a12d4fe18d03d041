"""A compiler from single-device tensor programs to per-rank programs on torch.distributed."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardir.algebra.errors import ShardirError as ShardirError
    from shardir.api import Compiled as Compiled
    from shardir.api import compile as compile
    from shardir.api import compile_file as compile_file
    from shardir.api import parse as parse
    from shardir.api import run as run

__all__ = ["Compiled", "ShardirError", "compile", "compile_file", "parse", "run"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The names of shardir.api, imported at their first use: `import shardir` stays light."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "ShardirError":
        from shardir.algebra.errors import ShardirError

        return ShardirError
    from shardir import api

    return getattr(api, name)
