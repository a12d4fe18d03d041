"""A process that has imported torch and forks ranks: `python -P fork_server.py LAUNCHER FD`.

A forked rank starts in milliseconds. A new process would import torch, which takes longer than
everything else before its first step. This file runs alone, and needs only torch.

The socket FD has a JSON object on each line. The launcher (forks.py) sends

1. {"argv", "env", "cwd", "open_files", "fds"}: start a process like `python argv...`, in a session
   of its own. The line comes with files: the first is the output, the rest become the descriptors
   `fds`. The answer is {"pid"} or {"error"}; {"pid", "code"} follows at the end of the process.
2. {"reap": pid}: release the number of an ended process. The answer is {"pid"}.
3. {"import": folder}: import the runtime beside a program, before its ranks are forked.

All processes end when the launcher closes its end of the socket.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import traceback
from typing import Any

FILES = 8
CHUNK = 1 << 16
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


def end_with(parent: int) -> None:
    """End when the parent does, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def be_called(name: str) -> None:
    """Let ps and top show a name, on Linux: a fork has the command line of this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def prepare() -> None:
    """Import the modules that ranks need. A rank reports an error that occurs here."""
    gc.disable()
    if sys.platform == "linux":  # on macOS no process may fork that has used the system's libraries
        with contextlib.suppress(Exception):
            import numpy  # noqa: F401 - the ranks use it
            import torch.distributed  # noqa: F401 - the ranks use it
    gc.freeze()  # so that no rank traverses, and thereby copies, objects shared with this process
    gc.enable()


def serve(requests: socket.socket) -> None:
    """Fork processes until the other end of the socket is closed; end all of them then."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    running, ended, text, files = set[int](), set[int](), b"", list[int]()
    try:
        while True:
            ready, _, _ = select.select([requests, woken], [], [])
            if woken in ready:
                os.read(woken, CHUNK)
                for pid, code in _codes(running):
                    running.remove(pid)
                    ended.add(pid)
                    _send(requests, pid=pid, code=code)
            if requests not in ready:
                continue
            data, received, _, _ = socket.recv_fds(requests, CHUNK, FILES)
            if not data:
                return
            *lines, text = (text + data).split(b"\n")
            files += received
            for line in lines:
                request = json.loads(line)
                if "import" in request:
                    _import_runtime(request["import"])
                    continue
                if "reap" in request:
                    _reap(request["reap"])
                    ended.discard(request["reap"])
                    _send(requests, pid=request["reap"])
                    continue
                try:
                    pid = _fork(request, files, requests)
                except OSError as error:
                    _send(requests, error=error.strerror)
                else:
                    running.add(pid)
                    _send(requests, pid=pid)
                finally:
                    for file in files:
                        os.close(file)
                    files = []
    except ConnectionError:
        return
    finally:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in running | ended:
            _reap(pid)


def _import_runtime(folder: str) -> None:
    """Import the modules that the ranks of a program will import. An error that occurs here occurs
    in the ranks too."""
    sys.path.insert(0, folder)
    with contextlib.suppress(Exception):
        importlib.import_module("shardir_runtime.run.main")
    sys.path.remove(folder)  # a rank has it first, as Python does


def _send(requests: socket.socket, **answer: Any) -> None:
    requests.sendall(json.dumps(answer).encode() + b"\n")


def _codes(running: set[int]) -> list[tuple[int, int]]:
    """Return the processes that have ended, which are not reaped, with their exit codes; -N where
    signal N has ended one."""
    found = []
    for pid in running:
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                found.append((pid, os.waitstatus_to_exitcode(status)))
        elif end := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            exited = end.si_code == os.CLD_EXITED
            found.append((pid, end.si_status if exited else -end.si_status))
    return found


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _fork(request: dict[str, Any], files: list[int], requests: socket.socket) -> int:
    """Fork a process; return once it leads its session, which receives signals."""
    server = os.getpid()
    begun, begin = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            requests.close()
            os.close(begun)
            run(request, files, begin, server)
        os.close(begin)
        begin = -1
        os.read(begun, 1)
        return pid
    finally:
        os.close(begun)
        if begin >= 0:
            os.close(begin)


def run(request: dict[str, Any], files: list[int], begin: int, server: int) -> None:
    """Run the program as `python argv...` does, and end the process."""
    code = 1
    try:
        os.setsid()
        os.close(begin)
        end_with(server)
        if (rank := request["env"].get("RANK")) is not None:
            be_called(f"rank {rank}")
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        numbers = [1, *request["fds"]]
        waiting = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in files]
        for file, number in zip(waiting, numbers, strict=True):
            os.dup2(file, number)
            os.close(file)
        os.dup2(1, 2)
        resource.setrlimit(resource.RLIMIT_NOFILE, request["open_files"])
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"], SHARDIR_LAUNCHER=str(server))
        if "torch" in sys.modules:  # repeats the effects of its import
            import torch.distributed as dist

            dist.set_debug_level_from_env()
        sys.argv = request["argv"]
        folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [os.path.dirname(sys.argv[0]), *filter(None, folders)]
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
    end_with(int(sys.argv[1]))
    prepare()
    serve(socket.socket(fileno=int(sys.argv[2])))
