"""`--weights`: parameters of files in place of a program's initial values.

    --weights model.safetensors
    --weights model.safetensors.index.json       of several files beside it
    --weights FOLDER                             with one of these files, or with checkpoints
    --weights checkpoints/step-00000100

A rank reads only its part of each array. This file needs only Python.
"""

import json
from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path

from ..plan.arrays import ArrayError, DividedArray, FileArray, safetensors_in
from ..plan.fields import differences
from ..plan.program import PlanArgument, PlanError, ProgramPlan
from . import manifest as manifests

NAME, INDEX = "model.safetensors", ".index.json"


def with_weights(plan: ProgramPlan, path: Path | None) -> ProgramPlan:
    """Return the plan with arrays of files as initial values, converted to its types: of all
    parameters, and of the other states that the files have. Optimizer states of a checkpoint that
    the program lacks are ignored.

    Raises:
        PlanError: a file is damaged or missing, or names, shapes or kinds of types differ.
    """
    if path is None:
        return plan
    known: dict[str, PlanArgument] = {}
    for arg in retained_arguments(plan):
        if arg.role == "parameter" or arg.key not in known:
            known[arg.key] = arg
    try:
        found = weights_in(path, known)
    except (ArrayError, PlanError) as error:
        raise PlanError(f"--weights {path}: {error}") from None
    wrong = [
        f"{key} of {known[key].dtype} {list(known[key].shape)}, got {x.dtype} {list(x.shape)}"
        for key, x in found.items()
        if key in known and (x.shape != known[key].shape or _kind(x) != _kind(known[key]))
    ]
    needed = [key for key, arg in known.items() if arg.role == "parameter"]
    if text := differences(needed, known, found, wrong, "weights", "weights of all parameters"):
        raise PlanError(f"--weights {path}: expected {text}")

    def with_source(arg: PlanArgument) -> PlanArgument:
        if arg.role != "input" and arg.key in found:
            return replace(arg, source=found[arg.key], init={"kind": "file"})
        if arg.init.get("of") in found:  # a copy of the new value
            return replace(arg, source=None)
        return arg

    functions = [replace(f, args=tuple(map(with_source, f.args))) for f in plan.functions]
    return replace(plan, functions=tuple(functions))


def weights_in(path: Path, known: Container[str]) -> Mapping[str, FileArray | DividedArray]:
    """Return the arrays of a file, or of all files of an index; of a checkpoint, its parameters and
    the other states that are `known`.

    Raises:
        ArrayError: a file is damaged or missing.
        PlanError: a checkpoint is damaged.
    """
    if manifests.is_checkpoint(path):
        return {
            key: array for key, (role, array) in manifests.arrays_in(path).items()
            if role == "parameter" or key in known
        }  # fmt: skip
    if path.is_dir():
        names = (NAME, NAME + INDEX)
        files = [path / name for name in names if (path / name).is_file()]
        if not files:
            raise ArrayError(f"expected {' or '.join(names)} or a checkpoint in it, got none")
        path = files[0]
    if not path.name.endswith(INDEX):
        if path.suffix != ".safetensors":
            raise ArrayError(f"expected a file of .safetensors, or its {INDEX}, got {path.name}")
        return safetensors_in(path)[0]
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not all(Path(file).name == file for file in places.values()):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ArrayError("expected an index with a weight_map of files beside it") from None
    files = {file: safetensors_in(path.parent / file)[0] for file in sorted(set(places.values()))}
    if missing := [name for name, file in places.items() if name not in files[file]]:
        raise ArrayError(
            f"expected {missing[0]} in {places[missing[0]]}, got a file without it; copy it again"
        )
    return {name: files[file][name] for name, file in places.items()}


def check_weights(path: Path | None, rank: int, ranks: int) -> None:
    """Check the content of this rank's share of the files of a checkpoint. Raises PlanError."""
    if path is not None and manifests.is_checkpoint(path):
        path = manifests.checkpoint_at(path)
        manifest = manifests.read(path)
        manifests.check_files(path, manifest, sorted(manifest.files)[rank::ranks])


def retained_arguments(plan: ProgramPlan) -> list[PlanArgument]:
    """Return the parameters and states of all functions."""
    return [arg for f in plan.functions for arg in f.args if arg.role != "input"]


def weight_arguments(plan: ProgramPlan) -> dict[str, PlanArgument]:
    """Return the parameters, and the states that the program was written with, such as the buffers
    of a module, by key."""
    return {
        arg.key: arg for arg in retained_arguments(plan)
        if arg.role == "parameter" or arg.init["kind"] == "file"
    }  # fmt: skip


def _kind(value: FileArray | DividedArray | PlanArgument) -> str:
    """Return the kind of a type; values are converted between types of one kind."""
    if value.dtype == "i1":
        return value.dtype
    return "float" if "f" in value.dtype else "integer"
