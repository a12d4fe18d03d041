"""The process that forks the servers of a process of pytest, which fork the ranks of its tests:
fork_server.py, for more than one program.

The runtime, of which each program has a copy, is imported once: a rank of a program with the same
files begins with its modules. Any other copy is imported by its rank.
"""

import gc
import importlib
import os
import signal
import socket
import sys
from importlib import machinery
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from shardir.backend.torch.directory import RUNTIME
from shardir.backend.torch.launch import fork_server

COMPILED = {path.read_bytes(): compile(path.read_bytes(), path, "exec", dont_inherit=True)
            for path in RUNTIME.rglob("*.py")}  # fmt: skip
"""The code of the runtime's files by their content."""

OF_PROGRAMS = "runtime", "run", "ops", "stages", "checkpoints", "shm"
"""The parts of the runtime that programs import."""


class Loader(machinery.SourceFileLoader):
    """Python's own, but for copies of the runtime's files, which are compiled already."""

    def source_to_code(self, data, path, *, _optimize: int = -1) -> CodeType:
        found = COMPILED.get(bytes(data)) if isinstance(data, bytes | memoryview) else None
        return found or super().source_to_code(data, path)


def import_runtime() -> dict[Path, tuple[ModuleType, bytes]]:
    """Import the runtime under the name that programs use, and under that of the compiler, which
    scripts of tests use. Return the first modules, each by its file relative to the folder of a
    program, with the content of the file."""
    sys.path.insert(0, str(RUNTIME.parent))
    for part in OF_PROGRAMS:
        for path in [RUNTIME / f"{part}.py", *sorted((RUNTIME / part).glob("*.py"))]:
            if path.exists():
                words = path.relative_to(RUNTIME.parent).with_suffix("").parts
                name = ".".join(words).removesuffix(".__init__")
                importlib.import_module(name)
                importlib.import_module(f"shardir.backend.torch.{name}")
    sys.path.remove(str(RUNTIME.parent))
    return {
        file.relative_to(RUNTIME.parent): (module, file.read_bytes())
        for name, module in sys.modules.items()
        if name.partition(".")[0] == RUNTIME.name and (file := Path(str(module.__file__)))
    }


def give_runtime(folder: Path, modules: dict[Path, tuple[ModuleType, bytes]]) -> None:
    """Make the imported runtime that of the program in a folder, if its files are the same; else
    forget it."""
    try:
        same = all((folder / file).read_bytes() == data for file, (_, data) in modules.items())
    except OSError:
        same = False
    for file, (module, _) in modules.items():
        if not same:
            del sys.modules[module.__name__]
            continue
        module.__file__ = str(folder / file)
        if hasattr(module, "__path__"):
            module.__path__ = [str(folder / file.parent)]


def import_compilers() -> None:
    """Import what ranks that compile need besides the modules of a program."""
    import torch._dynamo
    import torch.distributed.optim
    import torch.distributed.pipelining
    import torch.export  # noqa: F401 - for the scripts
    import torchdata.stateful_dataloader.sampler  # noqa: F401 - for loaders

    import shardir
    from shardir.syntax.parser import default_parser

    _ = shardir.compile, shardir.start
    default_parser()
    gc.freeze()  # so that no rank traverses, and thereby copies, what is imported here


def serve(sockets: socket.socket) -> None:
    """For each socket received, fork a process that forks others as fork_server.py does, with both
    compilers if the byte beside it is a c."""
    modules, run = import_runtime(), fork_server.run

    def run_with_runtime(request: dict[str, Any], files: list[int], begin: int, server: int):
        give_runtime(Path(request["argv"][0]).absolute().parent, modules)
        run(request, files, begin, server)

    fork_server.run = run_with_runtime
    fork_server.prepare()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the servers
    parent = os.getpid()
    while True:
        kind, received, _, _ = socket.recv_fds(sockets, 1, 1)
        if not kind:
            return
        if os.fork() == 0:
            fork_server.end_with(parent)
            sockets.close()
            requests = socket.socket(fileno=received[0])
            requests.sendall(str(os.getpid()).encode())
            if kind == b"c":
                import_compilers()
            fork_server.serve(requests)
            os._exit(0)
        os.close(received[0])


if __name__ == "__main__":
    fork_server.end_with(int(sys.argv[1]))
    import numpy.random  # noqa: F401 - for the scripts
    import torch.distributed.checkpoint.hf_storage  # noqa: F401 - what ranks with checkpoints import

    loaders = [
        (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
        (Loader, machinery.SOURCE_SUFFIXES),
        (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
    ]
    sys.path_hooks.insert(0, machinery.FileFinder.path_hook(*loaders))
    sys.dont_write_bytecode = True
    serve(socket.socket(fileno=int(sys.argv[2])))
