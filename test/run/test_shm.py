"""The backend `shm` of torch.distributed: ranks of one machine, which share memory.

test_runtime.py has the runtime's collectives on it, too.
"""

import re
from pathlib import Path

import pytest
from support.device import on_cpu
from support.extent import extent
from support.forked import run_ranks

pytest.importorskip("torch")

from shardir.tools import run as tool

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PER_RANK = ("mlp_by_hand", "modes_manual", "parameter_server", "ring_attention",
            "split_softmax_by_hand")  # fmt: skip
"""Those that are written per rank: no program for one device stands beside them."""


@pytest.mark.parametrize(
    ("case", "seed"),
    [("sequences", seed) for seed in range(extent(1, 40))]
    + [(c, 0) for c in ("dropped", "steady", "special", "posted", "unordered", "mismatch", "left",
                        "absent", "ended")],
)  # fmt: skip
def test_operations(case, seed, tmp_path):
    script, ranks = Path(__file__).parent / "shm_rank.py", 4
    found = run_ranks(script, ranks, [case, ranks, tmp_path / "store", seed], 100)
    for rank, out in enumerate(found):
        assert f"rank {rank}: passed" in out or (case, rank) == ("ended", 2), out


@on_cpu("shm has no tensors on GPUs")
@pytest.mark.parametrize(
    "name", extent(["ulysses"], sorted(path.stem for path in EXAMPLES.glob("*.ir")))
)
def test_examples_equal_one_device(name, capsys):
    words = [str(EXAMPLES / f"{name}.ir"), "--steps", "3", "--backend", "shm"]
    checked = name not in PER_RANK
    assert tool.main([*words, "--check"] if checked else words) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^\d+ ranks on shm$", shown, re.M), shown
    assert ("agree" in shown) == checked


def test_on_two_machines_it_is_refused(capsys):
    words = [str(EXAMPLES / "ulysses.ir"), "--backend", "shm", "--nnodes", "2"]
    assert tool.main(words) == 2
    assert "error: --backend shm: expected one machine, got 2; use gloo" in capsys.readouterr().err
