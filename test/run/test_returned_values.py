"""Returned values hold no other memory: a loss is reduced in one buffer with the gradients, and a
caller that retains losses must not retain those buffers. The storages are torch's, on real ranks.
"""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

from support.extent import extent
from support.forked import run_ranks
from support.ranks import returned_rank
from support.ranks.example_runs import EXAMPLES
from support.ranks.returned_rank import RANKS, SECONDS

import shardir


def examples() -> list[str]:
    """Return the examples for 4 ranks whose data are in their text."""
    found = []
    for path in sorted(EXAMPLES.glob("*.ir")):
        text = path.read_text()
        mesh = re.search(r"^dist\.mesh @\w+ <(.*?)>", text, re.MULTILINE)
        sizes = re.findall(r"= (\d+)", mesh[1]) if mesh else []
        is_split = sizes in (["4"], ["2", "2"])
        if is_split and "#train.init<file" not in text and "#train.init<batches" not in text:
            found.append(path.stem)
    return found


def test_a_returned_value_has_no_larger_storage(tmp_path: Path) -> None:
    for name in extent(["modes", "matmul_partial_groups"], examples()):
        shardir.compile_file(EXAMPLES / f"{name}.ir").save(tmp_path / name)
    output = run_ranks(Path(returned_rank.__file__), RANKS, [tmp_path], SECONDS)
    assert (tmp_path / "found.json").exists(), output
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) >= extent(2, 20)
    for name, results in found.items():
        for result, (updates, own, together, all_) in results.items():
            # Parameters may live in one buffer, which has nothing else.
            assert all_ <= (together if updates else own), (name, result)
