"""Arrays in files, read and written without numpy. A part of the runtime; needs only torch."""

import ctypes
import mmap
import zipfile
from pathlib import Path

import torch
from runtime_plan import npy_header
from runtime_writing import writing
from torch import Tensor

# numpy's name of each type, and the torch type of the same memory
NPY_DTYPES = {
    "<f4": torch.float32,
    "<f8": torch.float64,
    "<f2": torch.float16,
    "<i8": torch.int64,
    "<i4": torch.int32,
    "<i2": torch.int16,
    "|i1": torch.int8,
    "|u1": torch.uint8,
    "|b1": torch.bool,
}


def open_npy(path: Path) -> Tensor:
    """Return an .npy file as a tensor, which is read from disk where it is accessed."""
    header = npy_header(path)
    dtype = NPY_DTYPES[header.dtype]
    if 0 in header.shape:
        return torch.empty(header.shape, dtype=dtype)
    count = torch.Size(header.shape).numel()
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=header.offset)
    return flat.view(header.shape)


def save_npz(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write an .npz as numpy does (bf16 as f32), without numpy."""
    names = {dtype: name for name, dtype in NPY_DTYPES.items()}
    with writing(path) as archive, zipfile.ZipFile(archive, "w") as file:
        for name, tensor in tensors.items():
            x = tensor.detach().cpu().contiguous()
            x = x.float() if x.dtype == torch.bfloat16 else x
            about = {"descr": names[x.dtype], "fortran_order": False, "shape": tuple(x.shape)}
            header = repr(about).encode().ljust(117) + b"\n"
            if len(header) > 118:  # so many dimensions that it needs a longer one
                header = repr(about).encode().ljust(1013) + b"\n"
            start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
            data = (
                ctypes.string_at(x.data_ptr(), x.numel() * x.element_size()) if x.numel() else b""
            )
            with file.open(f"{name.replace('..', '__')}.npy", "w", force_zip64=True) as member:
                member.write(start + header)
                member.write(data)
