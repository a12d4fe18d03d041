"""Folders of checkpoints, and checkpoint.json, the manifest of a checkpoint.

    FOLDER/step-00000100/checkpoint.json
    FOLDER/step-00000100/shard-00001-model-00001-of-00001.safetensors ...
    FOLDER/step-00000100/loader.pt             the state of a loader (data/loaders.py)
    FOLDER/step-00000200.incomplete/           being written, or left by an interrupted run

    {"version": 2, "function": "step", "step": 100, "seed": 0,
     "program": "9f86d081884c7d65...", "rows": {"rows": 1437, "batch": 32, "last": "wrap"} | null,
     "states": {"w": {"shape": [8, 4], "dtype": "f32", "role": "parameter" | "state"}},
     "files": {"shard-00001-model-00001-of-00001.safetensors": {"bytes": 432, "crc32": 305419896}}}

`step` is the number of completed steps. `program` is a digest of the program for one device, which
is equal for all meshes and layouts; empty without such a program. `rows` describes the files that
the steps read: with the step, it determines the next rows. This file needs only Python.
"""

import json
import os
import re
import zlib
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..plan.arrays import ArrayError, DividedArray, FileArray, safetensors_in
from ..plan.fields import PlanError, differences
from ..plan.program import PlanFunction, ProgramPlan

NAME, INCOMPLETE, VERSION = "checkpoint.json", ".incomplete", 2
SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""The metadata in which torch.distributed.checkpoint records the offsets of a part of a tensor."""
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Manifest:
    """The content of checkpoint.json."""

    function: str
    step: int
    seed: int
    program: str
    rows: dict[str, Any] | None
    states: dict[str, dict]
    files: dict[str, dict]
    version: int = VERSION

    def write(self, folder: Path) -> None:
        """Write the manifest through to the disk."""
        with (folder / NAME).open("x", encoding="utf-8") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}"


def step_of(path: Path) -> int:
    """Return the number of steps in the name of a checkpoint."""
    return int(path.name[5:])


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, the earliest first. A checkpoint gets its name
    when it is complete; `read` reports later damage."""
    names = os.listdir(folder) if folder.is_dir() else []
    found = [folder / name for name in names if re.fullmatch(r"step-\d{8,}", name)]
    return sorted(found, key=step_of)


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, or has complete ones."""
    return path.is_dir() and ((path / NAME).is_file() or bool(complete(path)))


def rows_of(function: PlanFunction) -> dict[str, Any] | None:
    """Return the numbers that, with the seed and the step, determine the rows that a step reads;
    None if it reads no files."""
    read = next((arg for arg in function.args if arg.epochs is not None), None)
    if read is None or read.epochs is None:
        return None
    batch = read.batch * (read.microbatches or 1)
    return {"rows": read.epochs.rows, "batch": batch, "last": read.last}


def checkpoint_at(path: Path) -> Path:
    """Return the checkpoint at a path: the path itself, or its last complete checkpoint.

    Raises:
        PlanError: there is no checkpoint.
    """
    if (path / NAME).is_file():
        return path
    if found := complete(path):
        return found[-1]
    wanted = "with a complete checkpoint" if path.is_dir() else "of checkpoints"
    raise PlanError(f"expected a folder {wanted}, got {path}")


def read(path: Path) -> Manifest:
    """Return the manifest of a checkpoint, after a check of the sizes of its files.

    Raises:
        PlanError: the manifest or a file is damaged.
    """
    try:
        data = json.loads((path / NAME).read_text(encoding="utf-8"))
        found = Manifest(**data)
        right = (
            found.version == VERSION and type(found.step) is int and type(found.seed) is int
            and isinstance(found.function, str) and isinstance(found.program, str)
            and all(isinstance(s["dtype"], str) and [*map(int, s["shape"])] == s["shape"]
                    and isinstance(s["role"], str) for s in found.states.values())
            and (found.rows is None or found.rows.keys() == {"rows", "batch", "last"})
            and all(Path(name).name == name and type(f["bytes"]) is type(f["crc32"]) is int
                    for name, f in found.files.items())
        )  # fmt: skip
        if not right:
            raise ValueError
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        message = f"expected a manifest of version {VERSION}, got another one, or it is damaged"
        raise PlanError(f"{path / NAME}: {message}") from None
    for name, about in found.files.items():
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size != about["bytes"]:
            got = "none" if size is None else f"{size} bytes"
            raise PlanError(f"{path / name}: expected {about['bytes']} bytes, got {got}")
    return found


def check_program(manifest: Manifest, path: Path, plan: ProgramPlan) -> None:
    """Check that a checkpoint is of a program. Raises PlanError with all differences."""
    wanted = {
        arg.key: (arg.dtype, list(arg.shape))
        for f in plan.functions for arg in f.args if arg.role != "input"
    }  # fmt: skip
    have = {key: (about["dtype"], about["shape"]) for key, about in manifest.states.items()}
    wrong = [
        f"{key} of {' '.join(map(str, wanted[key]))}, got {' '.join(map(str, have[key]))}"
        for key in wanted if key in have and wanted[key] != have[key]
    ]  # fmt: skip
    if text := differences(wanted, wanted, have, wrong, "states", "all states of the program"):
        raise PlanError(f"{path}: expected {text}")


def check_course(
    manifest: Manifest, path: Path, plan: ProgramPlan, function: PlanFunction, seed: int
) -> None:
    """Check that a run of a step continues the run that wrote a checkpoint. Raises PlanError."""
    program = plan.digest
    if manifest.program and program and manifest.program != program:
        raise PlanError(
            f"{path}: expected a checkpoint of this program, got one of a program with other ops, "
            f"numbers or optimizers; begin at step 0 with its states: --weights {path}"
        )
    if manifest.function != function.name:
        raise PlanError(
            f"{path}: expected a checkpoint of the step {function.name}, got one of "
            f"{manifest.function}"
        )
    if manifest.seed != seed:
        raise PlanError(
            f"{path}: expected --seed {manifest.seed}, with which it was made, got {seed}"
        )
    before, now = manifest.rows, rows_of(function)
    if before is not None and now is not None and before != now:
        raise PlanError(
            f"{path}: expected the rows with which it was made, {_rows(before)}, got {_rows(now)}; "
            f"give the same --data and --last, or begin at step 0 with its states: --weights {path}"
        )


def _rows(rows: dict[str, Any]) -> str:
    return f"{rows['batch']} of {rows['rows']} at a step (--last {rows['last']})"


def arrays_in(path: Path) -> dict[str, tuple[str, DividedArray]]:
    """Return the states of a checkpoint, or of the last checkpoint of a folder, with their roles.

    Raises:
        PlanError: there is no checkpoint, or it is damaged.
        ArrayError: a file is damaged.
    """
    path = checkpoint_at(path)
    manifest = read(path)
    parts: dict[str, list[tuple[tuple[int, ...], FileArray]]] = defaultdict(list)
    for name in manifest.files:
        if not name.endswith(".safetensors"):  # the states of loaders
            continue
        arrays, metadata = safetensors_in(path / name)
        try:
            offsets = json.loads(metadata[SHARDING])
            for key, array in arrays.items():
                parts[key].append((tuple(offsets[key][OFFSETS]), array))
        except (KeyError, TypeError, ValueError):
            raise ArrayError(
                f"{path / name}: expected the offsets of its parts, got none"
            ) from None
    return {
        key: (
            about["role"], DividedArray(about["dtype"], tuple(about["shape"]), tuple(parts[key]))
        )
        for key, about in manifest.states.items()
    }  # fmt: skip


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
