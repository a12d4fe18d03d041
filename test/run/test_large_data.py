"""Training on a file of tokens that is larger than memory should be: long form only."""

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from extent import LONG

import shardir
from shardir.backend.runs import Options
from shardir.backend.torch.launch.start import run

pytestmark = [
    pytest.mark.started_ranks,
    pytest.mark.skipif(not LONG, reason="the long form: a file of 10 GB"),
]

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "tokens.ir"
BYTES, BATCH, LENGTH, STEPS, RANKS = 10 << 30, 16, 32, 4000, 4


def anonymous(directory: Path) -> dict[int, int]:
    """Return the bytes of memory of each rank of a directory, without pages of files."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            status = (process / "status").read_text()
        except OSError:  # it has ended
            continue
        if str(directory / "program.py").encode() in words:
            number = status.split("RssAnon:")[1].split()[0]
            found[int(process.name)] = int(number) << 10
    return found


def cached(path: Path) -> int:
    """Return the bytes of a file that are in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        start = np.frombuffer(pages, np.uint8)
        states = np.zeros(-(-len(pages) // mmap.PAGESIZE), np.uint8)
        code = libc.mincore(
            ctypes.c_void_p(start.ctypes.data), ctypes.c_size_t(len(pages)),
            states.ctypes.data_as(ctypes.c_void_p),
        )  # fmt: skip
        del start
    assert code == 0
    return int((states & 1).sum()) * mmap.PAGESIZE


def test_memory_is_constant_and_only_pages_of_rows_are_read(tmp_path):
    """The file has no blocks on disk; what is read of it is in the cache. Few rows of 32 bytes are
    in two pages, and few are in one page."""
    path = tmp_path / "tokens.bin"
    path.touch()
    os.truncate(path, BYTES)
    directory = shardir.compile_file(EXAMPLE, "train").save(tmp_path / "out").resolve()
    samples: list[dict[int, int]] = []

    def sample(event):
        if event["event"] == "steps":
            samples.append(anonymous(directory))

    options = Options.of({"steps": STEPS, "data": {"tokens,targets": f"{path}:u8"}})
    report = run(directory, options, on_event=sample)
    assert len(report.losses["step"]) == STEPS
    samples = [each for each in samples if len(each) == RANKS]
    early, late = samples[len(samples) // 4], samples[-1]
    assert len(samples) >= 8
    for pid, size in early.items():
        assert late[pid] - size < 8 << 20
    pages = cached(path) / mmap.PAGESIZE
    assert 0.95 * STEPS * BATCH < pages < 1.05 * STEPS * BATCH
