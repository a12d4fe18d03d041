"""Folders of checkpoints, and checkpoint.json: what a checkpoint has, checked before it is used.

    FOLDER/step-00000100/checkpoint.json
    FOLDER/step-00000100/shard-00001-model-00001-of-00001.safetensors ...
    FOLDER/step-00000200.incomplete/           being written, or what an interrupted run has left

    {"version": 1, "function": "step", "step": 100, "seed": 0,
     "states": {"w": {"shape": [8, 4], "dtype": "f32"}},
     "files": {"shard-00001-model-00001-of-00001.safetensors": {"bytes": 432, "crc32": 305419896}}}

`step` is the number of steps that are done. A part of the runtime; needs only Python.
"""

import json
import os
import re
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

from runtime_plan import PlanError, ProgramPlan
from runtime_weights import several

NAME, INCOMPLETE = "checkpoint.json", ".incomplete"
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Manifest:
    """The content of checkpoint.json."""

    function: str
    step: int
    seed: int
    states: dict[str, dict]
    files: dict[str, dict]
    version: int = 1

    def write(self, folder: Path) -> None:
        """Write it, through to the disk."""
        with (folder / NAME).open("x", encoding="utf-8") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}"


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, the earliest first."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    found = [folder / name for name in names if re.fullmatch(r"step-\d{8,}", name)]
    return sorted((p for p in found if (p / NAME).is_file()), key=lambda p: int(p.name[5:]))


def located(path: Path) -> Path:
    """Return the checkpoint at a path: itself, or the last complete one in it.

    Raises:
        PlanError: there is none.
    """
    if (path / NAME).is_file():
        return path
    if found := complete(path):
        return found[-1]
    what = "with a complete checkpoint" if path.is_dir() else "of checkpoints"
    raise PlanError(f"expected a folder {what}, got {path}")


def read(path: Path) -> Manifest:
    """Return the manifest of a checkpoint, whose files have the sizes that it says.

    Raises:
        PlanError: it is damaged, or a file is.
    """
    try:
        data = json.loads((path / NAME).read_text(encoding="utf-8"))
        found = Manifest(**data)
        right = (
            found.version == 1 and type(found.step) is int and type(found.seed) is int
            and isinstance(found.function, str)
            and all(isinstance(s["dtype"], str) and [*map(int, s["shape"])] == s["shape"]
                    for s in found.states.values())
            and all(Path(name).name == name and type(f["bytes"]) is type(f["crc32"]) is int
                    for name, f in found.files.items())
        )  # fmt: skip
        if not right:
            raise ValueError
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        message = "expected a manifest of version 1, got another one, or it is damaged"
        raise PlanError(f"{path / NAME}: {message}") from None
    for name, about in found.files.items():
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size != about["bytes"]:
            got = "none" if size is None else f"{size} bytes"
            raise PlanError(f"{path / name}: expected {about['bytes']} bytes, got {got}")
    return found


def check_program(manifest: Manifest, path: Path, plan: ProgramPlan, seed: int) -> None:
    """Check that a checkpoint is of a program. Raises PlanError with all that is wrong."""
    wanted = {
        arg.key: {"shape": list(arg.shape), "dtype": arg.dtype}
        for f in plan.functions for arg in f.args if arg.role != "input"
    }  # fmt: skip
    have = manifest.states
    wrong = [
        f"{key} of {wanted[key]['dtype']} {wanted[key]['shape']}, got {have[key]['dtype']} "
        f"{have[key]['shape']}"
        for key in wanted if key in have and wanted[key] != have[key]
    ]  # fmt: skip
    if missing := [key for key in wanted if key not in have]:
        wrong.append(f"all states of the program, got none of {several(missing)}")
    if surplus := [key for key in have if key not in wanted]:
        wrong.append(f"states of the program alone, got {several(surplus)} too")
    if not wrong and manifest.seed != seed:
        wrong.append(f"--seed {manifest.seed}, with which it was made, got {seed}")
    if wrong:
        raise PlanError(f"{path}: expected {'; '.join(wrong[:5])}")


def check_files(path: Path, manifest: Manifest, names: list[str]) -> None:
    """Check the content of files. Raises PlanError."""
    for name in names:
        if checksum(path / name) != manifest.files[name]["crc32"]:
            raise PlanError(f"{path / name}: expected the checksum of {NAME}, got another: damaged")


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    found = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found = zlib.crc32(block, found)
    return found
