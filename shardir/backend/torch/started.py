"""The training of a program in the user's own loop, on ranks that stay up.

program = shardir.compile(...) if rank == 0 else None
with shardir.start(program) as trainer:             # torchrun --nproc-per-node 4 loop.py
    for x, labels in loader:
        loss = trainer.step(x, labels)
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardir.backend.runs import python_words
from shardir.backend.torch.directory import RUNTIME
from shardir.backend.torch.shardir_runtime.collectives.broadcast import CHUNK_BYTES
from shardir.backend.torch.shardir_runtime.plan.program import PlanError
from shardir.backend.torch.shardir_runtime.run.options import OptionError
from shardir.backend.torch.shardir_runtime.run.process import (
    join_group,
    rank_and_size,
    use_processor,
)
from shardir.backend.torch.shardir_runtime.run.trainer import Trainer, start_options
from shardir.diagnostics import ShardirError, check_arguments, describe
from shardir.syntax.files import scratch_folder


class Startable(Protocol):
    """A compiled program."""

    def save(self, directory: Path) -> object:
        """Write its directory."""

    @property
    def steps_done(self) -> int:
        """The number of steps with which its training begins."""
        ...


@contextmanager
def errors() -> Iterator[None]:
    """Convert errors of the runtime to errors of shardir, in the words of Python."""
    try:
        yield
    except (PlanError, OptionError) as e:
        raise ShardirError(python_words(str(e))) from None


def trainer_error(text: str) -> ShardirError:
    """Return an error of a trainer."""
    return ShardirError(python_words(text))


@check_arguments("start")
def start(
    program: Any,
    *,
    resume: str | Path | None = None,
    backend: str = "gloo",
    device: str | None = None,
    seed: int = 0,
    timeout: float = 300.0,
    threads: int = 0,
    compile: bool = False,
) -> Trainer:
    """Start the training of a program in this process, one of its ranks. All ranks call it.

    The process joins the other ranks by the environment of torchrun (RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT), unless torch.distributed is initialized already. A program of one rank needs
    neither.

    Args:
        program: a program with a training step: compiled, or the directory of a saved one. What
            rank 0 has compiled is sent to all ranks, so that others may give None.
        resume: a checkpoint, or a folder of them, from which the training goes on.
        backend: the collectives, unless torch.distributed is initialized: gloo on CPUs, shm on the
            CPUs of one machine, nccl on GPUs.
        device: cpu or cuda, by default cuda with nccl, else cpu.
        seed: the seed of initial values that the program does not have.
        timeout: the longest wait for a rank, in seconds.
        threads: the threads of a rank; 0: torch's default with nccl, else one.
        compile: whether to compile the code between collectives by torch.compile.

    Raises:
        ShardirError: the program has no training step, or is for another number of ranks; or the
            checkpoint does not fit.
    """
    with errors():
        options = start_options(
            backend=backend, device=device, seed=seed, timeout=timeout, threads=threads,
            compile=compile,
        )  # fmt: skip
        if isinstance(program, str | Path):
            return Trainer.of(Path(program), options, resume, error=trainer_error)
        if program is not None and not hasattr(program, "steps_done"):
            raise ShardirError(
                "expected a compiled program, or the directory of a saved one, got "
                f"{describe(program)}"
            )
        leaves = not dist.is_initialized()
        use_processor(options)
        with _shared_program(program, join_group(options)) as (directory, steps_done):
            return Trainer.of(
                directory,
                options,
                resume,
                steps_done=steps_done,
                leaves=leaves,
                error=trainer_error,
            )


@contextmanager
def _shared_program(program: Startable | None, device: torch.device) -> Iterator[tuple[Path, int]]:
    """Yield the directory of the program of rank 0, and the number of its steps. Where all ranks
    see the folder of rank 0, they read it; else they get its files."""
    rank, size = rank_and_size()
    with ExitStack() as stack:
        found = dict[str, Any]()
        if rank == 0:
            found = _saved(program, stack.enter_context(scratch_folder()) / "program")
        found = json.loads(_broadcast(json.dumps(found).encode(), device))
        if "error" in found:
            raise ShardirError(found["error"])
        folder = Path(found["folder"])
        if not _all_ranks(_is_there(folder), device):
            if rank:
                folder = stack.enter_context(scratch_folder())
            for name in found["files"]:
                _broadcast_file(folder / name, device)
        yield folder, found["steps_done"]
        if size > 1:
            dist.barrier()  # until all have read it


def _saved(program: Startable | None, folder: Path) -> dict[str, Any]:
    """Save the program of rank 0; return its place, or an error, for the other ranks."""
    if program is None:
        return {"error": f"expected a program on rank 0, got {describe(program)}"}
    try:
        program.save(folder)
    except ShardirError as error:
        return {"error": str(error)}
    names = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    files = [str(name) for name in names if name.parts[0] != RUNTIME.name]
    return {"folder": str(folder), "files": files, "steps_done": program.steps_done}


def _is_there(folder: Path) -> bool:
    return folder.is_dir()


def _all_ranks(is_so: bool, device: torch.device) -> bool:
    flag = torch.tensor([is_so], dtype=torch.int32, device=device)
    if rank_and_size()[1] > 1:
        dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def _broadcast(data: bytes, device: torch.device) -> bytes:
    """Return the bytes of rank 0."""
    rank, size = rank_and_size()
    if size == 1:
        return data
    length = torch.tensor([len(data)], device=device)
    dist.broadcast(length, 0)
    values = bytearray(data) if rank == 0 else bytearray(int(length))
    if not values:
        return b""
    x = torch.frombuffer(values, dtype=torch.uint8).to(device)
    dist.broadcast(x, 0)
    return x.cpu().numpy().tobytes()


def _broadcast_file(path: Path, device: torch.device) -> None:
    """Write a file of rank 0 on all other ranks."""
    rank = rank_and_size()[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("rb" if rank == 0 else "wb") as file:
        while chunk := _broadcast(file.read(CHUNK_BYTES) if rank == 0 else b"", device):
            if rank:
                file.write(chunk)
