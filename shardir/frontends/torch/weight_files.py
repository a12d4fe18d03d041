"""Files of weights: safetensors, in one file or in several with an index, and files of
torch.save."""

import json
import pickle
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from shardir.backend.torch.launch.shards import (
    divide_into_files,
    index_path,
    index_text,
    shard_paths,
)
from shardir.backend.torch.shardir_runtime.checkpoints import manifest
from shardir.backend.torch.shardir_runtime.data.writing import writing
from shardir.backend.torch.shardir_runtime.plan.fields import PlanError
from shardir.diagnostics import ShardirError
from shardir.rewriting.options import size_of
from shardir.syntax.files import read_text, reason

SAFETENSORS, INDEX = ".safetensors", ".safetensors.index.json"
IN_FOLDER = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
"""The files that are looked for in a folder; the first one is that which is written there."""

LARGE = "5GB"
"""The size of the files of an index that none is given for, as in transformers."""


def is_checkpoint(path: str | Path) -> bool:
    """Whether a folder is a checkpoint of a run, or has some."""
    return manifest.is_checkpoint(Path(path))


def read(path: str | Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by name. A folder stands for the file of its model, or for its
    last checkpoint.

    Raises:
        ShardirError: the file does not exist, or has no weights.
    """
    path = Path(path)
    if is_checkpoint(path):
        return _checkpoint(path)
    if path.is_dir():
        loaded = next((path / name for name in IN_FOLDER if (path / name).exists()), None)
        if loaded is None:
            raise ShardirError(f"expected one of {', '.join(IN_FOLDER)} in {path}, got none")
        path = loaded
    try:
        if path.name.endswith(INDEX):
            return _indexed(path)
        if path.suffix == SAFETENSORS:
            return _safetensors(path).load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as e:
        raise ShardirError(f"{path} cannot be read: {reason(e)}") from None
    except ShardirError:
        raise
    except pickle.UnpicklingError:
        raise ShardirError(
            f"{path}: expected tensors by their names, got a file that torch.load takes for more "
            "than weights; write it by torch.save(model.state_dict(), path)"
        ) from None
    except Exception as e:  # of the format, which both libraries report by many classes
        raise ShardirError(f"{path}: expected a file of weights, got {_first_line(e)}") from None
    if not isinstance(loaded, Mapping) or not all(
        isinstance(name, str) and isinstance(x, torch.Tensor) for name, x in loaded.items()
    ):
        raise ShardirError(f"{path}: expected tensors by their names, got {type(loaded).__name__}")
    return dict(loaded)


def write(
    path: str | Path, tensors: Mapping[str, torch.Tensor], max_size: str | int | None = None
) -> None:
    """Write tensors to a `.safetensors` file, or by torch.save. A path without a suffix is a
    folder, which is made, for `model.safetensors`. Beyond `max_size` bytes, or if `path` is an
    index, write several files and an index.

    Raises:
        ShardirError: the files can't be written, or the format has no several files; existing files
            are unchanged.
    """
    path = Path(path)
    separate = {name: x.detach().contiguous().clone() for name, x in tensors.items()}
    if (folder := path).is_dir() or not path.suffix:
        path /= IN_FOLDER[0]
    indexed = path.name.endswith(INDEX)
    target = path.with_name(path.name.removesuffix(INDEX) + SAFETENSORS) if indexed else path
    is_safe = target.suffix == SAFETENSORS
    if max_size is not None and not is_safe:
        raise ShardirError(f"max_shard_size is for {SAFETENSORS} files, got {path}")
    sizes = {name: x.nbytes for name, x in separate.items()}
    groups = divide_into_files(sizes, _size(LARGE if max_size is None and indexed else max_size))
    try:
        if path.parent == folder:
            if folder.is_file():
                raise ShardirError(f"expected a folder or a name with a suffix, got file {folder}")
            folder.mkdir(exist_ok=True)
        if len(groups) == 1 and not indexed:
            with writing(target) as file:
                _write(file, target, separate, is_safe)
            return
        files = shard_paths(target, len(groups))
        with ExitStack() as stack:  # which renames the files when all are complete, the index last
            index = stack.enter_context(writing(index_path(target)))
            index.write(index_text(groups, files, sizes).encode())
            for name, group in zip(files, groups, strict=True):
                part = {n: separate[n] for n in group}
                _write(stack.enter_context(writing(name)), name, part, True)
    except (OSError, ValueError) as e:
        raise ShardirError(f"cannot write {path}: {reason(e)}") from None


def _write(file: Any, path: Path, tensors: dict[str, torch.Tensor], is_safe: bool) -> None:
    if is_safe:
        file.write(_safetensors(path).save(tensors, {"format": "pt"}))
        file.flush()  # a full disk is an error before any file has its name
    else:
        torch.save(tensors, file)


def _size(size: str | int | None) -> int | None:
    """Return a number of bytes. Raises ShardirError where it is none."""
    size_in_bytes = size_of((size,)) if isinstance(size, str) else size
    if size is None or (size_in_bytes is not None and size_in_bytes > 0):
        return size_in_bytes
    raise ShardirError(f"expected max_shard_size such as 5GB, or a number of bytes, got {size!r}")


def read_checkpoint(path: str | Path) -> tuple[dict[str, torch.Tensor], int]:
    """Return all states of a checkpoint, or of the last one of a folder, and its number of steps.

    Raises:
        ShardirError: there is no checkpoint, or it is damaged.
    """
    try:
        checkpoint = manifest.checkpoint_at(Path(path))
        return _checkpoint(checkpoint), manifest.read(checkpoint).step
    except PlanError as e:
        raise ShardirError(str(e)) from None


def _checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """The states of a checkpoint."""
    # torch.distributed.checkpoint takes long to import
    from shardir.backend.torch.shardir_runtime.checkpoints import distributed

    try:
        return distributed.tensors(path)
    except PlanError as e:
        raise ShardirError(str(e)) from None


def _indexed(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of the files that an index names, which are beside it."""
    places = _weight_map(path)
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(set(places.values())):
        tensors |= _safetensors(path).load_file(path.parent / name)
    if missing := sorted(places.keys() - tensors.keys()):
        raise ShardirError(
            f"{path}: expected {missing[0]} in {places[missing[0]]}, got a file without it"
        )
    return {name: tensors[name] for name in places}


def _weight_map(path: Path) -> dict[str, str]:
    try:
        places: Any = json.loads(read_text(path))["weight_map"]
    except (json.JSONDecodeError, KeyError, TypeError):
        places = None
    if not isinstance(places, dict) or not all(
        isinstance(n, str) and "/" not in n for n in places.values()
    ):
        raise ShardirError(f"{path}: expected an index with a weight_map of files beside it")
    return places


def _safetensors(path: Path) -> ModuleType:
    try:
        import safetensors.torch
    except ImportError:
        raise ShardirError(
            f"{path.name} needs safetensors: pip install 'shardir[weights]'"
        ) from None
    return safetensors.torch


def _first_line(e: Exception) -> str:
    return (str(e).splitlines() or [type(e).__name__])[0]
