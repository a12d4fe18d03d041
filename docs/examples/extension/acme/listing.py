"""A second target: the collectives of a program, one a line."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from xdsl.dialects.builtin import ModuleOp

from shardir.extend import Array, Backend, ShardirError


@dataclass(frozen=True)
class Listing(Backend):
    """The names of the collectives of a program. It writes no program that runs."""

    name: ClassVar[str] = "listing"

    def text(self, module: ModuleOp) -> str:
        ops = (op.name for op in module.walk() if op.name.startswith("dist.all_"))
        return "".join(f"{name}\n" for name in ops)

    def emit_directory(
        self, ctx: Any, module: ModuleOp, original_module: ModuleOp | None, out_dir: str | Path,
        base_dir: Path | None = None, origin: Any = None,
        states: Mapping[str, Array] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        Path(out_dir).mkdir(exist_ok=True)
        (Path(out_dir) / "listing.txt").write_text(self.text(module))

    def run(self, directory: Any, options: Any, on_event: Any = None, batches: Any = None) -> Any:
        raise ShardirError("expected a program that runs, got a listing; use the target torch")

    def measure(
        self, directories: Sequence[Path], rounds: int, seconds: float, options: Any,
        on_round: Callable[[int], object] | None = None,
    ) -> Any:  # fmt: skip
        raise ShardirError("expected a program that runs, got a listing; use the target torch")
