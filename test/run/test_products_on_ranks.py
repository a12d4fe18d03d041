"""Products in steps on real ranks: the losses and parameters of the same program without them."""

from pathlib import Path

import numpy as np
import pytest
from support.extent import extent

import shardir
from shardir.backend.interface import Options
from shardir.backend.torch.launch.start import run

ROWS = Path(__file__).parents[1] / "filecheck" / "decompose-collective-products" / "rows.ir"
IN_STEPS = "train,decompose-collective-products{always=true}"
MESHES = {
    "tp = 4": "{tp}",
    "dp = 2, tp = 2": "{dp, tp}",
}
"""Each with the axes of the rows: those of two groups are gathered in each one's order."""


def ran(text: str, pipeline: str, out: Path) -> dict[str, np.ndarray]:
    """The losses and states of a program after 3 steps on 4 ranks."""
    directory = shardir.compile(text, pipeline).save(out)
    run(directory, Options(steps=3, timeout=60, dump=out / "found.npz"))
    return dict(np.load(out / "found.npz"))


@pytest.mark.parametrize("mesh", extent(["tp = 4"], [*MESHES]))
def test_losses_and_parameters_are_those_without_steps(mesh: str, tmp_path: Path) -> None:
    text = ROWS.read_text().replace("tp = 4", mesh)
    rows = "32x8xf32, #dist.layout<@m, ["
    text = text.replace(rows + "{tp}", rows + MESHES[mesh])
    expected = ran(text, "train", tmp_path / "apart")
    found = ran(text, IN_STEPS, tmp_path / "steps")
    program = (tmp_path / "steps" / "program.py").read_text()
    assert program.count("rt.gathered_product(") == 2
    assert program.count("rt.scattered_product(") == (mesh == "tp = 4")  # else a slice is between
    assert found.keys() == expected.keys()
    assert (np.diff(expected["losses/step"]) != 0).all()
    for key, x in expected.items():
        np.testing.assert_allclose(found[key], x, rtol=1e-5, atol=1e-6, err_msg=key)
