"""A compiler from single-device tensor programs to per-rank programs on torch.distributed."""

from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

__all__ = [
    "Cluster",
    "Compiled",
    "Inference",
    "Mesh",
    "ShardirError",
    "Step",
    "__version__",
    "compare",
    "compile",
    "compile_file",
    "from_dtensor",
    "from_jax",
    "from_sdy",
    "from_stablehlo",
    "load",
    "optimizer",
    "parse",
    "plan_redistribution",
    "register",
    "register_custom_op",
    "run",
    "start",
    "to_dtensor",
    "to_sdy",
    "to_stablehlo",
]

if TYPE_CHECKING:
    from shardir import cost as cost
    from shardir.algebra.cluster import Cluster
    from shardir.algebra.mesh import Mesh
    from shardir.algebra.redistribution import plan_redistribution
    from shardir.algebra.sdy import from_sdy, to_sdy
    from shardir.api.comparison import compare
    from shardir.api.compilation import compile, compile_file, run
    from shardir.api.compiled import Compiled, parse
    from shardir.api.loaded import load
    from shardir.api.stablehlo import from_jax, from_stablehlo
    from shardir.backend.stablehlo.export import to_stablehlo
    from shardir.backend.torch.dtensor import from_dtensor, to_dtensor
    from shardir.backend.torch.started import start
    from shardir.diagnostics import ShardirError
    from shardir.dialects.nn.custom import register_custom_op
    from shardir.extend import register
    from shardir.frontends.torch.function_optimizer import optimizer
    from shardir.frontends.torch.steps import Inference, Step

PLACES = {
    "ShardirError": "shardir.diagnostics",
    "Mesh": "shardir.algebra.mesh",
    "Cluster": "shardir.algebra.cluster",
    "plan_redistribution": "shardir.algebra.redistribution",
    "from_sdy": "shardir.algebra.sdy",
    "to_sdy": "shardir.algebra.sdy",
    "Compiled": "shardir.api.compiled",
    "compile": "shardir.api.compilation",
    "compile_file": "shardir.api.compilation",
    "parse": "shardir.api.compiled",
    "compare": "shardir.api.comparison",
    "run": "shardir.api.compilation",
    "load": "shardir.api.loaded",
    "from_jax": "shardir.api.stablehlo",
    "from_stablehlo": "shardir.api.stablehlo",
    "to_stablehlo": "shardir.backend.stablehlo.export",
    "start": "shardir.backend.torch.started",
    "from_dtensor": "shardir.backend.torch.dtensor",
    "to_dtensor": "shardir.backend.torch.dtensor",
    "register": "shardir.extend",
    "register_custom_op": "shardir.dialects.nn.custom",
    "optimizer": "shardir.frontends.torch.function_optimizer",
    "Step": "shardir.frontends.torch.steps",
    "Inference": "shardir.frontends.torch.steps",
}


def __getattr__(name: str) -> Any:
    """The public names and the packages, imported at their first use: `import shardir` stays
    light."""
    if name in PLACES:
        return getattr(import_module(PLACES[name]), name)
    if name.startswith("_") or find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    """Return the names that `shardir.` completes: the names in PLACES, and the packages."""
    packages = [m.name for m in iter_modules(__path__) if not m.name.startswith("_")]
    return sorted({*PLACES, *packages, "__version__"})
