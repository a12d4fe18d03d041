"""The weights of a checkpoint as plain .safetensors files: one, or several with an index.

model.safetensors
model-00001-of-00002.safetensors ... model.safetensors.index.json     beyond a size of files

One tensor at a time is in memory. Parts are read where the ranks have written them.
"""

import json
import math
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardir.backend.runs import LaunchError
from shardir.backend.torch.launch.shards import (
    divide_into_files,
    index_path,
    index_text,
    shard_paths,
)
from shardir.backend.torch.launch.start import read_plan
from shardir.backend.torch.shardir_runtime.checkpoints import manifest as manifests
from shardir.backend.torch.shardir_runtime.checkpoints.weights import weight_arguments
from shardir.backend.torch.shardir_runtime.data.writing import writing
from shardir.backend.torch.shardir_runtime.plan.arrays import (
    BYTES,
    SAFETENSORS,
    ArrayError,
)
from shardir.backend.torch.shardir_runtime.plan.program import PlanArgument, PlanError, ProgramPlan
from shardir.syntax.files import reason

TYPES = {dtype: name for name, dtype in SAFETENSORS.items()}


class Tensors:
    """The tensors of a checkpoint, whose files are intact.

    Raises:
        PlanError: it is damaged, or of another program.
        ArrayError: a file is damaged.
    """

    def __init__(self, checkpoint: Path, plan: ProgramPlan):
        path = manifests.checkpoint_at(checkpoint)
        manifest = manifests.read(path)
        manifests.check_program(manifest, path, plan)
        manifests.check_files(path, manifest, sorted(manifest.files))
        self._arrays = manifests.arrays_in(path)

    def read(self, arg: PlanArgument) -> "np.ndarray[Any, Any]":
        """Return the elements of a tensor as values of their size."""
        element = np.dtype(f"V{BYTES[arg.dtype]}")
        tensor = np.empty(arg.shape, element)
        for starts, array in self._arrays[arg.key][1].parts:
            place = tuple(slice(a, a + n) for a, n in zip(starts, array.shape, strict=True))
            tensor[place] = np.fromfile(
                array.path, element, math.prod(array.shape), offset=array.offset
            ).reshape(array.shape)
        return tensor


def export(directory: Path, checkpoint: Path, path: Path, most: int | None) -> list[Path]:
    """Write the weights of a checkpoint, or of the last one in a folder: the parameters, and the
    states that the program was written with, such as the buffers of a module.

    Args:
        directory: the program that it is of.
        most: the bytes of the tensors of a file; None: all are in one.

    Returns:
        The files; of several the last one is the index.

    Raises:
        LaunchError: the checkpoint is damaged or of another program, or a file can't be written.
            Files that were there are unchanged.
    """
    if path.suffix != ".safetensors":
        raise LaunchError(f"--export: expected a name that ends in .safetensors, got {path}")
    plan = read_plan(directory)
    weights = weight_arguments(plan)
    sizes = {name: _bytes(arg) for name, arg in weights.items()}
    groups = divide_into_files(sizes, most)
    paths = files = [path] if len(groups) == 1 else shard_paths(path, len(groups))
    try:
        tensors = Tensors(checkpoint, plan)
        with ExitStack() as stack:  # which renames the files when all are complete, the index last
            if len(groups) > 1:
                paths = [*files, index_path(path)]
                index = stack.enter_context(writing(paths[-1]))
                index.write(index_text(groups, files, sizes).encode())
            for target, group in zip(files, groups, strict=True):
                _write(stack.enter_context(writing(target)), [weights[n] for n in group], tensors)
    except (PlanError, ArrayError) as error:
        raise LaunchError(str(error)) from None
    except OSError as error:
        raise LaunchError(f"cannot write {path}: {reason(error)}") from None
    return paths


def _bytes(arg: PlanArgument) -> int:
    return math.prod(arg.shape) * BYTES[arg.dtype]


def _write(file: BinaryIO, group: "list[PlanArgument]", tensors: Tensors) -> None:
    # the widest elements first, so that each begins at a multiple of its size
    group = sorted(group, key=lambda arg: -BYTES[arg.dtype])
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for arg in group:
        ends = [place, place + _bytes(arg)]
        header[arg.key] = {"dtype": TYPES[arg.dtype], "shape": arg.shape, "data_offsets": ends}
        place = ends[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for arg in group:
        file.write(tensors.read(arg).data)
    file.flush()  # a full disk is an error before any file has its name
