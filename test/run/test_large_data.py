"""Training on a file of tokens that is larger than memory should be: long form only."""

import ctypes
import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from support.extent import LONG

import shardir
from shardir.backend.runs import Options
from shardir.backend.torch.launch.start import run

pytestmark = [
    pytest.mark.started_ranks,
    pytest.mark.skipif(not LONG, reason="the long form: a file of 10 GB"),
]

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "tokens.ir"
BYTES, BATCH, LENGTH, STEPS, RANKS = 10 << 30, 16, 32, 4000, 4


def anonymous() -> dict[int, int]:
    """Return the bytes of memory of each rank of this process, without pages of files."""
    found, parents = dict[int, dict[str, str]](), dict[int, int]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            lines = (process / "status").read_text().splitlines()
            fields = dict(line.split(":\t", 1) for line in lines)
            parents[int(process.name)] = int(fields["PPid"])
            if fields["Name"].startswith("rank ") and "RssAnon" in fields:  # not one that ended
                found[int(process.name)] = fields
    mine = {pid: f for pid, f in found.items() if parents.get(parents[pid]) == os.getpid()}
    return {pid: int(f["RssAnon"].split()[0]) << 10 for pid, f in mine.items()}


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
    directory = shardir.compile_file(EXAMPLE, "train").save(tmp_path / "out")
    samples: list[dict[int, int]] = []

    def sample(event):
        if event["event"] == "steps":
            samples.append(anonymous())

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
