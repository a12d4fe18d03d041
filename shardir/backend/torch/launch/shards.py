"""Weights in several .safetensors files with an index, as transformers names and reads them.

model-00001-of-00002.safetensors, model-00002-of-00002.safetensors, model.safetensors.index.json
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardir.backend.torch.shardir_runtime.checkpoints.weights import INDEX

SAFETENSORS = ".safetensors"


def divide_into_files(sizes: Mapping[str, int], most: int | None) -> list[list[str]]:
    """Divide tensors of these sizes into files of at most `most` bytes, in their order. A larger
    tensor has a file of its own."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, bytes in sizes.items():
        size += bytes
        if most is not None and size > most and groups[-1]:
            groups.append([])
            size = bytes
        groups[-1].append(name)
    return groups


def shard_paths(path: Path, count: int) -> list[Path]:
    """Return the names of the files of `model.safetensors` in a number of parts."""
    stem = path.name.removesuffix(SAFETENSORS)
    return [path.with_name(f"{stem}-{i:05}-of-{count:05}{SAFETENSORS}")
            for i in range(1, count + 1)]  # fmt: skip


def index_path(path: Path) -> Path:
    """Return the file of the index of `model.safetensors`."""
    return path.with_name(path.name + INDEX)


def index_text(
    groups: Sequence[Sequence[str]], paths: Sequence[Path], sizes: Mapping[str, int]
) -> str:
    """Return the index: the file of each tensor, and the bytes of all."""
    places = {name: p.name for p, group in zip(paths, groups, strict=True) for name in group}
    metadata = {"total_size": sum(sizes.values())}
    return json.dumps({"metadata": metadata, "weight_map": places}, indent=2) + "\n"
