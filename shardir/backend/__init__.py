"""The backends by their names: each turns a program in the local view into one that runs."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from shardir.diagnostics import ShardirError

if TYPE_CHECKING:  # with it xDSL is imported, which a run of a compiled program does not need
    from shardir.backend.interface import Backend


def _torch() -> "type[Backend]":
    from shardir.backend.torch.backend import TorchBackend

    return TorchBackend


BACKENDS: "dict[str, Callable[[], type[Backend]]]" = {"torch": _torch}
"""Each is imported when it is asked for. xDSL's tools know them as targets (universe.py)."""

DEFAULT = "torch"


def backend_of(target: "str | Backend") -> "Backend":
    """Return the backend with a name, without options. Returns a backend unchanged.

    Raises:
        ShardirError: there is no backend with that name.
    """
    if not isinstance(target, str):
        from shardir.backend.interface import Backend

        if isinstance(target, Backend):
            return target
    if target not in BACKENDS:
        raise ShardirError(f"expected a backend, one of {', '.join(BACKENDS)}, got {target!r}")
    return BACKENDS[target]()()
