"""Weights of modules: from torch's tensors to arrays, and from runs back to tensors."""

from collections.abc import Container, Mapping
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import torch

from shardir.backend.torch.shardir_runtime.plan.arrays import BYTES, array_in
from shardir.diagnostics import ShardirError, several
from shardir.dialects.nn.base import Array


def array_of(tensor: torch.Tensor) -> Array:
    """Return a tensor as an array; bf16, which numpy lacks, as f32."""
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.float()
    return np.asarray(tensor.numpy())


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write initial values as an .npz file.

    Raises:
        ShardirError: a tensor is on the meta device.
    """
    empty = [name for name, x in tensors.items() if x.is_meta]
    if empty:
        raise ShardirError(
            f"expected the values of {len(empty)} parameters and buffers, got the meta device: "
            f"{', '.join(empty[:3])}{', ...' if len(empty) > 3 else ''}; load weights first"
        )
    save(path, {name: array_of(x) for name, x in tensors.items()})


def save(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays as an .npz file. numpy's own function has names of arguments that a parameter
    may have too."""
    with ZipFile(path, "w") as file:
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def read_dump(path: Path, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the arrays that a run has written, of these names and dtypes."""
    with np.load(path, allow_pickle=False) as file:
        return {
            name: torch.from_numpy(np.array(file[key])).to(x.dtype).reshape(x.shape)
            for name, x in like.items() if (key := f"states/{name}") in file.files
        }  # fmt: skip


def read_states(path: Path, but: Container[str]) -> dict[str, Array]:
    """Return the states that a run has written, but for these: maps of the file, which may be
    removed, but not changed."""
    first = "states/"
    with ZipFile(path) as file:
        entries = [name.removesuffix(".npy") for name in file.namelist()]
    keys = [name.removeprefix(first) for name in entries if name.startswith(first)]
    return {key: _mapped(path, first + key) for key in keys if key not in but}


def _mapped(path: Path, entry: str) -> Array:
    array = array_in(path, entry)
    kind = np.dtype("?" if array.dtype == "i1" else f"<{array.dtype[0]}{BYTES[array.dtype]}")
    if 0 in array.shape:  # nothing that could be mapped
        return np.zeros(array.shape, kind)
    return np.memmap(path, kind, "r", array.offset, array.shape)


def read_results(path: Path, function: str) -> list[np.ndarray]:
    """Return the results of a function that a run has written, but for the new values of states."""
    first = f"results/{function}/"
    with np.load(path, allow_pickle=False) as file:
        numbers = sorted(
            int(key.removeprefix(first)) for key in file.files if key.startswith(first)
        )
        return [np.array(file[f"{first}{i}"]) for i in numbers]


def check(
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    values: Mapping[str, str],
) -> None:
    """Check the names and shapes of weights. `values` has the name of the value of each that is
    wanted: of tied tensors one is enough.

    Raises:
        ShardirError: with all that is wrong.
    """
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor) or x.is_meta:
            got = "the meta device" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            raise ShardirError(f"expected a tensor with values as {name!r}, got {got}")
    named = {values[name] for name in tensors if name in values}
    missing = [name for name in expected if values[name] not in named]
    surplus = [str(name) for name in tensors if name not in expected]
    shapes = [
        f"{name} of {list(expected[name].shape)}, got {list(x.shape)}"
        for name, x in tensors.items()
        if name in expected and x.shape != expected[name].shape
    ]
    shapes += [
        f"{name} of {expected[name].dtype}, got {x.dtype}"
        for name, x in tensors.items()
        if name in expected and _kind(expected[name]) != _kind(x)
    ]
    wrong = [
        f"expected {what} {several(names)}"
        for what, names in (
            ("weights of all parameters and buffers, got none of", missing),
            ("weights of the module alone, got", surplus),
            ("", shapes),
        )
        if names
    ]
    if wrong:
        raise ShardirError("; ".join(wrong).replace("expected  ", "expected "))


def _kind(x: torch.Tensor) -> tuple[bool, bool]:
    """Return whether values are floats, and whether they are complex: others are converted."""
    return x.is_floating_point(), x.is_complex()
