"""`-t torch`: a module in the local view -> a directory that needs only Python and torch.

    program.py       what every rank runs
    single.py        the same on one device, from the program before the passes
    plan.json        what the functions take and give
    data/*.npy       the arrays that the program is fed with
    runtime.py ...   the files of runtime/ that the programs import

It is written beside its place and moved there, so that an error leaves nothing half done.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.utils.target import Target

from shardir.algebra.errors import ShardirError
from shardir.backend.torch.emit.plan import Data, plan_of
from shardir.backend.torch.emit.program import Emitted, emitted, mesh_of, program_text
from shardir.backend.torch.runtime import FOLDER, RUNTIME_FILES, files_for
from shardir.pipelines import build
from shardir.syntax.diagnostics import warn

SINGLE_DEVICE = "single-device"
"""The pipeline from the program as written to the program of one device."""


@dataclass(frozen=True)
class TorchTarget(Target):
    """Python programs on torch.distributed; with per-rank, also one for each rank to read."""

    name: ClassVar[str] = "torch"
    per_rank: bool = False

    def emit(self, ctx: Context, module: ModuleOp, output: IO[str]) -> None:
        """The text of program.py."""
        output.write(program_text(module))

    def emit_directory(
        self,
        ctx: Context,
        module: ModuleOp,
        original_module: ModuleOp | None,
        out_dir: str | Path,
        base_dir: Path | None = None,
    ) -> None:
        """Writes everything that runs; nothing where something is wrong.

        Args:
            original_module: the program before all passes, from which that of one device is made.
            base_dir: where the paths of data files count from; else the source file's folder.

        Raises:
            ShardirError: the module has what cannot be emitted, or the directory is another's.
        """
        texts, modules, data = self.files(ctx, module, original_module, base_dir)
        with replacing(Path(out_dir)) as fresh:
            for name, text in texts.items():
                (fresh / name).write_text(text, encoding="utf-8")
            for name in files_for(modules):
                shutil.copyfile(FOLDER / name, fresh / name)
            for name, values in data.files.items():
                (fresh / name).parent.mkdir(exist_ok=True)
                np.save(fresh / name, values, allow_pickle=False)

    def files(
        self, ctx: Context, module: ModuleOp, original: ModuleOp | None, base_dir: Path | None
    ) -> tuple[dict[str, str], set[str], Data]:
        """The texts by file name, the modules that they import, and the data."""
        plan, data = plan_of(module, base_dir)
        programs = {"program.py": emitted(module)}
        single = single_program(ctx, original, plan, base_dir) if original is not None else None
        if single is not None:
            programs["single.py"] = single
        plan["single"] = "single.py" if single is not None else None
        mesh = mesh_of(module)
        if self.per_rank and mesh is not None:
            for rank in range(mesh.size):
                programs[f"program_rank{rank}.py"] = emitted(module, rank=rank)
        texts = {name: program.text for name, program in programs.items()}
        texts["plan.json"] = json.dumps(plan, indent=1) + "\n"
        return texts, {m for program in programs.values() for m in program.modules}, data


def single_program(
    ctx: Context, original: ModuleOp, plan: dict[str, Any], base_dir: Path | None = None
) -> Emitted | None:
    """The program of one device; None where there is none, as of a program written per device."""
    from shardir.analysis.functions import is_local_body
    from shardir.passes.functions import bodies

    module = original.clone()
    if any(is_local_body(block) for _, block in bodies(module)):
        return None
    try:
        for p in build(SINGLE_DEVICE):
            p.apply(ctx, module)
        mine, _ = plan_of(module, base_dir)
        program = emitted(module, single=True)
    except ShardirError as error:
        warn(None, f"there is no single.py to compare with: {error}")
        return None
    if _interface(mine) != _interface(plan):
        warn(None, "there is no single.py to compare with: it would take or give other values")
        return None
    return program


def _interface(plan: dict[str, Any]) -> dict[str, Any]:
    """What the functions take and give, wherever it lies."""
    return {
        name: [
            [(v["shape"], v["dtype"], v.get("key"), v.get("updates")) for v in f[side]]
            for side in ("args", "results")
        ]
        for name, f in plan["functions"].items()
    }


def _is_ours(name: str) -> bool:
    known = {*RUNTIME_FILES, "program.py", "single.py", "plan.json", "data", "__pycache__"}
    return name in known or (name.startswith("program_rank") and name.endswith(".py"))


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A new folder that takes the place of `out` when all went well. What else lies in an earlier
    one (checkpoints) stays.

    Raises:
        ShardirError: there is something at `out` that is no emitted program.
    """
    out = out.absolute()
    if out.is_symlink():
        out = out.resolve()
    if out.exists() and not out.is_dir():
        raise ShardirError(f"{out} is a file, not a directory")
    old = sorted(out.iterdir()) if out.exists() else []
    if old and not (out / "plan.json").is_file():
        raise ShardirError(
            f"{out} has other files and no plan.json: it is not overwritten; choose another"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise ShardirError(f"{out} cannot be written: {error}") from None
    fresh, aside = work / "new", work / "old"
    try:
        fresh.mkdir()
        yield fresh
        if not out.exists():
            fresh.rename(out)
            return
        out.rename(aside)
        try:
            fresh.rename(out)
        except BaseException:
            aside.rename(out)
            raise
        for path in old:
            if not _is_ours(path.name):
                (aside / path.name).rename(out / path.name)
    except OSError as error:
        raise ShardirError(f"{out} cannot be written: {error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
