"""The target `stablehlo` of the tools: the text of a module of StableHLO."""

from dataclasses import dataclass
from typing import IO, ClassVar

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.utils.target import Target

from shardir.backend.stablehlo.export import to_stablehlo


@dataclass(frozen=True)
class StableHloTarget(Target):
    """StableHLO with Shardy's shardings in the global view; an SPMD program in the local view.

    Args:
        function: its name; by default the only training step, else the only function.
    """

    name: ClassVar[str] = "stablehlo"
    function: str | None = None

    def emit(self, ctx: Context, module: ModuleOp, output: IO[str]) -> None:
        output.write(to_stablehlo(module, self.function))
