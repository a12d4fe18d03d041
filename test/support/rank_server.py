"""The process that forks the ranks of all tests: fork_server.py, for more than one program.

The runtime, of which each program has a copy, is compiled once.
"""

import socket
import sys
from importlib import machinery
from pathlib import Path
from types import CodeType

sys.path.insert(0, str(Path(__file__).parents[2]))

from shardir.backend.torch.directory import RUNTIME
from shardir.backend.torch.launch import fork_server

COMPILED = {path.read_bytes(): compile(path.read_bytes(), path, "exec", dont_inherit=True)
            for path in RUNTIME.rglob("*.py")}  # fmt: skip
"""The code of the runtime's files by their content."""


class Loader(machinery.SourceFileLoader):
    """Python's own, but for copies of the runtime's files, which are compiled already."""

    def source_to_code(self, data, path, *, _optimize: int = -1) -> CodeType:
        found = COMPILED.get(bytes(data)) if isinstance(data, bytes | memoryview) else None
        return found or super().source_to_code(data, path)


if __name__ == "__main__":
    fork_server.end_with(int(sys.argv[1]))
    import torch.distributed.checkpoint.hf_storage  # noqa: F401 - what ranks with checkpoints import

    fork_server.prepare()
    loaders = [
        (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
        (Loader, machinery.SOURCE_SUFFIXES),
        (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
    ]
    sys.path_hooks.insert(0, machinery.FileFinder.path_hook(*loaders))
    sys.dont_write_bytecode = True
    fork_server.serve(socket.socket(fileno=int(sys.argv[2])))
