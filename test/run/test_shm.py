"""The backend `shm` of torch.distributed: ranks of one machine, which share memory.

test_runtime.py has the runtime's collectives on it, too.
"""

from pathlib import Path

import pytest
from extent import extent
from forked import run_ranks

pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("case", "seed"),
    [("sequences", seed) for seed in range(extent(2, 40))]
    + [(case, 0) for case in ("dropped", "steady", "special", "mismatch", "ended")],
)
def test_operations(case, seed, tmp_path):
    script, ranks = Path(__file__).parent / "shm_rank.py", 4
    found = run_ranks(script, ranks, [case, ranks, tmp_path / "store", seed], 100)
    for rank, out in enumerate(found):
        assert f"rank {rank}: passed" in out or (case, rank) == ("ended", 2), out
