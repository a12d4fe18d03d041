"""The process of one rank: its options, its process groups, and its end."""

import argparse
import contextlib
import ctypes
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..collectives import position
from ..collectives.mesh import Mesh
from ..plan.program import START_SECONDS, PlanError, ProgramPlan
from .anomalies import NotFiniteError
from .events import Events
from .options import RunOptions

_OTHERS = {
    "late": ("timed out", "timeout"),
    "lost": ("closed by peer", "reset by peer", "broken pipe", "refused"),
}
"""Errors caused by another rank, by parts of torch's messages: it did not answer in time, or its
connection was lost."""

_ON_DEVICE = "device-side assert"
"""A part of torch's message after a failed check on a GPU; emitted programs check only indices."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""


def as_rank(work: Callable[[RunOptions, Events], int | None]) -> None:
    """Run the work of one rank, without gradients, and end the process. The last event reports the
    end. The work returns the signal that ended it early, if any.

    The interpreter is not finalized: a thread of a process group that outlives it would abort the
    process, and a clean end after an error would wait for other ranks.
    """
    events = Events(int(os.environ.get("RANK", "0")))
    code = 1
    try:
        options = _options()
        _behave(options)
        with torch.no_grad():
            ended_by = work(options, events)
        if dist.is_initialized():
            position.begin()
            dist.barrier()
            dist.destroy_process_group()
        events.send(always=True, event="done")
        code = 128 + ended_by if ended_by else 0
    except PlanError as error:
        events.send(always=True, event="error", kind="plan", message=str(error))
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except NotFiniteError as error:
        events.send(always=True, event="error", kind="values", message=str(error))
        print(f"error: {error}", file=sys.stderr)
    except Exception as error:
        message = f"{type(error).__name__}: {error}".splitlines()[0][:1000]
        if _ON_DEVICE in message:
            message += ": an index is out of range; --backend gloo --device cpu says which"
        events.send(always=True, event="error", kind=error_kind(error), message=message)
        traceback.print_exc()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # full, closed or absent
                stream.flush()
        os._exit(code)


def error_kind(error: BaseException) -> str:
    """Return the origin of an error: the program, or another rank (see _OTHERS)."""
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    found = (kind for kind, parts in _OTHERS.items() if any(part in text for part in parts))
    return next(found, "program")


_PARSER = argparse.ArgumentParser(description="Runs one rank of a compiled program.")
"""Of the options of a rank. It is made here since the fork server imports this file: the ranks have
it when they are forked."""
RunOptions.add_to(_PARSER)


def _options() -> RunOptions:
    _PARSER.prog = os.path.basename(sys.argv[0])
    return RunOptions.parsed(_PARSER.parse_args())


# ---- starting --------------------------------------------------------------------------------


def _behave(options: RunOptions) -> None:
    """End this process with its launcher, and use one thread on a CPU. On Linux, ps and top show
    the rank."""
    launcher = os.environ.get("SHARDIR_LAUNCHER")
    if sys.platform == "linux":
        name = f"rank {os.environ.get('RANK', '0')}"
        ctypes.CDLL(None).prctl(15, name.encode())  # PR_SET_NAME
    if launcher and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != int(launcher):
            sys.exit("the launcher is gone")
    use_processor(options)


def use_processor(options: RunOptions) -> None:
    """Set the threads and the allocator of a rank, before its first process group is made."""
    if options.on_cpus:
        retain_memory()
    if options.on_cpus or options.threads:
        torch.set_num_threads(options.threads or 1)


def retain_memory() -> None:
    """Let glibc keep the memory of freed tensors of up to 32 MiB for later tensors.

    By default it returns the end of its heap to the system when it is large enough; every step then
    maps and clears each page again, about a microsecond a page. Larger tensors have mappings of
    their own, since they would leave gaps in the heap. So would the 2,000 records of collectives
    that torch's flight recorder keeps. NCCL's watchdog writes them to a file, but on CPUs nothing
    reads them, unless TORCH_FR_BUFFER_SIZE is set.

    Call it before the first process group is made.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 25)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _share_cores() -> None:
    """Take longer turns on a core that ranks share: small collectives are five times faster."""
    if hasattr(os, "SCHED_BATCH") and ranks_of_a_core() > 1:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def ranks_of_a_core() -> float:
    """Return the number of ranks per core of this machine, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1.0, int(os.environ.get("LOCAL_WORLD_SIZE", "1")) / (cores or 1))


def memory(device: torch.device) -> int:
    """Return this rank's peak memory in bytes: of tensors on a GPU, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def join_ranks(plan: ProgramPlan, options: RunOptions) -> Mesh:
    """Join the other ranks, unless this process has joined them, and make the process groups and
    channels of a plan. Raises PlanError for a wrong number of ranks, or an unusable backend."""
    rank, given = rank_and_size()
    if given != plan.size:
        raise PlanError(
            f"expected {plan.size} ranks ({plan.mesh_text()}), got {given};"
            f" use `torchrun --nproc-per-node {plan.size} program.py`"
            f" or `shard-run {plan.directory}`"
        )
    mesh = Mesh(plan.axes, rank, join_group(options), timedelta(seconds=options.timeout))
    make_groups(plan, mesh)
    return mesh


def rank_and_size() -> tuple[int, int]:
    """Return the number of this rank, and of all ranks: of the process group of this process, or of
    its environment."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def join_group(options: RunOptions) -> torch.device:
    """Make the process group of all ranks, unless there is one, and return this rank's device.

    Raises:
        PlanError: the backend is unusable here.
    """
    rank, size = rank_and_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if refused := options.refused(-(-size // local)):
        raise PlanError(refused)
    device = device_of(options, int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size > 1 and not dist.is_initialized():
        _share_cores()  # before threads start, which inherit the scheduling
        if options.backend == "shm":
            from .. import shm

            shm.register()
        dist.init_process_group(
            options.backend, rank=rank, world_size=size,
            timeout=timedelta(seconds=options.timeout), store=_launchers_store(rank, size),
        )  # fmt: skip
    return device


def make_groups(plan: ProgramPlan, mesh: Mesh) -> None:
    """Make the process groups and channels of a plan, together with all ranks."""
    for axes in plan.groups:
        mesh.group(axes)
    for channel in plan.channels:
        mesh.connect(*channel)


def device_of(options: RunOptions, local: int, gpus: int) -> torch.device:
    """Return the device of a rank, by its number on its machine and the machine's number of GPUs.

    Raises:
        PlanError: the machine has too few GPUs.
    """
    kind = options.device or ("cuda" if options.backend == "nccl" else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    shares = options.backend == "gloo"
    if not gpus or (local >= gpus and not shares):
        needed = 1 if shares else local + 1
        raise PlanError(
            f"rank {local} of a machine: expected {needed} GPUs or more, got {gpus}; use "
            + ("--device cpu" if shares else "gloo")
        )
    return torch.device("cuda", local % gpus)


def _launchers_store(rank: int, size: int) -> Any:
    """Return the store of the launcher, where all ranks meet; None for torchrun's. Rank 0 serves it
    on the socket that the launcher opened, so that no other process takes the port."""
    socket = os.environ.get("SHARDIR_STORE_FD")
    if socket is None:
        return None
    store: Any = dist.TCPStore
    timeout = timedelta(seconds=START_SECONDS)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        return store(host, port, size, True, timeout, master_listen_fd=int(socket))
    return store(host, port, size, False, timeout)
