"""The backends and other targets by their names. A backend turns a program in the local view into
one that runs; another target into text for other compilers."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardir.diagnostics import ShardirError

if TYPE_CHECKING:  # with it xDSL is imported, which a run of a compiled program does not need
    from xdsl.utils.target import Target

    from shardir.backend.interface import Backend


def _torch() -> "type[Backend]":
    from shardir.backend.torch.backend import TorchBackend

    return TorchBackend


BACKENDS: "dict[str, Callable[[], type[Backend]]]" = {"torch": _torch}
"""Each is imported when it is asked for. xDSL's tools know them as targets (universe.py)."""


def _stablehlo() -> "type[Target]":
    from shardir.backend.stablehlo.target import StableHloTarget

    return StableHloTarget


TEXTS: "dict[str, Callable[[], type[Target]]]" = {"stablehlo": _stablehlo}
"""The targets that write text for other compilers."""

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
    if target in BACKENDS:
        return BACKENDS[target]()()
    from shardir.backend.interface import Backend
    from shardir.dialects.installed import installed  # with xDSL

    make = installed().tables["targets"].get(target)
    made: Any = make() if make is not None else None
    if made is None or not issubclass(made, Backend):
        known = ", ".join([*BACKENDS, *installed().names("targets")])
        hint = "; use program.stablehlo()" if target in TEXTS else ""
        raise ShardirError(f"expected a backend, one of {known}, got {target!r}{hint}")
    return made()
