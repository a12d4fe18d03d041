"""Functions under limits of CPU time and memory, each in a process of its own."""

import os
import pickle
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

SECONDS = 20
"""The CPU seconds of a process, after which it hangs: what is well takes less than a tenth. A
process that waits has ten times as long."""
BYTES = 10**9
"""The memory of a process beyond that of its parent."""


def problems_of(problems: Callable[[], list[str]]) -> list[str]:
    """Return the problems that a function finds, in a fork of this process. An exception, and an
    end beyond the limits, are others."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result")
        child = os.fork()
        if child == 0:
            try:
                sys.stderr = sys.__stderr__
                resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
                signal.alarm(10 * SECONDS)  # ends it where it waits for a lock of a lost thread
                mapped = int(Path("/proc/self/statm").read_text().split()[0])
                limit = mapped * resource.getpagesize() + BYTES
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
                try:
                    found = problems()
                except BaseException:
                    found = [traceback.format_exc()[-1500:]]
                result.write_bytes(pickle.dumps(found))
            finally:
                os._exit(0)
        _, status, used = os.wait4(child, 0)
        if not result.exists():
            return [f"ended with status {status} after {used.ru_utime:.0f} CPU seconds"]
        return pickle.loads(result.read_bytes())
