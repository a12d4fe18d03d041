"""Checkpoints of a run by torch.distributed.checkpoint, in the form of safetensors: no pickles.

1. One rank writes each element. Ranks with equal parts share the states by bytes.
2. A step waits only for the copy to host memory. A thread with its own process group writes the
   files, one checkpoint at a time.
3. A checkpoint appears complete: it is written to `step-N.incomplete`, and renamed when all ranks
   are done. Then older checkpoints are removed.
4. Any mesh reads it: a rank reads its parts in the layout of its program.
"""

import math
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import ENOSPC
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..collectives.host import move_to
from ..compat import wrapper
from ..data.loaders import checksum_of, files_of
from ..plan.program import PlanError, PlanFunction
from ..run.interruption import own_group
from ..run.process import error_kind
from ..run.states import DTYPES, States
from . import manifest as manifests
from .manifest import INCOMPLETE, Manifest, step_folder
from .weights import retained_arguments

FULL = "\n  help: free space there; --resume goes on from the last complete checkpoint"
"""What to do where the disk is full."""


class StoredPart(Tensor):
    """A rank's part of a tensor, as torch.distributed.checkpoint reads and writes it (the protocol
    _Checkpointable).

    Args:
        local: the part; it starts at `offsets` of a tensor of `shape`.
        owned: whether this rank writes it.
    """

    local: Tensor
    offsets: torch.Size
    owned: bool

    @staticmethod
    def __new__(cls, local: Tensor, offsets: list[int], shape: tuple[int, ...], owned: bool = True):
        new = wrapper(cls, torch.Size(shape), local.dtype)
        new.local, new.offsets, new.owned = local, torch.Size(offsets), owned
        return new

    @classmethod
    # pyrefly: ignore[bad-override] - torch declares narrower types
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            raise NotImplementedError(str(func))
        return args[0]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        some = self.local.numel() > 0
        return [ChunkStorageMetadata(self.offsets, self.local.size())] if some else []

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.local),
                    size=self.size(),
                ),
            )
            for chunk in self.__create_chunk_list__() if self.owned
        ]  # fmt: skip

    def __get_tensor_shard__(self, _: MetadataIndex) -> Tensor:
        return self.local


class Checkpoints:
    """The checkpoints that a run writes.

    Args:
        start: the number of steps before the run.
        keep: the number of checkpoints that stay; 0: all.

    Raises:
        PlanError: the folder cannot be written, or has checkpoints of later steps, so of another
            run.
    """

    def __init__(
        self, folder: Path, states: States, function: PlanFunction, start: int = 0, keep: int = 0
    ):
        self.folder, self.states, self.function, self.keep = folder, states, function, keep
        self.mesh = states.mesh
        self._group = own_group(self.mesh)
        self._host: dict[str, Tensor] = {}
        """Copies of the states in host memory, reused by each checkpoint."""
        self._error: BaseException | None = None
        """The error of the last checkpoint."""
        if self.mesh.rank == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for path in folder.glob(f"step-*{INCOMPLETE}"):
                    shutil.rmtree(path)
            except OSError as e:
                raise PlanError(f"cannot write checkpoints to {folder}: {e.strerror}") from None
            later = [p for p in manifests.complete(folder) if manifests.step_of(p) > start]
            if later:
                raise PlanError(
                    f"--checkpoints {folder}: expected none after step {start}, at which the run "
                    f"begins, got {later[-1].name}; go on from it (--resume {folder}), give "
                    "another folder, or move it"
                )
        self._thread: threading.Thread | None = self._start_thread(self._allocate)

    def save(self, step: int, loader: bytes | None = None) -> None:
        """Begin to write the states after `step` steps. Return when the states may change.

        Args:
            loader: the state of this rank's loader, if it has one.

        Raises:
            PlanError: the checkpoint before this one could not be written.
        """
        self.finish()
        parts = self._copy_to_host()
        self._thread = self._start_thread(self._write, step, parts, loader)

    def finish(self) -> None:
        """Wait until the last checkpoint is written. Raises PlanError where it could not be, and
        the error of torch.distributed where another rank was lost."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def _start_thread(self, work: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=work, args=args, daemon=True)
        thread.start()
        return thread

    def _allocate(self) -> None:
        """Allocate the copies and write to them, so that the system maps their pages before the
        first checkpoint is copied."""
        try:
            for key, owned in states_to_write(self.states):
                if owned and self.states.is_here(key):
                    self._copy_of(key, self.states.values[key]).zero_()
        except RuntimeError as e:
            why = f"cannot allocate memory for the copies of checkpoints: {cause(e)}"
            self._error = PlanError(why)

    def _copy_of(self, key: str, x: Tensor) -> Tensor:
        """Return the memory of the host for a copy of a state."""
        host = self._host.get(key)
        if host is None or host.shape != x.shape:
            host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type == "cuda")
            self._host[key] = host
        return host

    def _copy_to_host(self) -> dict[str, Tensor]:
        """Return the states in host memory. Parts that other ranks write are not copied."""
        states, parts = self.states, {}
        for key, owned in states_to_write(self.states):
            if not states.is_here(key):
                continue
            x, type = states.values[key], states.types[key]
            starts = [start for start, _ in states.bounds(type)]
            host = x
            if owned:
                host = self._copy_of(key, x)
                host.copy_(x, non_blocking=True)
            parts[key] = StoredPart(host, starts, type.shape, owned)
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)
        return parts

    def _write(self, step: int, parts: dict[str, Tensor], loader: bytes | None) -> None:
        """Write a checkpoint. `finish` raises its error."""
        final = step_folder(self.folder, step)
        path = final.with_name(final.name + INCOMPLETE)
        try:
            self._write_files(step, parts, loader, path, final)
        except (Exception, CheckpointException) as e:  # the latter is no Exception
            self._error = origin(e)
            if error_kind(self._error) == "program":  # else another rank was lost meanwhile
                why = f"cannot write the checkpoint of step {step} to {self.folder}: {cause(e)}"
                if isinstance(self._error, OSError) and self._error.errno == ENOSPC:
                    why += FULL
                self._error = PlanError(why)
            with suppress(OSError):
                shutil.rmtree(path)

    def _write_files(
        self, step: int, parts: dict[str, Tensor], loader: bytes | None, path: Path, final: Path
    ) -> None:
        rank, size, failed = self.mesh.rank, self.mesh.size, None
        if rank == 0:
            try:
                path.mkdir()
            except OSError as e:
                failed = e
        self._agree(failed)
        writer = HuggingFaceStorageWriter(
            str(path), save_distributed=True, enable_consolidation=False
        )
        with _quiet():
            dcp.save(parts, storage_writer=writer, process_group=self._group, no_dist=size == 1)
        try:
            for name, content in files_of(loader, rank, self._all(checksum_of(loader))).items():
                (path / name).write_bytes(content)
        except OSError as e:
            failed = e
        self._agree(failed)
        names = sorted(os.listdir(path))
        about = torch.zeros(len(names), 2, dtype=torch.int64)
        try:
            for k in range(rank, len(names), size):
                synchronize(path / names[k])
                about[k, 0] = (path / names[k]).stat().st_size
                about[k, 1] = manifests.checksum(path / names[k])
        except OSError as e:
            failed = e
        self._agree(failed)
        if size > 1:
            dist.all_reduce(about, group=self._group)
        if rank == 0:
            try:
                files = {n: {"bytes": int(b), "crc32": int(c)}
                         for n, (b, c) in zip(names, about.tolist(), strict=True)}  # fmt: skip
                self._manifest(step, files).write(path)
                path.rename(final)
                synchronize(self.folder)
                for old in manifests.complete(self.folder)[: -self.keep] if self.keep else ():
                    shutil.rmtree(old)
            except OSError as e:
                failed = e
        self._agree(failed)

    def _all(self, number: int) -> list[int]:
        """Return the numbers of all ranks."""
        found = torch.zeros(self.mesh.size, dtype=torch.int64)
        found[self.mesh.rank] = number
        if self.mesh.size > 1:
            dist.all_reduce(found, group=self._group)
        return found.tolist()

    def _manifest(self, step: int, files: dict[str, dict]) -> Manifest:
        roles = {arg.key: arg.role for arg in retained_arguments(self.states.plan)}
        states = {key: {"shape": list(type.shape), "dtype": type.dtype, "role": roles[key]}
                  for key, type in self.states.types.items()}  # fmt: skip
        rows = manifests.rows_of(self.function)
        seed, program = self.states.seed, self.states.plan.digest
        return Manifest(self.function.name, step, seed, program, rows, states, files)

    def _agree(self, failed: OSError | None) -> None:
        """Wait for all ranks. Raises OSError on each where one failed."""
        flag = torch.tensor([failed is not None], dtype=torch.int32)
        if self.mesh.size > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        if failed is not None:
            raise failed
        if flag:
            raise OSError("another rank failed")


def states_to_write(states: States) -> Iterator[tuple[str, bool]]:
    """Yield the keys of the states, and whether this rank writes its part. Of n ranks with an equal
    part, the k-th writes the states in the k-th of n ranges of all bytes. Global shapes alone
    decide, so that all ranks agree."""
    mesh = states.mesh
    sizes = {k: math.prod(t.shape) * DTYPES[t.dtype].itemsize for k, t in states.types.items()}
    total, before = max(1, sum(sizes.values())), 0
    holders: dict[tuple, list[int]] = {}
    """The ranks with this rank's part, by shape, layout and places."""
    for key, type in states.types.items():
        place = (type.shape, type.dims, states.places.get(key))
        if place not in holders:
            mine = states.bounds(type)
            holders[place] = [
                r for r in range(mesh.size)
                if all(mesh.bounds(n, axes, r) == b
                       for n, axes, b in zip(type.shape, type.dims, mine, strict=True))
                and states.is_here(key, r)
            ]  # fmt: skip
        ranks = holders[place]
        yield key, ranks[before * len(ranks) // total if sizes[key] else 0] == mesh.rank
        before += sizes[key]


def restore(path: Path, states: States, function: PlanFunction) -> Manifest:
    """Set the states to the values of a checkpoint, which any mesh may have written.

    Raises:
        PlanError: the checkpoint is of another program, seed or rows, or damaged.
    """
    mesh = states.mesh
    manifest = manifests.read(path)
    manifests.check_program(manifest, path, states.plan)
    manifests.check_course(manifest, path, states.plan, function, states.seed)
    manifests.check_files(path, manifest, sorted(manifest.files)[mesh.rank :: mesh.size])
    parts, local = {}, {}
    for key, type in states.types.items():
        if not states.is_here(key):
            continue
        bounds = states.bounds(type)
        local[key] = torch.empty_like(states.values[key], device="cpu")
        parts[key] = StoredPart(local[key], [start for start, _ in bounds], type.shape)
    _load(path, parts)
    for key, x in local.items():
        states.values[key] = move_to(mesh, x, states.types[key].host)
    return manifest


def tensors(path: Path) -> dict[str, Tensor]:
    """Return all states of a checkpoint, or of the last checkpoint of a folder, as global tensors.

    Raises:
        PlanError: there is no checkpoint, or it is damaged.
    """
    path = manifests.checkpoint_at(path)
    manifest = manifests.read(path)
    manifests.check_files(path, manifest, sorted(manifest.files))
    found = {
        key: torch.empty(about["shape"], dtype=DTYPES[about["dtype"]])
        for key, about in manifest.states.items()
    }
    _load(path, {k: StoredPart(x, [0] * x.ndim, tuple(x.shape)) for k, x in found.items()})
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """A context without torch's warning about `no_dist`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _load(path: Path, parts: dict[str, Tensor]) -> None:
    try:
        with _quiet():
            dcp.load(parts, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    except (Exception, CheckpointException) as e:
        raise PlanError(f"{path} cannot be read: {cause(e)}") from None


def synchronize(path: Path) -> None:
    """Write a file or folder through to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def origin(e: BaseException) -> BaseException:
    """Return the error inside an error of torch.distributed.checkpoint: an OSError if there is
    one."""
    if isinstance(e, CheckpointException) and e.failures:
        failures = [error for error, _ in e.failures.values()]
        return next((x for x in failures if isinstance(x, OSError)), failures[0])
    return e


def cause(e: BaseException) -> str:
    """Return the first line of the `origin` of an error."""
    e = origin(e)
    if isinstance(e, OSError) and e.strerror:
        return e.strerror
    return str(e).split("\n", 1)[0] or type(e).__name__
