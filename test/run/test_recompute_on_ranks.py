"""Steps that repeat a part of their forward part, on real ranks: bit by bit the same as without."""

from pathlib import Path

import numpy as np
import pytest
from support.extent import extent

pytest.importorskip("torch")

import shardir
from shardir.backend.interface import Options
from shardir.backend.torch.launch.start import run

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "transformer_block.ir"

CHOSEN = {
    "full": "train{recompute=full recompute-collectives=true}",
    "host": "train{recompute=0.7 offload=true}",
} | extent({}, {"dots": "train{recompute=dots}", "budget": "train{recompute=0.9}"})


def ran(pipeline: str, out: Path) -> dict[str, np.ndarray]:
    """The losses and states of the example after 3 steps on 4 ranks."""
    directory = shardir.compile(EXAMPLE.read_text(), pipeline).save(out)
    run(directory, Options(steps=3, timeout=60, dump=out / "found.npz"))
    return dict(np.load(out / "found.npz"))


def test_losses_and_parameters_are_the_same_bit_by_bit(tmp_path: Path) -> None:
    expected = ran("train", tmp_path / "kept")
    assert (np.diff(expected["losses/step"]) != 0).all()
    for name, pipeline in CHOSEN.items():
        found = ran(pipeline, tmp_path / name)
        assert found.keys() == expected.keys()
        assert all(found[key].tobytes() == x.tobytes() for key, x in expected.items()), name
        program = (tmp_path / name / "program.py").read_text()
        assert program != (tmp_path / "kept" / "program.py").read_text()


def test_a_budget_is_an_option_of_compile(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    peak = shardir.compile(text).cost().memory.peak
    compiled = shardir.compile(text, recompute=0.9)
    assert compiled.cost().memory.peak <= 0.9 * peak
    assert shardir.compile(text, recompute=f"{int(0.9 * peak)}").text == compiled.text
    with pytest.raises(shardir.ShardirError, match="expected the pass choose-recompute"):
        shardir.compile(text, "propagate-strategies", recompute="full")
    with pytest.raises(shardir.ShardirError, match=r"expected full, dots, off, .* got 'half'"):
        shardir.compile(text, recompute="half")
