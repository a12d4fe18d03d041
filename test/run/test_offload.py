"""Programs with parameters, states and a table `on host`, on real ranks: bit by bit the same as
without it."""

import re
from pathlib import Path

import numpy as np
import pytest
from support.device import DEVICE
from support.extent import sampled

import shardir
from shardir.backend.interface import Options
from shardir.backend.torch.launch.start import run

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "offload.ir"

PLANS = {
    "states": '"*" : [], states [{dp}] on host',
    "parameters": '"w{1,2}" : [{tp}] on host, recompute\n"table" : [{dp}] on host',
}


def ran(text: str, out: Path, plan: str | None = None) -> dict[str, np.ndarray]:
    """The losses and states of a program after 3 steps on 4 ranks."""
    directory = shardir.compile(text, plan=plan).save(out)
    run(directory, Options(steps=3, timeout=60, dump=out / "found.npz"))
    return dict(np.load(out / "found.npz"))


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    """Whether all bits are; beside a GPU, whose host has other kernels, all values."""
    assert one.keys() == other.keys()
    if DEVICE != "cpu":
        return all(np.allclose(one[key], other[key], rtol=1e-5, atol=1e-6) for key in one)
    return all(one[key].tobytes() == other[key].tobytes() for key in one)


def test_the_example_is_the_same_bit_by_bit(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    found = ran(text, tmp_path / "host")
    assert same(found, ran(text.replace(", on host", ""), tmp_path / "device"))
    assert (np.diff(found["losses/step"]) != 0).all()


@pytest.mark.parametrize("name", sampled(PLANS, 1))
def test_a_plan_is_the_same_bit_by_bit(name: str, tmp_path: Path) -> None:
    text = re.sub(r"(, train.state_layout =|,) #dist.layout<[^>]*>", "", EXAMPLE.read_text())
    plan = f"inputs : [{{dp}}]\n{PLANS[name]}"
    found = ran(text, tmp_path / "host", plan=plan)
    assert same(found, ran(text, tmp_path / "device", plan=plan.replace(" on host", "")))


def test_a_checkpoint_is_of_any_memory(tmp_path: Path) -> None:
    """A run with host memory goes on from the checkpoint of one without."""
    text = EXAMPLE.read_text()
    directories = [
        shardir.compile(t).save(tmp_path / name)
        for name, t in (("device", text.replace(", on host", "")), ("host", text))
    ]
    saved = tmp_path / "saved"
    for directory, steps in zip(directories, (2, 3), strict=True):
        run(
            directory,
            Options(
                steps=steps, timeout=60, dump=tmp_path / "found.npz", checkpoints=saved,
                resume=saved if steps > 2 else None,
            ),
        )  # fmt: skip
    found = dict(np.load(tmp_path / "found.npz"))
    through = ran(text, tmp_path / "through")
    states = [key for key in through if key.startswith("states/")]
    assert states and same(*({key: x[key] for key in states} for x in (found, through)))
