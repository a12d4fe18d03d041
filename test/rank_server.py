"""A process that has imported torch and forks ranks: `python rank_server.py FD` (see forked.py).

A rank that is forked starts in milliseconds; one that is started imports torch first, which takes
longer than most tests. The runtime, of which each program has a copy, is compiled once. Each rank
is a process of its own with a session of its own, so nothing of a job remains for the next one, and
one that dies does not affect the others.

Each message on the socket FD is a request, {"argv", "env", "cwd", "fds"}, with the files that
become the rank's output and its file descriptors `fds`. The answers are {"pid"} and, when the rank
has ended, {"pid", "code"}. The process ends when the other end of the socket is closed.
"""

import ctypes
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from importlib import machinery
from pathlib import Path
from types import CodeType

import numpy  # noqa: F401 - what ranks import
import torch.distributed as dist
import torch.distributed.checkpoint.hf_storage  # noqa: F401 - what ranks with checkpoints import

MESSAGE, FILES = 1 << 18, 8
PR_SET_PDEATHSIG = 1
RUNTIME = Path(__file__).parents[1] / "shardir" / "backend" / "torch" / "runtime"
COMPILED = {path.read_bytes(): compile(path.read_bytes(), path, "exec", dont_inherit=True)
            for path in RUNTIME.glob("*.py")}  # fmt: skip
"""The code of the runtime's files by their content."""


class Loader(machinery.SourceFileLoader):
    """Python's own, but for copies of the runtime's files, which are compiled already."""

    def source_to_code(self, data, path, *, _optimize: int = -1) -> CodeType:
        found = COMPILED.get(bytes(data)) if isinstance(data, bytes | memoryview) else None
        return found or super().source_to_code(data, path)


def serve(requests: socket.socket) -> None:
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            os.read(woken, MESSAGE)
            for pid, status in ended():
                code = os.waitstatus_to_exitcode(status)
                requests.send(json.dumps({"pid": pid, "code": code}).encode())
        if requests in ready:
            message, files, _, _ = socket.recv_fds(requests, MESSAGE, FILES)
            if not message:
                return
            begun, begin = os.pipe()
            pid = os.fork()
            if pid == 0:
                requests.close()
                rank(json.loads(message), files, begin)
            for file in (*files, begin):
                os.close(file)
            os.read(begun, 1)  # until its session is made, to which signals are sent
            os.close(begun)
            requests.send(json.dumps({"pid": pid}).encode())


def ended() -> list[tuple[int, int]]:
    found = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found.append((pid, status))


def rank(request: dict, files: list[int], begin: int) -> None:
    """Runs the program as `python argv...` does, and ends the process."""
    code = 1
    try:
        os.setsid()
        os.close(begin)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        numbers = [1, *request["fds"]]
        waiting = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in files]
        for file, number in zip(waiting, numbers, strict=True):
            os.dup2(file, number)
            os.close(file)
        os.dup2(1, 2)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"], SHARDIR_LAUNCHER=str(os.getppid()))
        # which torch does when it is imported
        dist.set_debug_level_from_env()
        sys.argv = request["argv"]
        folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:1] = [os.path.dirname(sys.argv[0]), *filter(None, folders)]
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as e:
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    loaders = [
        (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
        (Loader, machinery.SOURCE_SUFFIXES),
        (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
    ]
    sys.path_hooks.insert(0, machinery.FileFinder.path_hook(*loaders))
    sys.dont_write_bytecode = True
    gc.freeze()  # so that no rank traverses, and thereby copies, what it shares with this process
    serve(socket.socket(fileno=int(sys.argv[1])))
