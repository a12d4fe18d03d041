"""A compiler from single-device tensor programs to per-rank programs on torch.distributed."""

from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardir import cost as cost
    from shardir.algebra.cluster import Cluster as Cluster
    from shardir.algebra.mesh import Mesh as Mesh
    from shardir.algebra.redistribution import plan_redistribution as plan_redistribution
    from shardir.algebra.sdy import from_sdy as from_sdy
    from shardir.algebra.sdy import to_sdy as to_sdy
    from shardir.api.comparison import compare as compare
    from shardir.api.compilation import compile as compile
    from shardir.api.compilation import compile_file as compile_file
    from shardir.api.compilation import run as run
    from shardir.api.compiled import Compiled as Compiled
    from shardir.api.compiled import parse as parse
    from shardir.api.loaded import load as load
    from shardir.backend.torch.dtensor import from_dtensor as from_dtensor
    from shardir.backend.torch.dtensor import to_dtensor as to_dtensor
    from shardir.backend.torch.started import start as start
    from shardir.diagnostics import ShardirError as ShardirError
    from shardir.dialects.nn.custom import register_custom_op as register_custom_op
    from shardir.frontends.torch.function_optimizer import optimizer as optimizer
    from shardir.frontends.torch.steps import Inference as Inference
    from shardir.frontends.torch.steps import Step as Step

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
    "start": "shardir.backend.torch.started",
    "from_dtensor": "shardir.backend.torch.dtensor",
    "to_dtensor": "shardir.backend.torch.dtensor",
    "register_custom_op": "shardir.dialects.nn.custom",
    "optimizer": "shardir.frontends.torch.function_optimizer",
    "Step": "shardir.frontends.torch.steps",
    "Inference": "shardir.frontends.torch.steps",
}
__version__ = "0.1.0"


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
